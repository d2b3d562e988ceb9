"""One fork of one shard, from the first question to verified weights: seeds in order, all ranks of the instance in step.

A seed that is no use raises a SeedError; the next is tried on the same, already built, model. When none is left, or nothing can be
carried at all, every rank raises NoSeedAvailable with all the reasons.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field

import msgspec

from rfork.client.agreement import Agreement, Vote
from rfork.client.calls import Tls
from rfork.client.lease import Lease, take_lease
from rfork.client.lifecycle import PullEvent, new_pull
from rfork.client.progress import ProgressBar, Silent
from rfork.client.pull import FenceCheck, LocalShard, PullSettings, pull
from rfork.client.resolve import Candidate, resolve
from rfork.clock import Clock, SystemClock
from rfork.config import Config
from rfork.errors import NoSeedAvailable, NotQuiet, SeedError, SeedRefused
from rfork.identity import Content, InstanceId, ModelIdentity, RankIdentity, instance_key
from rfork.manifest import Manifest
from rfork.transports.select import Fabrics
from rfork.wire.seed import DigestTable, LeaseReply, LeaseRequest, WeightsReport

logger = logging.getLogger(__name__)

PAUSE_S = 1.0
"""Between two questions to seeds that said they would be of use soon, where they named no time."""


class Answered(msgspec.Struct, frozen=True):
    """What rank 0 found out about one address, for all ranks: a candidate, or why there is none. Both None: give up."""

    candidate: Candidate | None = None
    problem: str | None = None
    reason: str = "unreachable"
    retry_after_s: float | None = None


@dataclass(frozen=True)
class ForkOutcome:
    """Weights are in place. `origin_digests` is what they were compared with; the next client is given the same."""

    report: WeightsReport
    content: Content
    weight_version: str | None
    origin_digests: DigestTable | None


class _RememberedLease:
    """A lease that keeps the digest table that was fetched through it."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self.table: DigestTable | None = None

    @property
    def reply(self) -> LeaseReply:
        return self._lease.reply

    @property
    def address(self) -> str:
        return self._lease.address

    def manifest(self) -> Manifest:
        return self._lease.manifest()

    def digests(self) -> DigestTable:
        self.table = self._lease.digests()
        return self.table

    def check(self) -> None:
        self._lease.check()


