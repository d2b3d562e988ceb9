"""One attempt to take one shard from one seed that granted a lease.

match → connect → read → settle, all or nothing: on return the shard holds the seed's bytes; on an error it may be half
written, and may be read into again or thrown away, because the pull engine is destroyed on every way out.
"""

from __future__ import annotations

import contextlib
import logging
import random
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, Protocol

import msgspec

from rfork.binding import Binding, Layout, Region, Slice, bind, cut
from rfork.client.arrivals import Arrivals, ArrivingDigests
from rfork.client.beside import Approach
from rfork.client.connect import Connector, FenceCheck, Link
from rfork.client.lend import Lender
from rfork.client.lifecycle import PullEvent, PullState
from rfork.client.progress import Observer, Silent
from rfork.client.verify import Chunk, blame, check_table, describe, differing_chunks, groups_to_verify
from rfork.clock import Clock
from rfork.config import Config
from rfork.errors import DigestMismatch, NotQuiet, SeedError, SeedRefused, SeedUnreachable, TransportError
from rfork.machine import Machine
from rfork.manifest import InlineEntry, Manifest, StateEntry, TransferPlan, pair
from rfork.transports.base import Engine
from rfork.transports.read import Window, read_all
from rfork.transports.select import PACES, Fabrics
from rfork.wire.seed import DigestTable, LeaseReply, SeedRef, WeightsReport

logger = logging.getLogger(__name__)

_ENDLESS_NBYTES = 1 << 62


Digested = Callable[[], DigestTable]
"""Waits for the digests of what was read."""


class LocalShard(Protocol):
    """The memory to fill: an inventory of the built model, plus one page for the fence on the same device."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each alias group of the manifest starts."""

    @property
    def slack(self) -> tuple[int, ...]:
        """How many bytes behind each group are nobody's, and may be written to."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What to register: covers every group and the scratch page."""

    def scratch_page(self) -> tuple[int, int]:
        """Address and size of the page, zeroed by this call, so that a read which brings nothing is seen."""

    def read_scratch(self) -> bytes:
        """What the page holds now."""

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""

    def digests(self, chunk_nbytes: int, groups: Sequence[int]) -> DigestTable:
        """Digests of these groups' bytes as they are now; rows of other groups are empty."""

    def begin_digests(self, chunk_nbytes: int) -> ArrivingDigests:
        """The same for groups whose bytes arrive one after another."""

    def copy_in(self, group: int, source: Any) -> None:
        """Fill one group from bytes of this process that a shard like this one has lent, and wait for it."""

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        """Set carried values and copy inline tensors."""


class HeldLease(Protocol):
    """A granted lease that somebody renews and releases; `rfork.client.lease.Lease` is one."""

    @property
    def reply(self) -> LeaseReply: ...

    @property
    def address(self) -> str: ...

    def manifest(self) -> Manifest: ...

    def digests(self) -> DigestTable: ...

    def check(self) -> None:
        """Raise a SeedError if the lease ended early."""


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a pull verifies and what bounds it. `own_sessions` are session ids that this process serves under.
    `resumes`: the shard holds some of the bytes already, maybe.
    """

    verify: str = "full"
    connect_timeout_s: float = 10.0
    progress_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
    limit_gbps: float | None = None
    own_sessions: tuple[str, ...] = ()
    resumes: bool = False

    @classmethod
    def of(cls, config: Config, own_sessions: Collection[str] = ()) -> PullSettings:
        return cls(
            verify=config.verify,
            connect_timeout_s=config.connect_timeout_s,
            progress_timeout_s=config.read_timeout_s,
            close_timeout_s=config.close_timeout_s,
            limit_gbps=config.read_gbps_limit,
            own_sessions=tuple(own_sessions),
        )


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

    `life`, if given, is in MATCHING, and ends in LOADED, in SEEKING (SeedError: try the next seed) or in REFUSED
    (NotQuiet: memory may still be written to, so the process must end). Any other exception is a bug; the engine is
    destroyed then too.
    """
    attempt = _Pull(shard, lease, fabrics, settings, check_fence, clock, observer or Silent(), life, approach, lender)
    try:
        return attempt.run()
    except SeedError as error:
        attempt.move(PullEvent.SEED_FAILED, f"{error.reason}: {error}")
        raise
    except NotQuiet as error:
        attempt.move(PullEvent.FORBIDDEN, str(error))
        raise


