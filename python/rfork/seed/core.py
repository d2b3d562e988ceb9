"""What a node knows and decides: which state it is in, who may read what. Pure: no lock, thread, socket or clock.

Whoever holds it brings the time with each call, and takes the effects afterwards: states left and leases ended.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import msgspec

import rfork
from rfork import wire
from rfork.identity import InstanceId
from rfork.seed import leases
from rfork.seed.admission import NodeView, admit, not_granting, refuse
from rfork.seed.control import RankPeer
from rfork.seed.leases import LeaseBook, LeaseState
from rfork.seed.lifecycle import SeedEvent, SeedState, seed_machine
from rfork.seed.shards import RankRecord, ShardRecord, ShardTable, summary
from rfork.seed.snapshot import Snapshot
from rfork.wire.control import Changing, Loaded, Refused, Seeking
from rfork.wire.seed import LEASES_PATH, LeaseReply, LeaseRequest, Refusal, StatusReply


class Stepped(NamedTuple):
    """The node changed its state. `is_asked_for`: somebody wanted that, so it is no news."""

    before: SeedState
    after: SeedState
    why: str
    is_asked_for: bool


Effect = Stepped | leases.Ended


class NodeCore:
    """The state of one node. `num_expected` ranks make it whole, None until that is known."""

    def __init__(self, instance_id: InstanceId, *, capacity: int, lease_ttl_s: float) -> None:
        self.instance_id = instance_id
        self.num_expected: int | None = None
        self.is_healthy = False
        self.check: bool | None = None
        """I5's second look at the digests. None: not begun; False: under way; True: passed."""
        self.seeking: Seeking | None = None
        self.elsewhere: dict[str, str] = {}
        """Shard key → listener, of what other nodes of this instance hold."""
        self.num_granted, self.num_refused = 0, Counter[str]()
        self.book = LeaseBook(capacity, lease_ttl_s)
        self.table = ShardTable()
        self._lease_ttl_s = lease_ttl_s
        self._machine = seed_machine(instance_id)
        self._why = ""
        self._effects: list[Effect] = []

    def take_effects(self) -> list[Effect]:
        """What has happened since the last call."""
        effects, self._effects = self._effects, []
        return effects

    # What others may know

    @property
    def state(self) -> SeedState:
        return self._machine.state

    @property
    def other_listeners(self) -> tuple[str, ...]:
        return tuple(sorted(set(self.elsewhere.values())))

    def closed(self) -> Refusal | None:
        """Why nothing is granted now; None while it serves."""
        return not_granting(self.state, self._why)

    def status_reply(self, listener: str | None, now: float) -> StatusReply:
        self.tick(now)
        reports, target = self.table.reports(), self.table.target()
        return StatusReply(
            version=rfork.__version__,
            protocol_version=wire.PROTOCOL_VERSION,
            instance_id=self.instance_id,
            state=self.state.value,
            generation=min((s.generation for s in self.table.shards()), default=0),
            listener=listener,
            instance_key=target.key if target else None,
            content=str(target.content) if target else None,
            weights=summary(reports),
            ranks=reports,
            num_readers=self.book.num_readers,
            readers=self.book.readers,
            nodes=self.other_listeners,
        )

    def snapshot(self, now: float) -> Snapshot | None:
        """What a registry is told; None before any rank has said what it loads."""
        self.tick(now)
        target, ranks = self.table.target(), list(self.table.ranks.values())
        if target is not None:
            what = Seeking(
                rank=0,
                engine=target.published.engine,
                identity=target.published.identity,
                content=str(target.content),
                reads_disk=self.seeking is not None and self.seeking.reads_disk,
            )
        elif self.seeking is not None:
            what = self.seeking
        else:
            return None
        report = summary(self.table.reports())
        return Snapshot(
            what=what,
            state=self.state,
            generation=target.generation if target else 0,
            weight_version=(target.published.weight_version if target else None) or "",
            num_ranks=max(self.num_expected or len(ranks), 1),
            num_ready=sum(r.is_complete for r in ranks),
            readers=self.book.readers,
            seed=report.seed.instance_id if report and report.seed else None,
            is_loaded=report is not None,
            nodes=self.other_listeners,
        )

    def shard_of_rank(self, rank: int) -> ShardRecord | None:
        """The target shard that a stock client means by a rank number."""
        found = [s for s in self.table.shards() if s.published.rank == rank and s.published.shard.role == "target"]
        return min(found, key=lambda s: s.ref.replica, default=None)

    # Leases

    def grant(self, request: LeaseRequest, now: float) -> LeaseReply | Refusal:
        self.tick(now)
        found = admit(request, NodeView(self.instance_id, self.state, self._why, self.table.shards(), self.elsewhere))
        if isinstance(found, Refusal):
            return self._refused(found)
        shard = min(found, key=lambda s: (self.book.num_leases(s.ref), s.ref.replica))
        match self._apply(leases.Grant(request.client, shard.ref, shard.generation), now)[-1]:
            case leases.Granted(lease):
                self.num_granted += 1
                return self._reply(shard, lease.id)
            case leases.Busy(readers, retry_after_s):
                message = f"{readers} of {self.book.capacity} clients are reading"
                return self._refused(refuse("busy", message, retry_after_s=retry_after_s))
            case other:
                raise AssertionError(f"a grant can't end in {other}")

    def _reply(self, shard: ShardRecord, lease: str) -> LeaseReply:
        return LeaseReply(
            lease=lease,
            ttl_s=self._lease_ttl_s,
            instance_id=self.instance_id,
            generation=shard.generation,
            content=str(shard.content),
            weight_version=shard.published.weight_version,
            manifest_digest=shard.manifest_digest,
            manifest_path=f"{LEASES_PATH}/{lease}/manifest",
            digests_path=f"{LEASES_PATH}/{lease}/digests",
            binding=shard.published.binding,
            verified=shard.published.verified,
        )

    def _refused(self, refusal: Refusal) -> Refusal:
        self.num_refused[refusal.reason] += 1
        return refusal

    def renew_or_release(self, event: leases.Renew | leases.Release, now: float) -> Refusal | None:
        last = self._apply(event, now)[-1]
        return _no_lease(last) if isinstance(last, leases.Unknown) else None

    def leased(self, lease_id: str, now: float) -> ShardRecord | Refusal:
        """The shard that a live lease is for."""
        self.tick(now)
        lease = self.book.find(lease_id)
        if isinstance(lease, leases.Unknown):
            return _no_lease(lease)
        record = self.table.find(lease.shard)
        if record is None or record.generation != lease.generation:
            return refuse("stale_generation", "the weights changed under this lease")
        return record

    def tick(self, now: float) -> None:
        """Let leases run out."""
        self._apply(leases.Tick(), now)

    # Ranks

    def hello(self, peer: RankPeer, now: float) -> None:
        """A rank has come. Where an instance spans nodes, its ranks know the one id that it has."""
        self.instance_id = InstanceId(peer.hello.instance_id or self.instance_id)
        displaced = self.table.hello(peer)
        if displaced is not None:
            self.step(SeedEvent.STOP, f"another process took the place of {displaced.peer}", now)

    def gone(self, peer: RankPeer, now: float) -> None:
        """A rank's process has ended."""
        rank = self.table.of(peer)
        if rank is not None:
            rank.gone = f"process {peer.hello.pid} ended"
            self.step(SeedEvent.STOP, f"rank {peer.hello.rank} is gone: its process {peer.hello.pid} ended", now)

    def seeks(self, message: Seeking) -> None:
        """A rank says what it is about to load. Every rank does, at about the time that one of them is chosen to read
        the disk for all: that stays.
        """
        reads_disk = message.reads_disk or (self.seeking is not None and self.seeking.reads_disk)
        self.seeking = msgspec.structs.replace(message, reads_disk=reads_disk)

    def hear(self, peer: RankPeer, news: Loaded | Changing | Refused | ShardRecord, now: float) -> bool:
        """What a rank says of its shards. False if another process has taken its place."""
        rank = self.table.of(peer)
        if rank is None:
            return False
        self.table.apply(rank, news)
        if isinstance(news, Changing):
            self.step(SeedEvent.UNFIT, f"rank {news.rank}: {news.why}", now)
            self._apply(leases.Revoke(rank.refs, f"rank {news.rank} changes its weights: {news.why}"), now)
        elif isinstance(news, Refused):
            self.step(SeedEvent.STOP, f"rank {news.rank}: {news.why}", now)
        elif isinstance(news, ShardRecord):
            self._apply(leases.Revoke(frozenset({news.ref}), f"generation {news.generation} was published"), now)
        return True

    def disown(self, rank: RankRecord, why: str, now: float) -> None:
        """Nobody may fork from a rank that has other bytes than it published."""
        rank.refused = why
        self.step(SeedEvent.STOP, f"rank {rank.hello.rank}: {why}", now)

    # State

    def to_check(self, now: float) -> list[RankRecord]:
        """Serve, if everything for it has come together; else the ranks that have to look again first, once."""
        fit = self.is_healthy and self.table.is_complete(self.num_expected)
        if not fit or not self._machine.allows(SeedEvent.FIT):
            return []
        if self.check:
            self.step(SeedEvent.FIT, "", now)
        elif self.check is None:
            self.check = False
            return list(self.table.ranks.values())
        return []

    def step(self, event: SeedEvent, why: str, now: float, *, is_asked_for: bool = False) -> None:
        """Take an event if the state allows it; others come late and mean nothing any more."""
        if not self._machine.allows(event):
            return
        before, after = self._machine.state, self._machine.apply(event, now=now, note=why)
        self._why = why
        self._effects.append(Stepped(before, after, why, is_asked_for or before is SeedState.DRAINING))
        if after is SeedState.STOPPED:
            self._apply(leases.Revoke(None, why), now)

    def _apply(self, event: leases.Event, now: float) -> list[leases.Effect]:
        effects = self.book.apply(event, now)
        self._effects += [effect for effect in effects if isinstance(effect, leases.Ended)]
        return effects

    def __repr__(self) -> str:
        generation = min((s.generation for s in self.table.shards()), default=0)
        book = f"leases={self.book.num_readers}/{self.book.capacity}"
        return f"<Seed {self.instance_id} {self.state.name} gen={generation} {book} ranks={len(self.table.ranks)}>"


def _no_lease(unknown: leases.Unknown) -> Refusal:
    reason = "stale_generation" if unknown.state is LeaseState.REVOKED else "unknown_lease"
    return refuse(reason, f"this lease is {unknown.state.value if unknown.state else 'unknown'}: {unknown.why}")