@dataclass
class Fork:
    """The work order of one shard. `addresses` are where seeds may be asked, in order of preference."""

    who: RankIdentity
    identity: ModelIdentity
    content: Content
    instance_id: InstanceId
    addresses: Collection[str]
    settings: Config
    fabrics: Fabrics
    agreement: Agreement
    check_fence: FenceCheck
    clock: Clock = field(default_factory=SystemClock)
    failures: list[str] = field(default_factory=list)

    def run(self, build: Callable[[], LocalShard]) -> ForkOutcome:
        """Fill the shard that `build` makes; it is called at most once, and only after a seed has granted a lease.

        Raises NoSeedAvailable where no seed is of use, what `build` raises, AgreementLost and NotQuiet (both: the process must end).
        """
        if not self.addresses:
            raise NoSeedAvailable(
                "nobody to ask: give --remote-instance-weight-loader-seed-instance-ip and -service-port, or `seeds`"
            )
        self._life = new_pull(self.who.key)
        self._shard: LocalShard | None = None
        self._phases_s: dict[str, float] = {}
        deadline_s = self.clock.now() + self.settings.seek_timeout_s
        waiting = list(self.addresses)
        for turn in range(1_000_000):
            later: list[str] = []
            pause_s = PAUSE_S
            for number, address in enumerate(waiting):
                outcome, retry_after_s = self._try(f"{turn}.{number}", address, build)
                if outcome is not None:
                    return outcome
                if retry_after_s is not None:
                    later.append(address)
                    pause_s = max(0.1, min(pause_s, retry_after_s))
            waiting = later
            if not self._go_on(turn, bool(waiting) and self.clock.now() + pause_s < deadline_s):
                break
            self.clock.sleep(pause_s)
        self._life.apply(PullEvent.GAVE_UP, now=self.clock.now())
        raise self._nobody()

    def _go_on(self, turn: int, mine: bool) -> bool:
        answer = self.agreement.from_leader(f"again/{turn}", (b"1" if mine else b"0") if self.agreement.is_leader else None)
        return answer == b"1"

    def _nobody(self) -> NoSeedAvailable:
        error = NoSeedAvailable("; ".join(dict.fromkeys(self.failures)) or "no seed answered")
        error.reason = self._reason
        return error

    _reason = "no_seed"

    def _failed(self, error: str, reason: str) -> None:
        self.failures.append(error)
        self._reason = reason

    def _try(
        self, step: str, address: str, build: Callable[[], LocalShard]
    ) -> tuple[ForkOutcome | None, float | None]:
        """One seed. (outcome, None) on success, (None, seconds) where it may be of use later, (None, None) else."""
        answered = self._ask(step, address)
        candidate = answered.candidate
        if candidate is None:
            self._failed(f"{address}: {answered.problem}", answered.reason)
            return None, answered.retry_after_s
        lease: Lease | None = None
        mine, retry_after_s, refusal = Vote(True), None, "refused"
        try:
            with self._phase("lease"):
                lease = take_lease(
                    candidate.listener, self._request(candidate), timeout_s=self.settings.match_timeout_s, tls=self._tls
                )
            mine = Vote(True, fact=f"{lease.reply.instance_id}/{lease.reply.generation}/{lease.reply.content}")
        except SeedError as error:
            mine, refusal = Vote(False, str(error)), error.reason
            retry_after_s = error.retry_after_s if isinstance(error, SeedRefused) else None
        agreed = self.agreement.vote(f"lease/{step}", mine)
        if not agreed.ok or lease is None:
            if lease is not None:
                lease.release()
            self._life.apply(PullEvent.SEED_FAILED, now=self.clock.now(), note=agreed.why)
            self._failed(f"{candidate.instance_id} at {address}: {agreed.why}", refusal)
            return None, retry_after_s
        self._life.apply(PullEvent.LEASED, now=self.clock.now(), note=candidate.instance_id)
        return self._pull(step, address, lease, build), None

    def _pull(self, step: str, address: str, lease: Lease, build: Callable[[], LocalShard]) -> ForkOutcome | None:
        remembered = _RememberedLease(lease)
        report: WeightsReport | None = None
        fatal: BaseException | None = None
        mine = Vote(True)
        bar = ProgressBar(f"rfork {self.who.role}") if self.agreement.is_leader else Silent()
        try:
            with lease:
                if self._shard is None:
                    with self._phase("build"):
                        self._shard = build()
                report = pull(
                    self._shard, remembered, self.fabrics, PullSettings.of(self.settings),
                    check_fence=self.check_fence, clock=self.clock, observer=bar, life=self._life,
                )  # fmt: skip
        except SeedError as error:
            mine, self._reason = Vote(False, str(error)), error.reason
        except NotQuiet:
            raise
        except Exception as error:
            # Nothing that another seed could mend: no rank needs to go on.
            fatal, mine = error, Vote(False, f"{type(error).__name__}: {error}", stop=True)
        finally:
            if isinstance(bar, ProgressBar):
                bar.close()
        agreed = self.agreement.vote(f"pulled/{step}", mine)
        if fatal is not None:
            raise fatal
        if agreed.ok and report is not None:
            return self._outcome(report, lease.reply, remembered.table)
        self.failures.append(f"{lease.reply.instance_id} at {address}: {agreed.why}")
        if agreed.stop:
            raise self._nobody()
        if report is not None:
            self._life = new_pull(self.who.key)
        return None

    def _outcome(self, report: WeightsReport, reply: LeaseReply, table: DigestTable | None) -> ForkOutcome:
        report = msgspec.structs.replace(report, phases_s={**self._phases_s, **report.phases_s})
        return ForkOutcome(report, Content.parse(reply.content), reply.weight_version, table)

    def _ask(self, step: str, address: str) -> Answered:
        """What rank 0 hears at `address`; the other ranks are told."""
        mine: bytes | None = None
        if self.agreement.is_leader:
            try:
                with self._phase("seek"):
                    candidate = resolve(
                        address,
                        timeout_s=self.settings.seek_timeout_s,
                        own_instance_ids=(self.instance_id,),
                        tls=self._tls,
                    )
                answered = Answered(candidate)
            except SeedError as error:
                again = error.retry_after_s if isinstance(error, SeedRefused) else None
                answered = Answered(problem=str(error), reason=error.reason, retry_after_s=again)
            mine = msgspec.msgpack.encode(answered)
        return msgspec.msgpack.decode(self.agreement.from_leader(f"seed/{step}", mine), type=Answered)

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
        )

    @property
    def _tls(self) -> Tls:
        return Tls(self.settings.ca_file, self.settings.tls_server_name)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        started_s = self.clock.now()
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + self.clock.now() - started_s