class _Pull:
    def __init__(
        self,
        shard: LocalShard,
        lease: HeldLease,
        fabrics: Fabrics,
        settings: PullSettings,
        check_fence: FenceCheck,
        clock: Clock,
        observer: Observer,
        life: Machine[PullState, PullEvent] | None,
        approach: Approach | None = None,
        lender: Lender | None = None,
    ) -> None:
        self._shard = shard
        self._lease = lease
        self._reply = lease.reply
        self._settings = settings
        self._approach = approach
        self._lender = lender
        self._connector = (
            approach.connector if approach else connector(lease.reply, fabrics, settings, check_fence, clock)
        )
        self._check_fence = check_fence
        self._clock = clock
        self._observer = observer
        self._life = life
        self._phases_s: dict[str, float] = {}
        self._read_nbytes = self._lent_nbytes = 0
        self._lent: dict[int, Any] = {}
        self._runs: list[Slice] = []
        self._start_s = clock.now()

    def move(self, event: PullEvent, note: str = "") -> None:
        if self._life is not None:
            self._life.apply(event, now=self._clock.now(), note=note)

    def run(self) -> WeightsReport:
        manifest, theirs, plan = self._match()
        self.move(PullEvent.PAIRED)
        link = self._connect()
        engine, peer = link.engine, link.peer
        try:
            self.move(PullEvent.CONNECTED, f"{engine.protocol} {peer}")
            self._copy_lent(plan.group_nbytes)
            with self._phase("read"):
                arrived = self._read_missing(engine, peer, manifest, theirs)
                arrived = arrived or self._read(engine, peer, plan.nbytes - self._lent_nbytes, theirs)
            self.move(PullEvent.ALL_READ)
            with self._phase("verify"):
                self._connector.fence(engine, peer, self._shard)
                if theirs is not None:
                    self._verify(engine, peer, manifest, theirs, arrived())
        finally:
            with self._phase("close"):
                engine.close(self._settings.close_timeout_s)
        with self._phase("finish"):
            self._shard.apply(plan.set_states, plan.set_inline)
        self.move(PullEvent.SETTLED)
        return self._report(engine.protocol)

    # matching: nothing local is touched

    def _match(self) -> tuple[Manifest, DigestTable | None, TransferPlan]:
        reply, verify = self._reply, self._settings.verify
        if verify == "full" and not reply.verified:
            raise SeedRefused(
                f"{reply.instance_id} did not verify the weights that it forked itself: verify=full wants that. "
                "Start it with verify=full, or this instance with verify=sample",
                reason="unverified",
            )
        for endpoint in reply.binding.endpoints:
            self._connector.refuse_own(endpoint.session_id)
        with self._phase("lease"):
            manifest = self._lease.manifest()
            theirs = self._lease.digests() if verify != "off" else None
        with self._phase("pair"):
            if manifest.digest != reply.binding.manifest_digest:
                raise SeedUnreachable(f"{reply.instance_id} sent another manifest than its lease names")
            plan = pair(manifest, self._shard.manifest, seed_name=reply.instance_id)
            if reply.binding.group_nbytes != plan.group_nbytes:
                raise SeedUnreachable(f"{reply.instance_id} binds other groups than its manifest has")
            if theirs is not None:
                check_table(theirs, manifest, reply.instance_id)
                self._check_algorithm(theirs)
            self._plan_reads(plan)
        return manifest, theirs, plan

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

    def _check_algorithm(self, theirs: DigestTable) -> None:
        mine = self._shard.digests(theirs.chunk_nbytes, ()).algorithm
        if mine != theirs.algorithm:
            raise SeedRefused(
                f"{self._reply.instance_id} has {theirs.algorithm} digests, this device computes {mine}: "
                "nothing could be verified. verify=off would take the weights unverified",
                reason="unverified",
            )

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

    def _groups_to_verify(self, num_groups: int) -> list[int]:
        return groups_to_verify(self._settings.verify, num_groups, random.Random(self._reply.lease))

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

    def _wrong_chunks(self, manifest: Manifest, theirs: DigestTable, groups: list[int]) -> list[Chunk]:
        mine = self._shard.digests(theirs.chunk_nbytes, groups)
        return differing_chunks(mine, theirs, manifest, groups)

    def _slices_of(self, chunks: list[Chunk], protocol: str) -> list[Slice]:
        sizes = tuple(c.nbytes for c in chunks)
        here = tuple(self._shard.addresses[c.group] + c.offset for c in chunks)
        there = tuple(self._reply.binding.addresses[c.group] + c.offset for c in chunks)
        runs = self._runs_of(sizes, here, Layout(self._reply.binding.regions, there, sizes))
        return cut(runs, PACES[protocol].slice_nbytes)

    # telling

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_s = self._clock.now()
        self._observer.on_phase(name)
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + self._clock.now() - start_s

    def _report(self, protocol: str) -> WeightsReport:
        reply, verify, nbytes = self._reply, self._settings.verify, self._read_nbytes
        seconds = max(self._clock.now() - self._start_s, 1e-9)
        read_s = max(self._phases_s["read"], 1e-9)
        logger.info(
            "rfork: %s: %d bytes from %s generation %d in %.3f s, %.2f GB/s over %s (read %.3f s, %.2f GB/s), "
            "verified: %s; %s%s",
            self._shard.manifest.rank.key,
            nbytes,
            reply.instance_id,
            reply.generation,
            seconds,
            nbytes / seconds / 1e9,
            protocol,
            read_s,
            nbytes / read_s / 1e9,
            verify,
            ", ".join(f"{name} {spent_s:.3f}" for name, spent_s in self._phases_s.items()),
            f"; {self._lent_nbytes} bytes more were here already and copied" if self._lent_nbytes else "",
        )
        return WeightsReport(
            source="seed",
            seed=SeedRef(reply.instance_id, self._lease.address, reply.generation),
            verify=verify,
            protocol=protocol,
            nbytes=nbytes,
            lent_nbytes=self._lent_nbytes,
            seconds=seconds,
            gbps=nbytes / seconds / 1e9,
            phases_s=dict(self._phases_s),
            origin_verified=reply.verified and verify == "full",
        )
