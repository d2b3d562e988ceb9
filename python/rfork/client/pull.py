"""A pull: the shard's bytes read from the seed's memory over a one-sided fabric, while the seed does nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from rfork.binding import Binding, Layout, Slice, bind, cut
from rfork.client.arrivals import Arrivals
from rfork.client.beside import Approach
from rfork.client.connect import Connector, FenceCheck, Link
from rfork.client.contract import HeldLease, LocalShard, PullSettings
from rfork.client.lend import Lender
from rfork.client.lifecycle import PullEvent, PullState
from rfork.client.progress import Observer
from rfork.client.transfer import Task, Transfer
from rfork.client.verify import Chunk, blame, describe, differing_chunks
from rfork.clock import Clock
from rfork.errors import DigestMismatch, TransportError
from rfork.machine import Machine
from rfork.manifest import Manifest, TransferPlan
from rfork.transports.base import Engine
from rfork.transports.read import Window, read_all
from rfork.transports.select import PACES, Fabrics
from rfork.wire.seed import DigestTable, LeaseReply, WeightsReport

logger = logging.getLogger(__name__)

_ENDLESS_NBYTES = 1 << 62

Digested = Callable[[], DigestTable]
"""Waits for the digests of what was read."""


def connector(
    reply: LeaseReply, fabrics: Fabrics, settings: PullSettings, check_fence: FenceCheck, clock: Clock
) -> Connector:
    """A connector for one lease, with the deadlines of `settings`."""
    return Connector(
        reply,
        fabrics,
        check_fence,
        clock,
        connect_timeout_s=settings.connect_timeout_s,
        close_timeout_s=settings.close_timeout_s,
        own_sessions=settings.own_sessions,
    )


def pull(
    shard: LocalShard,
    lease: HeldLease,
    fabrics: Fabrics,
    settings: PullSettings,
    *,
    check_fence: FenceCheck,
    clock: Clock,
    observer: Observer | None = None,
    life: Machine[PullState, PullEvent] | None = None,
    approach: Approach | None = None,
    lender: Lender | None = None,
) -> WeightsReport:
    """Fill `shard` from the seed behind `lease`, verified as `settings.verify` says.

    `approach`, if given, is on its way to the same seed. What `lender` has already is copied, where every byte is
    verified.

    The engine is destroyed on every way out. Errors, and `life`, are as `Task` has them.
    """
    task = Task(shard, lease, settings, check_fence, clock, observer, life)
    return _Pull(task, fabrics, approach, lender).carry_out()


class _Pull(Transfer):
    def __init__(self, task: Task, fabrics: Fabrics, approach: Approach | None, lender: Lender | None) -> None:
        super().__init__(task)
        self._approach = approach
        self._lender = lender
        self._connector = (
            approach.connector
            if approach
            else connector(self._reply, fabrics, self._settings, self._check_fence, self._clock)
        )
        self._lent: dict[int, Any] = {}
        self._runs: list[Slice] = []

    def run(self) -> WeightsReport:
        manifest, theirs, plan = self._match()
        with self._phase("pair"):
            self._plan_reads(plan)
        self._move(PullEvent.PAIRED)
        link = self._connect()
        engine, peer = link.engine, link.peer
        try:
            self._move(PullEvent.CONNECTED, f"{engine.protocol} {peer}")
            self._copy_lent(plan.group_nbytes)
            with self._phase("read"):
                arrived = self._read_missing(engine, peer, manifest, theirs)
                arrived = arrived or self._read(engine, peer, plan.nbytes - self._lent_nbytes, theirs)
            self._move(PullEvent.ALL_READ)
            with self._phase("verify"):
                self._connector.fence(engine, peer, self._shard)
                if theirs is not None:
                    self._verify(engine, peer, manifest, theirs, arrived())
        finally:
            with self._phase("close"):
                engine.close(self._settings.close_timeout_s)
        return self._settle(plan, engine.protocol)

    def _plan_reads(self, plan: TransferPlan) -> None:
        binding, shard = self._reply.binding, self._shard
        if self._lender is not None and self._settings.verify == "full":
            self._lent = self._lender.lends(self._reply)
        if not self._lent:
            self._runs = self._runs_of(plan.group_nbytes, shard.addresses, binding, shard.slack)
            return
        rest = [group for group in range(len(plan.group_nbytes)) if group not in self._lent]
        columns = plan.group_nbytes, shard.addresses, binding.addresses, shard.slack
        sizes, here, there, slack = (tuple(column[group] for group in rest) for column in columns)
        self._runs = self._runs_of(sizes, here, Layout(binding.regions, there, sizes), slack)

    # connecting: the fence page is the tiny read on the exact path, and the fence before the weights

    def _connect(self) -> Link:
        if self._approach is None:
            self._shard.synchronize()
        else:
            with self._phase("connect"):
                self._shard.synchronize()
                link = self._approach.take()
            if self._register(link):
                return link
        return self._connector.connect(self._shard, self._shard.regions, self._phase)

    def _register(self, link: Link) -> bool:
        """Register the shard with an engine that has connected; where that fails it is destroyed, and others may do."""
        try:
            with self._phase("register"):
                link.register(self._shard.regions)
            return True
        except BaseException as error:
            link.engine.close(self._settings.close_timeout_s)
            if not isinstance(error, TransportError):
                raise
            self._connector.failed(link.engine.protocol, link.peer, error)
            return False

    # reading and settling: local memory is dirty from here on

    def _copy_lent(self, group_nbytes: Sequence[int]) -> None:
        """Copy what this process holds already. It counts as read: a copy that is wrong is read after all."""
        if not self._lent:
            return
        with self._phase("copy"):
            for group, source in self._lent.items():
                self._shard.copy_in(group, source)
        self._lent_nbytes = sum(group_nbytes[group] for group in self._lent)
        self._lent = {}

    def _read(self, engine: Engine, peer: str, nbytes: int, theirs: DigestTable | None) -> Digested:
        self._observer.on_total(nbytes)
        self._read_nbytes = nbytes
        digests = self._shard.begin_digests(theirs.chunk_nbytes) if theirs is not None else None
        binding = self._reply.binding
        arrivals = Arrivals(digests, binding, self._groups_to_verify(len(binding.group_nbytes)))
        slices = cut(self._runs, PACES[engine.protocol].slice_nbytes)
        self._read_slices(engine, peer, slices, lambda count: arrivals.landed(slices, count))
        return arrivals.table

    def _runs_of(
        self,
        group_nbytes: tuple[int, ...],
        here: tuple[int, ...],
        there: Binding | Layout,
        slack: Sequence[int] | None = None,
    ) -> list[Slice]:
        """Reads as long as memory is contiguous on both sides, whatever the link likes."""
        plan = TransferPlan(group_nbytes=group_nbytes, set_states=(), set_inline=())
        ours = Layout(self._shard.regions, here, group_nbytes)
        return bind(plan, ours, there, max_slice_nbytes=_ENDLESS_NBYTES, slack=slack)

    def _read_missing(
        self, engine: Engine, peer: str, manifest: Manifest, theirs: DigestTable | None
    ) -> Digested | None:
        """Read what an earlier seed has not brought. None where nothing is known of what it did: all has to be read."""
        if not self._settings.resumes or theirs is None or self._settings.verify != "full":
            return None
        digests = self._shard.begin_digests(theirs.chunk_nbytes)
        missing = self._wrong_chunks(manifest, theirs, list(range(len(manifest.group_nbytes))))
        self._read_nbytes = sum(chunk.nbytes for chunk in missing)
        total = sum(manifest.group_nbytes)
        logger.info("rfork: %d of %d bytes are here from before, verified", total - self._read_nbytes, total)
        self._observer.on_total(self._read_nbytes)
        if missing:
            self._read_slices(engine, peer, self._slices_of(missing, engine.protocol))
        digests.feed(range(len(manifest.group_nbytes)))
        return digests.table

    def _read_slices(
        self, engine: Engine, peer: str, slices: Sequence[Slice], on_landed: Callable[[int], None] | None = None
    ) -> None:
        pace = PACES[engine.protocol]

        def landed(nbytes: int) -> None:
            self._lease.check()
            self._observer.on_bytes(nbytes)

        read_all(
            engine,
            peer,
            slices,
            window=Window(pace.flying_slices, pace.flying_nbytes, pace.longest_nap_s),
            progress_timeout_s=self._settings.progress_timeout_s,
            clock=self._clock,
            on_bytes=landed,
            on_landed=on_landed,
            limit_gbps=self._settings.limit_gbps,
        )

    def _verify(self, engine: Engine, peer: str, manifest: Manifest, theirs: DigestTable, first: DigestTable) -> None:
        """Compare digests; chunks that differ are read once more, under the fence, and compared again."""
        groups = self._groups_to_verify(len(manifest.group_nbytes))
        wrong = differing_chunks(first, theirs, manifest, groups)
        if not wrong:
            return
        seed = self._reply.instance_id
        what = describe(wrong[0], manifest)
        logger.warning("rfork: %d chunks from %s arrived wrong, reading them again: %s", len(wrong), seed, what)
        self._read_slices(engine, peer, self._slices_of(wrong, engine.protocol))
        self._read_nbytes += sum(chunk.nbytes for chunk in wrong)
        self._connector.fence(engine, peer, self._shard)
        groups = sorted({c.group for c in wrong})
        second = self._shard.digests(theirs.chunk_nbytes, groups)
        wrong = differing_chunks(second, theirs, manifest, groups)
        if wrong:
            third = self._shard.digests(theirs.chunk_nbytes, groups)
            raise DigestMismatch(
                f"{len(wrong)} chunks from {seed} differ from its digests, read twice, with its fence unmoved at "
                f"generation {self._reply.generation}. First: {describe(wrong[0], manifest)}. "
                f"{blame(wrong[0], seed, first, second, third)}"
            )

    def _slices_of(self, chunks: list[Chunk], protocol: str) -> list[Slice]:
        sizes = tuple(c.nbytes for c in chunks)
        here = tuple(self._shard.addresses[c.group] + c.offset for c in chunks)
        there = tuple(self._reply.binding.addresses[c.group] + c.offset for c in chunks)
        runs = self._runs_of(sizes, here, Layout(self._reply.binding.regions, there, sizes))
        return cut(runs, PACES[protocol].slice_nbytes)
