"""The seed's part in a node's main process: hears its ranks, decides who may read, answers from what it was told.

Threads: each rank's connection brings messages, the listener's loop brings requests, the engine brings `ready`, `drain`
and `stop`. One lock, held for look-ups only; encoding and compressing happen outside of it.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import rfork
from rfork import wire
from rfork.clock import Clock, SystemClock
from rfork.config import CONTROL_ENV, INSTANCE_ENV, LISTENER_ENV, Config
from rfork.identity import InstanceId, new_instance_id
from rfork.metrics import Facts, InstanceMetrics
from rfork.seed import leases
from rfork.seed.admission import NodeView, admit, not_granting, refuse
from rfork.seed.app import make_app
from rfork.seed.audit import Auditor
from rfork.seed.control import ControlServer, RankPeer
from rfork.seed.door import guard_of
from rfork.seed.groups import GroupDesk
from rfork.seed.leases import LeaseBook, LeaseState
from rfork.seed.lifecycle import SeedEvent, SeedState, seed_machine
from rfork.seed.listener import Listener, advertised, bind
from rfork.seed.others import OtherNodes
from rfork.seed.shards import Blob, RankRecord, ShardRecord, ShardTable, summary
from rfork.seed.snapshot import Snapshot
from rfork.tls import Certificate
from rfork.wire.collective import GroupEnded
from rfork.wire.control import (
    Changing,
    Elsewhere,
    Healthy,
    Hello,
    Loaded,
    Published,
    RankMessage,
    Refused,
    Seeking,
    Told,
)
from rfork.wire.planner import Report
from rfork.wire.seed import LEASES_PATH, LeaseReply, LeaseRequest, Refusal, StatusReply

logger = logging.getLogger(__name__)


@dataclass
class Tally:
    """What was counted since the process started."""

    granted: int
    refused: Counter[str]


class NodeService:
    """One for each node's main process. Made before ranks are spawned, so that they inherit `environment()`."""

    def __init__(
        self,
        config: Config,
        *,
        instance_id: InstanceId | None = None,
        clock: Clock | None = None,
    ) -> None:
        self.config = config
        self.instance_id = instance_id or new_instance_id()
        self.tally = Tally(0, Counter())
        self._clock = clock or SystemClock()
        self.guard = guard_of(config, lambda: self.instance_id, self._clock)
        self._lock = threading.RLock()
        self._drained = threading.Condition(self._lock)
        self._machine = seed_machine(self.instance_id)
        self._book = LeaseBook(config.capacity, config.lease_ttl_s)
        self._table = ShardTable()
        self._num_expected: int | None = None
        self._healthy = False
        self._check: bool | None = None  # None: not begun; False: under way; True: passed
        self._why = ""
        self._seeking: Seeking | None = None
        self._elsewhere: dict[str, str] = {}
        self._listener: Listener | None = None
        self.others = OtherNodes(self)
        self._observers: list[Callable[[SeedState], None]] = [self.others.on_state]
        self.on_report: Callable[[Report], None] = lambda report: None
        self.on_unmapping: Callable[[], None] = lambda: None
        self.groups = GroupDesk(self)
        self.auditor = Auditor(self)
        self.metrics = InstanceMetrics(self._facts)
        self._control = ControlServer(self._on_message, self._on_gone)

    def environment(self) -> dict[str, str]:
        """What this node's rank processes must inherit."""
        return {CONTROL_ENV: self._control.name, INSTANCE_ENV: self.instance_id, LISTENER_ENV: self.listener_url or ""}

    def subscribe(self, observer: Callable[[SeedState], None]) -> None:
        """Call `observer` after each change of state, in whatever thread made it; it must not wait."""
        self._observers.append(observer)

    def _facts(self) -> Facts:
        with self._lock:
            return Facts(self.status_reply(), self.num_readers, self.tally.granted, dict(self.tally.refused))

    # The engine's side

    def start(self, *, host: str = "127.0.0.1", num_local_ranks: int | None = None) -> None:
        """Open the listener, on `host` unless the configuration says otherwise. Raises ConfigError if it can't."""
        self._num_expected = num_local_ranks
        if self.config.seed == "off":
            self._step(SeedEvent.STOP, "it was switched off (seed: off)", level=logging.INFO)
            return
        certificate = Certificate.of(self.config.tls_cert_file, self.config.tls_key_file)
        sock = bind(self.config, host)
        url = advertised(sock, self.config.advertise_host, scheme="https" if certificate else "http")
        self._listener = Listener(make_app(self), sock, url, certificate=certificate)
        self._listener.start()
        logger.info("rfork: instance %s, listener %s", self.instance_id, self._listener.url)

    def ready(self) -> None:
        """The server is healthy. Ranks are asked once to check their digests; then, and if all published, it serves."""
        with self._lock:
            self._healthy = True
        self.metrics.open()
        self._consider()

    def drain(self, why: str = "shutdown") -> None:
        """Grant nothing more, here and at the other nodes; leases run out. Returns at once."""
        self._step(SeedEvent.DRAIN, why)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until nobody reads, here or from another node. False if somebody still reads here after `timeout_s`."""
        deadline = self._clock.now() + timeout_s
        with self._drained:
            self._apply(leases.Tick())
            while self._book.live and (left := deadline - self._clock.now()) > 0:
                self._drained.wait(min(left, 0.2))
                self._apply(leases.Tick())
            is_drained = not self._book.live
        self.others.wait_drained(deadline - self._clock.now())
        return is_drained

    def stop(self, timeout_s: float = 5.0) -> None:
        """End everything: leases revoked, engines in ranks destroyed, listener and control closed. Idempotent."""
        self._step(SeedEvent.STOP, "it was shut down", level=logging.INFO)
        with self._lock:
            peers = [r.peer for r in self._table.ranks.values() if not r.gone]
        asking = [threading.Thread(target=p.ask, args=("close", timeout_s), daemon=True) for p in peers]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(timeout=timeout_s)
        if self._listener:
            self._listener.stop()
        self._control.close()

    @property
    def state(self) -> SeedState:
        return self._machine.state

    @property
    def listener_url(self) -> str | None:
        return self._listener.url if self._listener else None

    @property
    def bound_host(self) -> str:
        """Where this node's listeners bind."""
        return self._listener.host if self._listener else "127.0.0.1"

    @property
    def num_readers(self) -> int:
        with self._lock:
            self._apply(leases.Tick())
            return self._book.num_readers

    @property
    def other_listeners(self) -> tuple[str, ...]:
        """Where the other nodes of this instance listen, once its ranks have said so."""
        with self._lock:
            return tuple(sorted(set(self._elsewhere.values())))

    def status_reply(self) -> StatusReply:
        with self._lock:
            reports, target = self._table.reports(), self._table.target()
            return StatusReply(
                version=rfork.__version__,
                protocol_version=wire.PROTOCOL_VERSION,
                instance_id=self.instance_id,
                state=self.state.value,
                generation=min((s.generation for s in self._table.shards()), default=0),
                listener=self.listener_url,
                instance_key=target.key if target else None,
                content=str(target.content) if target else None,
                weights=summary(reports),
                ranks=reports,
                num_readers=self.num_readers,
                readers=self._book.readers,
                nodes=self.other_listeners,
            )

    def closed(self) -> Refusal | None:
        """Why nothing is granted now; None while it serves."""
        with self._lock:
            return not_granting(self.state, self._why)

    def shard_of_rank(self, rank: int) -> ShardRecord | None:
        """The target shard that a stock client means by a rank number."""
        with self._lock:
            found = [s for s in self._table.shards() if s.published.rank == rank and s.published.shard.role == "target"]
            return min(found, key=lambda s: s.ref.replica, default=None)

    def snapshot(self) -> Snapshot | None:
        """What a registry is told; None before any rank has said what it loads."""
        with self._lock:
            self._apply(leases.Tick())
            target, ranks = self._table.target(), list(self._table.ranks.values())
            if target is not None:
                what = Seeking(
                    rank=0,
                    engine=target.published.engine,
                    identity=target.published.identity,
                    content=str(target.content),
                    reads_disk=self._seeking is not None and self._seeking.reads_disk,
                )
            elif self._seeking is not None:
                what = self._seeking
            else:
                return None
            report = summary(self._table.reports())
            return Snapshot(
                what=what,
                state=self.state,
                generation=target.generation if target else 0,
                weight_version=(target.published.weight_version if target else None) or "",
                num_ranks=max(self._num_expected or len(ranks), 1),
                num_ready=sum(r.is_complete for r in ranks),
                readers=self._book.readers,
                seed=report.seed.instance_id if report and report.seed else None,
                is_loaded=report is not None,
                nodes=self.other_listeners,
            )

    def ranks_answer(self, timeout_s: float) -> bool:
        """Ask every rank for a sign of life, all at once. Waits: not for an event loop."""
        with self._lock:
            ranks = [r for r in self._table.ranks.values() if not r.gone]
        if not ranks:
            return False
        with ThreadPoolExecutor(len(ranks), thread_name_prefix="rfork-ping") as pool:
            return all(answer.ok for answer in pool.map(lambda r: r.peer.ask("ping", timeout_s), ranks))

    def peer_of(self, ref: leases.ShardRef) -> RankPeer | None:
        """The rank that holds a shard."""
        with self._lock:
            rank = self._table.rank_of(ref)
            return rank.peer if rank is not None else None

    def published(self) -> tuple[list[tuple[ShardRecord, RankPeer]], set[str]]:
        """Every shard that is published here, with its rank; and where other nodes of this instance listen."""
        with self._lock:
            ranks = [rank for rank in self._table.ranks.values() if not rank.gone]
            return [(s, rank.peer) for rank in ranks for s in rank.shards.values()], set(self._elsewhere.values())

    def condemn(self, record: ShardRecord, why: str) -> bool:
        """Nobody may fork from this any more: it is not what was published. False if it was replaced meanwhile."""
        with self._lock:
            rank = self._table.rank_of(record.ref)
            if rank is None or rank.changing or self._table.find(record.ref) is not record:
                return False
            if why:
                rank.refused = why
                self._step(SeedEvent.STOP, f"rank {rank.hello.rank}: {why}")
            return True

    # The listener's side

    def grant(self, request: LeaseRequest) -> LeaseReply | Refusal:
        with self._lock:
            self._apply(leases.Tick())
            view = NodeView(self.instance_id, self.state, self._why, self._table.shards(), self._elsewhere)
            found = admit(request, view)
            if isinstance(found, Refusal):
                return self._refused(found)
            shard = min(found, key=lambda s: (self._book.num_leases(s.ref), s.ref.replica))
            effects = self._apply(leases.Grant(request.client, shard.ref, shard.generation))
            match effects[-1]:
                case leases.Granted(lease):
                    self.tally.granted += 1
                case leases.Busy(readers, retry_after_s):
                    message = f"{readers} of {self.config.capacity} clients are reading"
                    return self._refused(refuse("busy", message, retry_after_s=retry_after_s))
                case other:
                    raise AssertionError(f"a grant can't end in {other}")
        logger.info("rfork: lease of %s to %s, generation %d", shard.ref.key, request.client, shard.generation)
        return LeaseReply(
            lease=lease.id,
            ttl_s=self.config.lease_ttl_s,
            instance_id=self.instance_id,
            generation=shard.generation,
            content=str(shard.content),
            weight_version=shard.published.weight_version,
            manifest_digest=shard.manifest_digest,
            manifest_path=f"{LEASES_PATH}/{lease.id}/manifest",
            digests_path=f"{LEASES_PATH}/{lease.id}/digests",
            binding=shard.published.binding,
            verified=shard.published.verified,
        )

    def renew(self, lease_id: str) -> Refusal | None:
        return self._lease_event(leases.Renew(lease_id))

    def release(self, lease_id: str) -> Refusal | None:
        return self._lease_event(leases.Release(lease_id))

    def leased(self, lease_id: str) -> ShardRecord | Refusal:
        """The shard that a live lease is for."""
        with self._lock:
            self._apply(leases.Tick())
            lease = self._book.find(lease_id)
            if isinstance(lease, leases.Unknown):
                return _no_lease(lease)
            record = self._table.find(lease.shard)
            if record is None or record.generation != lease.generation:
                return refuse("stale_generation", "the weights changed under this lease")
            return record

    def digests(self, record: ShardRecord) -> Blob | Refusal:
        """Digests of a shard, asked from its rank where nobody has needed them yet. May wait: not for an event loop."""
        with record.digesting:
            if record.digests is not None:
                return record.digests
            with self._lock:
                rank = self._table.rank_of(record.ref)
            if rank is None:
                return refuse("not_ready", "the rank is gone")
            answer = rank.peer.ask("digests", self.config.publish_timeout_s)
            with self._lock:
                is_current = self._table.find(record.ref) is record and not rank.changing
                table = dict(answer.digests).get(record.published.shard)
            if not answer.ok or table is None:
                return refuse("not_ready", f"no digests: {answer.error}", retry_after_s=1.0)
            if not is_current:
                return refuse("stale_generation", "the weights changed while their digests were taken")
            return record.take_digests(table)

    # The ranks' side

    def _on_message(self, peer: RankPeer, message: RankMessage) -> None:
        if isinstance(message, Hello):
            self._on_hello(peer)
            return
        if isinstance(message, GroupEnded):
            self.groups.ended(message)
            return
        if isinstance(message, Seeking):
            with self._lock:
                self._seeking = message
            return
        if isinstance(message, Told):
            self.on_report(message.report)
            return
        if isinstance(message, Elsewhere):
            with self._lock:
                self._elsewhere = message.listeners
            return
        if isinstance(message, Healthy):
            self.ready()
            return
        try:
            # Decoding, encoding and compressing a large manifest takes a while: not under the lock.
            news = self._record(peer, message) if isinstance(message, Published) else message
        except ValueError as error:
            news = Refused(peer.hello.rank, f"what it published is not sound: {error}")
        assert isinstance(news, Loaded | Changing | Refused | ShardRecord)
        with self._lock:
            rank = self._table.of(peer)
            if rank is None:
                return
            self._table.apply(rank, news)
            if isinstance(news, Changing):
                self._step(SeedEvent.UNFIT, f"rank {news.rank}: {news.why}")
                self._apply(leases.Revoke(rank.refs, f"rank {news.rank} changes its weights: {news.why}"))
            elif isinstance(news, Refused):
                self._step(SeedEvent.STOP, f"rank {news.rank}: {news.why}")
            elif isinstance(news, ShardRecord):
                self._apply(leases.Revoke(frozenset({news.ref}), f"generation {news.generation} was published"))
        self._consider()
        if isinstance(news, Changing) and news.unmaps:
            self.on_unmapping()
            peer.tell("withdrawn")

    def _record(self, peer: RankPeer, published: Published) -> ShardRecord:
        with self._lock:
            rank = self._table.of(peer)
            previous = rank.shards.get(published.shard) if rank else None
        return ShardRecord(published, peer.hello.replica, previous)

    def _on_hello(self, peer: RankPeer) -> None:
        with self._lock:
            # Where an instance spans nodes, its ranks know the one id that it has.
            self.instance_id = InstanceId(peer.hello.instance_id or self.instance_id)
            displaced = self._table.hello(peer)
            if displaced is not None:
                self._step(SeedEvent.STOP, f"another process took the place of {displaced.peer}")

    def _on_gone(self, peer: RankPeer) -> None:
        with self._lock:
            rank = self._table.of(peer)
            if rank is None:
                return
            rank.gone = f"process {peer.hello.pid} ended"
            self._step(SeedEvent.STOP, f"rank {peer.hello.rank} is gone: its process {peer.hello.pid} ended")

    # State

    def _consider(self) -> None:
        """Serve, if everything for it has come together."""
        with self._lock:
            fit = self._healthy and self._table.is_complete(self._num_expected)
            if not fit or not self._machine.allows(SeedEvent.FIT):
                return
            if self._check:
                self._step(SeedEvent.FIT, "")
            elif self._check is None:
                self._check = False
                ranks = list(self._table.ranks.values())
                threading.Thread(target=self._second_check, args=(ranks,), name="rfork-check", daemon=True).start()

    def _second_check(self, ranks: list[RankRecord]) -> None:
        """I5: what changed since publication without the fence moving, in warm-up say, must never be served."""
        with ThreadPoolExecutor(len(ranks), thread_name_prefix="rfork-check") as pool:
            answers = list(pool.map(lambda r: r.peer.ask("recheck", self.config.publish_timeout_s), ranks))
        with self._lock:
            for rank, answer in zip(ranks, answers, strict=True):
                if not answer.ok:
                    rank.refused = answer.error
                    self._step(SeedEvent.STOP, f"rank {rank.hello.rank}: {rank.refused}")
                    return
            self._check = True
        self._consider()

    def _step(self, event: SeedEvent, why: str, *, level: int | None = None) -> None:
        """Take an event if the state allows it; others come late and mean nothing any more."""
        with self._lock:
            if not self._machine.allows(event):
                return
            before, after = self._machine.state, self._machine.apply(event, now=self._clock.now(), note=why)
            self._why = why
            if after is SeedState.STOPPED:
                self._apply(leases.Revoke(None, why))
        is_news = after is SeedState.STOPPED and before is not SeedState.DRAINING
        level = level or (logging.WARNING if is_news else logging.INFO)
        logger.log(level, "rfork: seed %s is %s%s", self.instance_id, after.value, f": {why}" if why else "")
        self.metrics.update()
        for observer in self._observers:
            observer(after)

    def _apply(self, event: leases.Event) -> list[leases.Effect]:
        effects = self._book.apply(event, self._clock.now())
        for effect in effects:
            if isinstance(effect, leases.Ended):
                logger.info("rfork: lease of %s is %s: %s", effect.lease.client, effect.state.value, effect.why)
                self._drained.notify_all()
        return effects

    def _lease_event(self, event: leases.Renew | leases.Release) -> Refusal | None:
        with self._lock:
            last = self._apply(event)[-1]
        return _no_lease(last) if isinstance(last, leases.Unknown) else None

    def _refused(self, refusal: Refusal) -> Refusal:
        self.tally.refused[refusal.reason] += 1
        return refusal

    def __repr__(self) -> str:
        with self._lock:
            generation = min((s.generation for s in self._table.shards()), default=0)
            book = f"leases={self._book.num_readers}/{self._book.capacity}"
            return f"<Seed {self.instance_id} {self.state.name} gen={generation} {book} ranks={len(self._table.ranks)}>"


def _no_lease(unknown: leases.Unknown) -> Refusal:
    reason = "stale_generation" if unknown.state is LeaseState.REVOKED else "unknown_lease"
    return refuse(reason, f"this lease is {unknown.state.value if unknown.state else 'unknown'}: {unknown.why}")
