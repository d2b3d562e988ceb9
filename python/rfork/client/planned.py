"""A planner as a source of seeds, with known addresses behind it for when it is gone or knows nobody."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable

import msgspec

from rfork.auth import is_vouched
from rfork.client.resolve import Candidate
from rfork.client.sources import Addresses, Offer, signer_of, tls_of
from rfork.clock import Clock
from rfork.config import Config
from rfork.errors import RForkError, SeedError, SeedRefused
from rfork.identity import ANY_LIVE, Content, InstanceId, ModelIdentity, instance_key
from rfork.keys import keyring
from rfork.planner.client import PlannerClient
from rfork.planner.seek import seek, storage_jitter_s
from rfork.wire import planner as wire
from rfork.wire.planner import Ask, FallBack, ForkFrom, Outcome, ReadDisk, Report
from rfork.wire.seed import WeightsReport

log = logging.getLogger("rfork")

MAX_EXCLUDED = 64
NUM_FAILED = 3
"""Seeds that failed before this instance reads the disk at once: the next would most likely fail too, since what they
have in common is this client."""
COMES_BACK = frozenset({"busy", "paused", "not_ready", "fence"})
"""What a seed is over with in a moment: it is asked again, where it is the one that the planner names again."""
PAUSE_S = 0.5
OUTAGE_S = 20.0
OUTAGE_WITH_SEEDS_S = 5.0
"""How long a planner that does not answer is asked on. A restarted one is there within seconds; the disk is far."""


class Planned:
    """Asks the planner until it names a seed, sends this instance to the disk, or gives up.

    Every candidate that it names is tried at once, then it is asked again without those; after NUM_FAILED failures the
    disk is read, unless this instance must not read it. `listed` makes the source of `seeds`, which are tried while no
    planner answers and where it has nobody; before a disk is read without the planner there is a wait that differs
    between instances. `tell` gets what came of each answer, `elected` is called where this instance reads the disk for
    its fleet; neither may wait.
    """

    def __init__(
        self,
        planner: PlannerClient,
        listed: Callable[[], Addresses],
        settings: Config,
        clock: Clock,
        *,
        instance_id: InstanceId,
        identity: ModelIdentity,
        content: Content,
        tell: Callable[[Report], None],
        elected: Callable[[], None] = lambda: None,
        listener: str = "",
    ) -> None:
        self._planner, self._listed, self._settings, self._clock, self._tell = planner, listed, settings, clock, tell
        self._tell_elected = elected
        is_live = settings.weights == "live"
        self._ask = Ask(
            client=instance_id,
            instance_key=instance_key(identity, ANY_LIVE if is_live else content),
            allow_disk=not is_live,
            listener=listener,
            labels=wire.shown_labels(settings.labels),
            identity=wire.shown_identity(identity.fields),
        )
        self._may_read_disk = not is_live and settings.fallback != "never"
        self._candidates: deque[Candidate] = deque()
        self._named: set[str] = set()
        self._excluded: dict[str, None] = {}
        self._num_failed = 0
        self._problems: list[str] = []
        self._reason = "no_seed"
        self._began_s: float | None = None
        self._pause_first = False
        self._without_planner = False
        self._unclaimed = False
        self._seeds: Addresses | None = None

    @property
    def bound_s(self) -> float:
        settings = self._settings
        return settings.plan_timeout_s + OUTAGE_S + settings.storage_jitter_s + 2 * settings.seek_timeout_s

    def next(self) -> Offer:
        if not self._without_planner:
            offer = self._from_planner()
            if offer is not None:
                return offer
            self._without_planner = True
        return self._elsewhere()

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        self._problems.append(f"{candidate.instance_id} at {candidate.listener}: {error}")
        self._reason = error.reason
        self._pause_first = error.reason in COMES_BACK
        if error.reason not in COMES_BACK:
            self._excluded[candidate.instance_id] = None
        if isinstance(error, SeedRefused):
            self._report(Outcome.REFUSED, candidate.instance_id, error.reason, str(error))
        else:
            self._num_failed += 1
            self._report(Outcome.FAILED, candidate.instance_id, error.reason, str(error))
        if self._seeds is not None and candidate.instance_id not in self._named:
            self._seeds.failed(candidate, error)

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None:
        self._report(Outcome.LOADED, candidate.instance_id, "", "", report)

    # The planner

    def _from_planner(self) -> Offer | None:
        """The next offer that comes from the planner; None where it has no more to say."""
        if self._candidates:
            return Offer(self._candidates.popleft())
        if self._num_failed >= NUM_FAILED and self._may_read_disk:
            return self._nobody(f"{self._num_failed} seeds failed; no other is tried")
        if self._pause_first:
            self._pause_first = False
            self._clock.sleep(PAUSE_S)
        try:
            answer = self._seek()
        except RForkError as error:
            log.warning("rfork: going on without a planner: %s", error)
            self._problems.append(str(error))
            self._reason = error.reason
            self._unclaimed = True
            return None
        match answer:
            case ForkFrom(candidates):
                self._candidates.extend(_candidate(c) for c in candidates if self._is_vouched(c))
                self._named.update(c.instance_id for c in candidates)
                self._unclaimed = not self._candidates
                return Offer(self._candidates.popleft()) if self._candidates else None
            case ReadDisk():
                return self._elected()
            case FallBack(reason, waited_s, nearest):
                near = "; ".join(_nearest(n) for n in nearest[:2])
                said = f"the planner has no seed ({reason}, after {waited_s:.0f} s)"
                self._problems.append(f"{said}: {near}" if near else said)
                self._unclaimed = reason == "planner_full"
                return None

    def _is_vouched(self, found: wire.Candidate) -> bool:
        """Whether a key holder named these listeners: what a poisoned store adds is not even dialled."""
        keys = keyring(self._settings.key, self._settings.key_file)
        if keys is None or is_vouched(keys, found.instance_id, [found.listener, *found.nodes], found.ticket):
            return True
        self._problems.append(f"{found.instance_id} at {found.listener}: no holder of the fleet key named it")
        self._reason = "unproven"
        return False

    def _seek(self) -> ForkFrom | ReadDisk | FallBack:
        """Ask, within one bound for all asks of this load."""
        now = self._clock.now()
        self._began_s = now if self._began_s is None else self._began_s
        excluded = list(self._excluded)[-MAX_EXCLUDED:]
        ask = msgspec.structs.replace(self._ask, exclude=excluded, waited_s=now - self._began_s)
        outage_s = OUTAGE_WITH_SEEDS_S if self._settings.seeds else OUTAGE_S
        return seek(
            self._planner,
            ask,
            bound_s=self._settings.plan_timeout_s,
            outage_s=min(outage_s, self._settings.seek_timeout_s),
            clock=self._clock,
        )

    def _elected(self) -> Offer:
        if self._settings.seed == "off":  # it will be nobody's seed, so nobody needs to wait for it
            self._report(Outcome.FAILED, "", "seed_off", "it reads the disk and will be no seed")
        else:
            self._tell_elected()
        why = "the planner chose this instance to read the disk for its fleet"
        log.info("rfork: %s", why)
        return Offer(reason="elected", why="; ".join([*dict.fromkeys(self._problems), why]), elected=True)

    # Without it

    def _elsewhere(self) -> Offer:
        """The list of `seeds`, without those that the planner named; then nobody."""
        self._seeds = self._seeds or self._listed()
        while self._settings.seeds:
            offer = self._seeds.next()
            if offer.candidate is None:
                self._problems.append(offer.why)
                break
            if offer.candidate.instance_id not in self._named:
                return offer
            self._seeds.failed(offer.candidate, SeedRefused("the planner named it before", reason=self._reason))
        if self._unclaimed and self._may_read_disk:
            wait_s = storage_jitter_s(self._ask.client, self._settings.storage_jitter_s)
            log.warning("rfork: no planner and no other seed; reading the disk in %.1f s", wait_s)
            self._clock.sleep(wait_s)
        return self._nobody("")

    def _nobody(self, why: str) -> Offer:
        said = "; ".join(dict.fromkeys([*self._problems, *([why] if why else [])]))
        self._report(Outcome.FELL_BACK, "", self._reason, said)
        return Offer(reason=self._reason, why=said)

    def _report(
        self, outcome: Outcome, seed: str, reason: str, detail: str, weights: WeightsReport | None = None
    ) -> None:
        self._tell(
            Report(
                client=self._ask.client,
                instance_key=self._ask.instance_key,
                outcome=outcome,
                seed=wire.shown_id(seed) if seed else "",
                reason=wire.shown_word(reason),
                detail=detail[:500],
                nbytes=weights.nbytes if weights else 0,
                phases_s={name[:32]: s for name, s in list(weights.phases_s.items())[:32]} if weights else {},
            )
        )


def planner_of(settings: Config) -> PlannerClient | None:
    """A client of the planner that the settings name, if they name one. Raises ConfigError."""
    if settings.planner_url is None:
        return None
    return PlannerClient(settings.planner_url, tls=tls_of(settings), signer=signer_of(settings))


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
