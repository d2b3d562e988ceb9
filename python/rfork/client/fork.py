"""One fork of one shard, from the first question to verified weights: seeds in order, all ranks of the instance in
step.

A seed that is no use raises a SeedError; the next is tried on the same, already built, model. When none is left, or
nothing can be carried at all, every rank raises NoSeedAvailable with all the reasons.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rfork.binding import Binding
from rfork.client.agreement import Agreement, Vote
from rfork.client.beside import Approach, OwnPage, PrefetchedLease
from rfork.client.connect import FenceCheck
from rfork.client.contract import LocalShard, PullSettings
from rfork.client.lease import Lease, take_lease
from rfork.client.lend import Lender
from rfork.client.lifecycle import PullEvent, PullState, new_pull
from rfork.client.pause import collector_paused
from rfork.client.progress import Observer, ProgressBar, Silent
from rfork.client.pull import connector, pull
from rfork.client.resolve import Candidate
from rfork.client.sources import Offer, SeedSource, signer_of, tls_of
from rfork.clock import Clock, SystemClock
from rfork.config import Config
from rfork.errors import NoSeedAvailable, NotQuiet, SeedError, SeedRefused
from rfork.identity import Content, InstanceId, ModelIdentity, RankIdentity, instance_key
from rfork.transports.select import Fabrics
from rfork.wire.seed import DigestTable, LeaseReply, LeaseRequest, WeightsReport

SLOWEST_NBYTES_PER_S = 50e6
"""A rank that reads slower than this makes the others give up, and the instance end."""


@dataclass(frozen=True)
class ForkOutcome:
    """Weights are in place. `origin_digests` is what they were compared with; the next client is given the same.
    `there` is where the seed has them.
    """

    report: WeightsReport
    content: Content
    weight_version: str | None
    origin_digests: DigestTable | None
    there: Binding


@dataclass
class Fork:
    """The work order of one shard. Only rank 0 asks `seeds`. `mover` takes what `pull` takes, and goes with a lease for
    `transport`: another way for the bytes, with all else the same. `page` makes memory on the shard's device, so
    that a pull connects while the shard is built. `lender` is a shard that a pull may have in common with this one.
    """

    who: RankIdentity
    identity: ModelIdentity
    content: Content
    instance_id: InstanceId
    seeds: SeedSource
    settings: Config
    fabrics: Fabrics
    agreement: Agreement
    check_fence: FenceCheck
    clock: Clock = field(default_factory=SystemClock)
    transport: str = "pull"
    mover: Callable[..., WeightsReport] = pull
    page: Callable[[], OwnPage] | None = None
    lender: Lender | None = None

    def __post_init__(self) -> None:
        self._life = new_pull(self.who.key)
        self._shard: LocalShard | None = None
        self._read_before = False
        self._phases_s: dict[str, float] = {}

    def run(self, build: Callable[[], LocalShard]) -> ForkOutcome:
        """Fill the shard that `build` makes; it is called at most once, and only after a seed has granted a lease.

        Raises NoSeedAvailable where no seed is of use, what `build` raises, AgreementLost and NotQuiet (both: the
        process must end).
        """
        with collector_paused():
            for turn in itertools.count():
                offer = self._next_offer(turn)
                if offer.candidate is None:
                    self._life.apply(PullEvent.GAVE_UP, now=self.clock.now(), note=offer.why)
                    raise NoSeedAvailable(offer.why, reason=offer.reason, elected=offer.elected)
                outcome = self._try(str(turn), offer.candidate, build)
                if outcome is not None:
                    return outcome
        raise AssertionError("unreachable")

    def _next_offer(self, turn: int) -> Offer:
        mine: bytes | None = None
        if self.agreement.is_leader:
            with self._phase("seek"):
                mine = msgspec.msgpack.encode(self.seeds.next())
        data = self.agreement.from_leader(f"seed/{turn}", mine, extra_s=self.seeds.bound_s)
        return msgspec.msgpack.decode(data, type=Offer)

    def _try(self, step: str, candidate: Candidate, build: Callable[[], LocalShard]) -> ForkOutcome | None:
        """One seed: the outcome, or None where it was no use. The source is told either way."""
        lease, error = self._take_lease(candidate)
        with lease or contextlib.nullcontext():  # renewed from here on: another rank may take long to vote
            fact = f"{lease.reply.instance_id}/{lease.reply.generation}/{lease.reply.content}" if lease else ""
            vote = Vote(error is None, str(error or ""), fact, reason=error.reason if error else "")
            agreed = self.agreement.vote(f"lease/{step}", vote)
            if agreed.ok and lease is not None:
                self._life.apply(PullEvent.LEASED, now=self.clock.now(), note=candidate.instance_id)
                return self._pull(step, candidate, lease, build)
        self._life.apply(PullEvent.SEED_FAILED, now=self.clock.now(), note=agreed.why)
        self._tell(candidate, error or SeedRefused(agreed.why, reason=agreed.reason or SeedRefused.reason))
        return None

    def _take_lease(self, candidate: Candidate) -> tuple[Lease | None, SeedError | None]:
        try:
            with self._phase("lease"):
                return take_lease(
                    candidate.listener,
                    self._request(candidate),
                    timeout_s=self.settings.match_timeout_s,
                    tls=tls_of(self.settings),
                    signer=signer_of(self.settings, self.instance_id),
                ), None
        except SeedError as error:
            return None, error

    def _pull(
        self, step: str, candidate: Candidate, lease: Lease, build: Callable[[], LocalShard]
    ) -> ForkOutcome | None:
        table: DigestTable | None = None
        report: WeightsReport | None = None
        lost: SeedError | None = None
        fatal: Exception | None = None
        try:
            with lease, self._observer() as observer, self._beside(lease) as (prefetched, more):
                shard = self._built(build)
                report = self.mover(
                    shard, prefetched, self.fabrics, self._pull_settings(),
                    check_fence=self.check_fence, clock=self.clock, observer=observer, life=self._life, **more,
                )  # fmt: skip
                table = prefetched.table
        except SeedError as error:
            lost = error
        except NotQuiet:
            raise
        except Exception as error:
            fatal = error  # nothing that another seed could mend: no rank needs to go on
        problem = lost or fatal
        vote = Vote(problem is None, _say(problem), stop=fatal is not None, reason=lost.reason if lost else "")
        agreed = self.agreement.vote(f"pulled/{step}", vote, extra_s=self._slowest_pull_s())
        if fatal is not None:
            raise fatal
        if agreed.ok and report is not None:
            outcome = self._outcome(report, lease.reply, table)
            if self.agreement.is_leader:
                self.seeds.succeeded(candidate, outcome.report)
            return outcome
        if agreed.stop:
            raise NoSeedAvailable(agreed.why, reason="rank_failed")
        self._tell(candidate, lost or _of_another_rank(agreed))
        if report is not None:
            self._read_before = True
            self._life = new_pull(self.who.key)  # this rank had its weights, another had not: all of them try again
        return None

    def _pull_settings(self) -> PullSettings:
        """What an earlier seed has left in the shard is kept where the next one's digests say that it is right."""
        self._read_before |= any(step.after == PullState.READING.name for step in self._life.history)
        return msgspec.structs.replace(PullSettings.of(self.settings), resumes=self._read_before)

    @contextlib.contextmanager
    def _beside(self, lease: Lease) -> Iterator[tuple[PrefetchedLease, dict[str, Any]]]:
        """What can be done while the model is built, and afterwards must be over; and what only a pull knows to use."""
        settings = PullSettings.of(self.settings)
        with contextlib.ExitStack() as stack:
            prefetched = stack.enter_context(PrefetchedLease(lease, with_digests=settings.verify != "off"))
            more: dict[str, Any] = {"lender": self.lender} if self.transport == "pull" else {}
            if self.page is not None and self._shard is None and self.transport == "pull":
                connecting = connector(lease.reply, self.fabrics, settings, self.check_fence, self.clock)
                more["approach"] = stack.enter_context(Approach(connecting, self.page(), settings.close_timeout_s))
            yield prefetched, more

    def _slowest_pull_s(self) -> float:
        """What a rank may need more than another for one pull, at its deadlines and at the least speed of any link."""
        s = self.settings
        reading_s = self._shard.manifest.nbytes / SLOWEST_NBYTES_PER_S if self._shard else 0.0
        return reading_s + 3 * s.match_timeout_s + s.connect_timeout_s + s.settle_timeout_s + s.close_timeout_s

    def _built(self, build: Callable[[], LocalShard]) -> LocalShard:
        if self._shard is None:
            with self._phase("build"):
                self._shard = build()
        return self._shard

    def _tell(self, candidate: Candidate, error: SeedError) -> None:
        if self.agreement.is_leader:
            self.seeds.failed(candidate, error)

    def _outcome(self, report: WeightsReport, reply: LeaseReply, table: DigestTable | None) -> ForkOutcome:
        phases_s = self._phases_s | {n: s + self._phases_s.get(n, 0.0) for n, s in report.phases_s.items()}
        report = msgspec.structs.replace(report, phases_s=phases_s)
        return ForkOutcome(report, Content.parse(reply.content), reply.weight_version, table, reply.binding)

    def _request(self, candidate: Candidate) -> LeaseRequest:
        return LeaseRequest(
            client=self.instance_id,
            instance_key=instance_key(self.identity, self.content),
            identity=self.identity.fields,
            engine=self.identity.engine,
            content=str(self.content),
            rank=self.who,
            weights=self.settings.weights,
            seed=candidate.instance_id,
            transport=self.transport,
        )

    @contextlib.contextmanager
    def _observer(self) -> Iterator[Observer]:
        if not self.agreement.is_leader:
            yield Silent()
            return
        bar = ProgressBar(f"rfork {self.who.role}")
        try:
            yield bar
        finally:
            bar.close()

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_s = self.clock.now()
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + self.clock.now() - started_s


def _of_another_rank(agreed: Vote) -> SeedError:
    """What made this rank's pull worth nothing, under the word that the rank had for it."""
    error = SeedError(agreed.why)
    error.reason = agreed.reason or error.reason
    return error


def _say(error: Exception | None) -> str:
    if error is None or isinstance(error, SeedError):
        return str(error or "")
    return f"{type(error).__name__}: {error}"
