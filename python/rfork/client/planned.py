"""A planner as a source of seeds, with known addresses behind it for when it is gone."""

from __future__ import annotations

import logging
from collections import deque

import msgspec

from rfork.client.resolve import Candidate
from rfork.client.sources import Addresses, Offer
from rfork.clock import Clock
from rfork.config import Config
from rfork.errors import RForkError, SeedError, SeedRefused
from rfork.identity import ANY_LIVE, Content, InstanceId, ModelIdentity, instance_key
from rfork.planner.client import PlannerClient, PlannerUnavailable, seek, storage_jitter_s
from rfork.wire import planner as wire
from rfork.wire.planner import Ask, FallBack, ForkFrom, Outcome, ReadDisk, Report
from rfork.wire.seed import WeightsReport

logger = logging.getLogger(__name__)

MAX_EXCLUDED = 32


class Planned:
    """Asks the planner until it names a seed, sends this instance to the disk, or gives up.

    Every candidate that it names is tried, then it is asked again without those. While no planner answers, `fallback`
    is asked, and before the disk is read without a claim there is a wait that differs between instances.
    """

    def __init__(
        self,
        planner: PlannerClient,
        fallback: Addresses,
        settings: Config,
        clock: Clock,
        *,
        instance_id: InstanceId,
        identity: ModelIdentity,
        content: Content,
        listener: str = "",
    ) -> None:
        self._planner, self._fallback, self._settings, self._clock = planner, fallback, settings, clock
        wanted = content if settings.weights == "checkpoint" else ANY_LIVE
        self._ask = Ask(
            client=instance_id,
            instance_key=instance_key(identity, wanted),
            allow_disk=settings.weights == "checkpoint",
            listener=listener,
            labels=settings.labels,
            identity=identity.fields,
        )
        self._candidates: deque[Candidate] = deque()
        self._excluded: list[str] = []
        self._problems: list[str] = []
        self._reason = "no_seed"
        self._planner_is_gone = False

    @property
    def bound_s(self) -> float:
        settings = self._settings
        return settings.plan_timeout_s + settings.seek_timeout_s + settings.storage_jitter_s + self._fallback.bound_s

    def next(self) -> Offer:
        if self._planner_is_gone:
            return self._without_planner()
        if self._candidates:
            return Offer(self._candidates.popleft())
        ask = msgspec.structs.replace(self._ask, exclude=self._excluded[-MAX_EXCLUDED:])
        try:
            answer = seek(
                self._planner,
                ask,
                bound_s=self._settings.plan_timeout_s,
                outage_s=min(20.0, self._settings.seek_timeout_s),
                clock=self._clock,
            )
        except RForkError as error:
            logger.warning("rfork: going on without a planner: %s", error)
            self._planner_is_gone = isinstance(error, PlannerUnavailable)
            self._problems.append(str(error))
            self._reason = error.reason
            return self._without_planner() if self._planner_is_gone else self._nobody()
        match answer:
            case ForkFrom(candidates):
                self._candidates.extend(_candidate(c) for c in candidates)
                return self.next() if self._candidates else self._nobody()
            case ReadDisk():
                why = "; ".join([*self._problems, "the planner chose this instance to read the disk for its fleet"])
                return Offer(reason="elected", why=why, elected=True)
            case FallBack(reason, waited_s, nearest):
                near = "; ".join(_nearest(n) for n in nearest[:2])
                self._problems.append(
                    f"the planner has no seed ({reason}, after {waited_s:.0f} s)" + (f": {near}" if near else "")
                )
                return self._nobody()

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        if self._planner_is_gone:
            self._fallback.failed(candidate, error)
            return
        self._problems.append(f"{candidate.instance_id} at {candidate.listener}: {error}")
        self._reason = error.reason
        self._excluded.append(candidate.instance_id)
        outcome = Outcome.REFUSED if isinstance(error, SeedRefused) else Outcome.FAILED
        self._report(outcome, candidate.instance_id, error.reason, str(error))

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None:
        self._report(Outcome.LOADED, candidate.instance_id, "", "", report)

    def _nobody(self) -> Offer:
        self._report(Outcome.FELL_BACK, "", self._reason, "; ".join(self._problems))
        return Offer(reason=self._reason, why="; ".join(dict.fromkeys(self._problems)))

    def _without_planner(self) -> Offer:
        offer = self._fallback.next()
        if offer.candidate is not None:
            return offer
        wait_s = storage_jitter_s(self._ask.client, self._settings.storage_jitter_s)
        logger.warning("rfork: no planner and no other seed; reading the disk in %.1f s", wait_s)
        self._clock.sleep(wait_s)
        return Offer(reason=self._reason, why="; ".join([*dict.fromkeys(self._problems), offer.why]))

    def _report(
        self, outcome: Outcome, seed: str, reason: str, detail: str, weights: WeightsReport | None = None
    ) -> None:
        try:
            self._planner.report(
                Report(
                    client=self._ask.client,
                    instance_key=self._ask.instance_key,
                    outcome=outcome,
                    seed=seed,
                    reason=reason,
                    detail=detail[:500],
                    nbytes=weights.nbytes if weights else 0,
                    phases_s=weights.phases_s if weights else {},
                )
            )
        except RForkError as error:
            logger.info("rfork: the planner was not told (%s): %s", outcome.value, error)


def planner_of(settings: Config) -> PlannerClient | None:
    """A client of the planner that the settings name, if they name one. Raises ConfigError."""
    if settings.planner_url is None:
        return None
    return PlannerClient(settings.planner_url, verify=settings.ca_file or True)


def _candidate(found: wire.Candidate) -> Candidate:
    return Candidate(
        address=found.listener,
        instance_id=found.instance_id,
        listener=found.listener,
        state="serving",
        generation=found.generation,
        instance_key=found.instance_key or None,
        content=found.content or None,
    )


def _nearest(near: wire.Nearest) -> str:
    shown = ", ".join(
        f"{name} {here!r} here, {there!r} there" for name, (here, there) in list(near.differs.items())[:3]
    )
    return f"nearest is {', '.join(near.instances[:2])}, which differs in {near.num_differing} fields: {shown}"
