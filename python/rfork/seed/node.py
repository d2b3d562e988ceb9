"""The seed's part in a node's main process: a shell around `NodeCore`, which knows and decides.

Threads: each rank's connection brings messages, the listener's loop brings requests, the engine brings `ready`, `drain`
and `stop`. One lock, held for look-ups only; encoding and compressing happen outside of it.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

from rfork.clock import Clock, SystemClock
from rfork.config import CONTROL_ENV, INSTANCE_ENV, LISTENER_ENV, Config
from rfork.identity import InstanceId, new_instance_id
from rfork.metrics import Facts, InstanceMetrics
from rfork.seed import leases
from rfork.seed.admission import refuse
from rfork.seed.app import make_app
from rfork.seed.audit import Auditor
from rfork.seed.control import ControlServer, RankPeer
from rfork.seed.core import Effect, NodeCore
from rfork.seed.door import guard_of
from rfork.seed.groups import GroupDesk
from rfork.seed.lifecycle import SeedEvent, SeedState
from rfork.seed.listener import Listener, advertised, bind
from rfork.seed.others import OtherNodes
from rfork.seed.shards import Blob, RankRecord, ShardRecord
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
from rfork.wire.seed import LeaseReply, LeaseRequest, Refusal, StatusReply

logger = logging.getLogger(__name__)


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
        self._core = NodeCore(
            instance_id or new_instance_id(), capacity=config.capacity, lease_ttl_s=config.lease_ttl_s
        )
        self._clock = clock or SystemClock()
        self.guard = guard_of(config, lambda: self.instance_id, self._clock)
        self._lock = threading.RLock()
        self._drained = threading.Condition(self._lock)
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

    @contextlib.contextmanager
    def _held(self) -> Iterator[tuple[NodeCore, float]]:
        """The core under the lock, and the time; what comes of it is told before the lock is let go."""
        with self._lock:
            try:
                yield self._core, self._clock.now()
            finally:
                for effect in self._core.take_effects():
                    self._tell(effect)

    def _tell(self, effect: Effect) -> None:
        if isinstance(effect, leases.Ended):
            logger.info("rfork: lease of %s is %s: %s", effect.lease.client, effect.state.value, effect.why)
            self._drained.notify_all()
            return
        level = logging.WARNING if effect.after is SeedState.STOPPED and not effect.is_asked_for else logging.INFO
        why = f": {effect.why}" if effect.why else ""
        logger.log(level, "rfork: seed %s is %s%s", self.instance_id, effect.after.value, why)
        self.metrics.update()
        for observer in self._observers:
            try:
                observer(effect.after)
            except Exception:  # the others have to hear of it all the same
                logger.exception("rfork: seed %s: an observer failed", self.instance_id)

    def _facts(self) -> Facts:
        with self._held() as (core, now):
            status = core.status_reply(self.listener_url, now)
            return Facts(status, status.num_readers, core.num_granted, dict(core.num_refused))

    # The engine's side

    def start(self, *, host: str = "127.0.0.1", num_local_ranks: int | None = None) -> None:
        """Open the listener, on `host` unless the configuration says otherwise. Raises ConfigError if it can't."""
        self._core.num_expected = num_local_ranks
        if self.config.seed == "off":
            self._step(SeedEvent.STOP, "it was switched off (seed: off)", is_asked_for=True)
            return
        certificate = Certificate.of(self.config.tls_cert_file, self.config.tls_key_file)
        sock = bind(self.config, host)
        try:
            url = advertised(sock, self.config.advertise_host, scheme="https" if certificate else "http")
            self._listener = Listener(make_app(self), sock, url, certificate=certificate)
        except BaseException:
            sock.close()
            raise
        self._listener.start()
        logger.info("rfork: instance %s, listener %s", self.instance_id, self._listener.url)

    def ready(self) -> None:
        """The server is healthy. Ranks are asked once to check their digests; then, and if all published, it serves."""
        with self._lock:
            self._core.is_healthy = True
        self.metrics.open()
        self._consider()

    def drain(self, why: str = "shutdown") -> None:
        """Grant nothing more, here and at the other nodes; leases run out. Returns at once."""
        self._step(SeedEvent.DRAIN, why)

    def wait_drained(self, timeout_s: float) -> bool:
        """Wait until nobody reads, here or from another node. False if somebody still reads here after `timeout_s`."""
        deadline = self._clock.now() + timeout_s
        with self._drained:
            while self.num_readers and (left := deadline - self._clock.now()) > 0:
                self._drained.wait(min(left, 0.2))
            is_drained = not self._core.book.live
        self.others.wait_drained(deadline - self._clock.now())
        return is_drained

    def stop(self, timeout_s: float = 5.0) -> None:
        """End everything: leases revoked, engines in ranks destroyed, listener and control closed. Idempotent."""
        self._step(SeedEvent.STOP, "it was shut down", is_asked_for=True)
        asking = [threading.Thread(target=r.peer.ask, args=("close", timeout_s), daemon=True) for r in self._ranks()]
        for thread in asking:
            thread.start()
        for thread in asking:
            thread.join(timeout=timeout_s)
        if self._listener:
            self._listener.stop()
        self._control.close()

    # What others may know

    @property
    def instance_id(self) -> InstanceId:
        return self._core.instance_id

    @property
    def state(self) -> SeedState:
        return self._core.state

    @property
    def listener_url(self) -> str | None:
        return self._listener.url if self._listener else None

    @property
    def bound_host(self) -> str:
        """Where this node's listeners bind."""
        return self._listener.host if self._listener else "127.0.0.1"

    @property
    def num_readers(self) -> int:
        with self._held() as (core, now):
            core.tick(now)
            return core.book.num_readers

    @property
    def other_listeners(self) -> tuple[str, ...]:
        """Where the other nodes of this instance listen, once its ranks have said so."""
        with self._lock:
            return self._core.other_listeners

    def status_reply(self) -> StatusReply:
        with self._held() as (core, now):
            return core.status_reply(self.listener_url, now)

    def closed(self) -> Refusal | None:
        """Why nothing is granted now; None while it serves."""
        with self._lock:
            return self._core.closed()

    def shard_of_rank(self, rank: int) -> ShardRecord | None:
        """The target shard that a stock client means by a rank number."""
        with self._lock:
            return self._core.shard_of_rank(rank)

    def snapshot(self) -> Snapshot | None:
        """What a registry is told; None before any rank has said what it loads."""
        with self._held() as (core, now):
            return core.snapshot(now)

    def ranks_answer(self, timeout_s: float) -> bool:
        """Ask every rank for a sign of life, all at once. Waits: not for an event loop."""
        ranks = self._ranks()
        if not ranks:
            return False
        with ThreadPoolExecutor(len(ranks), thread_name_prefix="rfork-ping") as pool:
            return all(answer.ok for answer in pool.map(lambda r: r.peer.ask("ping", timeout_s), ranks))

    def peer_of(self, ref: leases.ShardRef) -> RankPeer | None:
        """The rank that holds a shard."""
        with self._lock:
            rank = self._core.table.rank_of(ref)
            return rank.peer if rank is not None else None

    def published(self) -> tuple[list[tuple[ShardRecord, RankPeer]], set[str]]:
        """Every shard that is published here, with its rank; and where other nodes of this instance listen."""
        with self._lock:
            shards = [(shard, rank.peer) for rank in self._ranks() for shard in rank.shards.values()]
            return shards, set(self._core.other_listeners)

    def condemn(self, record: ShardRecord, why: str) -> bool:
        """Nobody may fork from this any more: it is not what was published. False if it was replaced meanwhile."""
        with self._held() as (core, now):
            rank = core.table.rank_of(record.ref)
            if rank is None or rank.changing or core.table.find(record.ref) is not record:
                return False
            if why:
                core.disown(rank, why, now)
            return True

    def _ranks(self) -> list[RankRecord]:
        with self._lock:
            return [rank for rank in self._core.table.ranks.values() if not rank.gone]

    # The listener's side

    def grant(self, request: LeaseRequest) -> LeaseReply | Refusal:
        with self._held() as (core, now):
            reply = core.grant(request, now)
        if isinstance(reply, LeaseReply):
            logger.info("rfork: lease of %s to %s, generation %d", request.rank.key, request.client, reply.generation)
        return reply

    def renew(self, lease_id: str) -> Refusal | None:
        with self._held() as (core, now):
            return core.renew_or_release(leases.Renew(lease_id), now)

    def release(self, lease_id: str) -> Refusal | None:
        with self._held() as (core, now):
            return core.renew_or_release(leases.Release(lease_id), now)

    def leased(self, lease_id: str) -> ShardRecord | Refusal:
        """The shard that a live lease is for."""
        with self._held() as (core, now):
            return core.leased(lease_id, now)

    def digests(self, record: ShardRecord) -> Blob | Refusal:
        """Digests of a shard, asked from its rank where nobody has needed them yet. May wait: not for an event loop."""
        with record.digesting:
            if record.digests is not None:
                return record.digests
            with self._lock:
                rank = self._core.table.rank_of(record.ref)
            if rank is None:
                return refuse("not_ready", "the rank is gone")
            answer = rank.peer.ask("digests", self.config.publish_timeout_s)
            with self._lock:
                is_current = self._core.table.find(record.ref) is record and not rank.changing
                table = dict(answer.digests).get(record.published.shard)
            if not answer.ok or table is None:
                return refuse("not_ready", f"no digests: {answer.error}", retry_after_s=1.0)
            if not is_current:
                return refuse("stale_generation", "the weights changed while their digests were taken")
            return record.take_digests(table)

    # The ranks' side

    def _on_message(self, peer: RankPeer, message: RankMessage) -> None:
        match message:
            case Hello():
                with self._held() as (core, now):
                    core.hello(peer, now)
            case GroupEnded():
                self.groups.ended(message)
            case Seeking():
                with self._lock:
                    self._core.seeks(message)
            case Told():
                self.on_report(message.report)
            case Elsewhere():
                with self._lock:
                    self._core.elsewhere = message.listeners
            case Healthy():
                self.ready()
            case Published():
                self._on_news(peer, self._record(peer, message))
            case Loaded() | Changing() | Refused():
                self._on_news(peer, message)

    def _record(self, peer: RankPeer, published: Published) -> ShardRecord | Refused:
        """Decoding, encoding and compressing a large manifest takes a while: not under the lock."""
        with self._lock:
            rank = self._core.table.of(peer)
            previous = rank.shards.get(published.shard) if rank else None
        try:
            return ShardRecord(published, peer.hello.replica, previous)
        except ValueError as error:
            return Refused(peer.hello.rank, f"what it published is not sound: {error}")

    def _on_news(self, peer: RankPeer, news: Loaded | Changing | Refused | ShardRecord) -> None:
        with self._held() as (core, now):
            if not core.hear(peer, news, now):
                return
        self._consider()
        if isinstance(news, Changing) and news.unmaps:
            self.on_unmapping()
            peer.tell("withdrawn")

    def _on_gone(self, peer: RankPeer) -> None:
        with self._held() as (core, now):
            core.gone(peer, now)

    # State

    def _consider(self) -> None:
        """Serve, if everything for it has come together."""
        with self._held() as (core, now):
            ranks = core.to_check(now)
        if ranks:
            threading.Thread(target=self._second_check, args=(ranks,), name="rfork-check", daemon=True).start()

    def _second_check(self, ranks: list[RankRecord]) -> None:
        """I5: what changed since publication without the fence moving, in warm-up say, must never be served."""
        with ThreadPoolExecutor(len(ranks), thread_name_prefix="rfork-check") as pool:
            answers = list(pool.map(lambda r: r.peer.ask("recheck", self.config.publish_timeout_s), ranks))
        with self._held() as (core, now):
            for rank, answer in zip(ranks, answers, strict=True):
                if not answer.ok:
                    core.disown(rank, answer.error, now)
                    return
            core.check = True
        self._consider()

    def _step(self, event: SeedEvent, why: str, *, is_asked_for: bool = False) -> None:
        with self._held() as (core, now):
            core.step(event, why, now, is_asked_for=is_asked_for)

    def __repr__(self) -> str:
        with self._lock:
            return repr(self._core)
