"""One pull of one shard: what it leaves behind in every case, over the reference transport and over Mooncake."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence

import pytest
from support.host_shard import HostLease, HostSeed, HostShard, manifest_of

from rfork.binding import Endpoint, Region, Slice
from rfork.client.contract import PullSettings
from rfork.client.lifecycle import PullEvent, PullState, new_pull
from rfork.client.progress import Silent
from rfork.client.pull import pull
from rfork.clock import SystemClock
from rfork.errors import (
    DigestMismatch,
    FenceBroken,
    ManifestMismatch,
    NotQuiet,
    RForkError,
    SeedLost,
    SeedRefused,
    SeedUnreachable,
)
from rfork.fence import check_fence
from rfork.manifest import Manifest, StateEntry
from rfork.transports.base import Engine, Transfer, TransferState, Transport
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import WeightsReport

SIZES = {"a.weight": 300_000, "b.weight": 1, "c.bias": 4096, "d.weight": 70_000}
STATES = (StateEntry("c.k_scale_float", 0.5, True),)


class Bench:
    """A seed and an empty shard, joined by one fabric; checks after each test that no pull engine is left open."""

    def __init__(self, fabric: MemoryFabric, transport: Transport) -> None:
        self.fabric = fabric
        self.transport = transport
        self.manifest = manifest_of(SIZES, STATES)
        self.seed = HostSeed(self.manifest, [transport], gap=512)
        self.shard = HostShard(self.manifest)
        self.life = new_pull(self.manifest.rank.key)
        self.life.apply(PullEvent.LEASED, now=0)

    def pull(
        self,
        lease: HostLease | None = None,
        *,
        transports: Sequence[Transport] = (),
        observer: Silent | None = None,
        settings: PullSettings | None = None,
    ) -> WeightsReport:
        return pull(
            self.shard,
            lease or self.seed.lease(),
            GivenFabrics(transports or [self.transport]),
            settings or PullSettings(connect_timeout_s=5, progress_timeout_s=5),
            check_fence=check_fence,
            clock=SystemClock(),
            observer=observer,
            life=self.life,
        )

    def fails(self, error: type[RForkError], match: str, **arguments: object) -> RForkError:
        with pytest.raises(error, match=match) as caught:
            self.pull(**arguments)  # type: ignore[arg-type]
        return caught.value


@pytest.fixture
def bench() -> Iterator[Bench]:
    fabric = MemoryFabric()
    bench = Bench(fabric, MemoryTransport(fabric))
    yield bench
    assert fabric.num_open == 1, "a pull engine is destroyed on every way out; the seed's is left"


@pytest.fixture(params=["memory", "mooncake-tcp"])
def any_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    fabric = MemoryFabric()
    transport: Transport = (
        MemoryTransport(fabric)
        if request.param == "memory"
        else MooncakeTransport(protocol="tcp", host="127.0.0.1", connect_timeout_s=3)
    )
    bench = Bench(fabric, transport)
    yield bench
    bench.seed.close()


class Toxic:
    """A transport that does something to each finished slice before it says so."""

    def __init__(self, inner: Transport, poison: Callable[[Slice], TransferState]) -> None:
        self.inner, self.poison = inner, poison
        self.protocol, self.scope = inner.protocol, inner.scope

    def open(self) -> Engine:
        return ToxicEngine(self.inner.open(), self.poison)


class ToxicEngine:
    def __init__(self, inner: Engine, poison: Callable[[Slice], TransferState]) -> None:
        self._inner, self._poison = inner, poison
        self.protocol, self.session_id = inner.protocol, inner.session_id

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._inner.unregister(regions)

    def submit(self, peer: str, part: Slice) -> Transfer:
        return ToxicTransfer(self._inner.submit(peer, part), part, self._poison)

    def close(self, timeout_s: float) -> None:
        self._inner.close(timeout_s)


class ToxicTransfer:
    def __init__(self, inner: Transfer, part: Slice, poison: Callable[[Slice], TransferState]) -> None:
        self._inner, self._part, self._poison = inner, part, poison

    def poll(self) -> TransferState:
        state = self._inner.poll()
        return self._poison(self._part) if state is TransferState.DONE else state


class OnBytes(Silent):
    """Does something when the first weights land."""

    def __init__(self, strike: Callable[[], object]) -> None:
        self._strike: Callable[[], object] | None = strike

    def on_bytes(self, nbytes: int) -> None:
        if self._strike is not None:
            self._strike()
            self._strike = None


def test_a_pull_brings_every_byte_and_every_carried_value(any_bench: Bench) -> None:
    report = any_bench.pull()
    assert any_bench.shard.same_bytes(any_bench.seed.shard)
    assert any_bench.shard.applied == list(STATES)
    assert any_bench.shard.num_synchronized == 1
    assert any_bench.life.state is PullState.LOADED
    assert (report.source, report.verify, report.nbytes) == ("seed", "full", sum(SIZES.values()))
    assert report.protocol == any_bench.transport.protocol
    assert report.origin_verified
    assert {"lease", "pair", "register", "connect", "read", "verify", "close", "finish"} == set(report.phases_s)


def test_other_tensors_are_refused_before_a_byte_moves(bench: Bench) -> None:
    bench.shard = HostShard(manifest_of({**SIZES, "b.weight": 2}, STATES))
    bench.fails(ManifestMismatch, "b.weight")
    assert bench.shard.is_untouched
    assert bench.life.state is PullState.SEEKING


def test_a_manifest_that_the_lease_does_not_name_is_refused(bench: Bench) -> None:
    lease = bench.seed.lease()
    lease.the_manifest = manifest_of({"a.weight": 1})
    bench.fails(SeedUnreachable, "another manifest than its lease", lease=lease)
    assert bench.shard.is_untouched


def test_reading_oneself_is_refused(bench: Bench) -> None:
    own = PullSettings(own_sessions=(bench.seed.engines[0].session_id,))
    error = bench.fails(SeedRefused, "its own memory", settings=own)
    assert error.reason == "self"


def test_full_verification_refuses_a_seed_that_was_not_verified_itself(bench: Bench) -> None:
    error = bench.fails(SeedRefused, "did not verify", lease=bench.seed.lease(verified=False))
    assert error.reason == "unverified"


def test_an_unverified_lineage_is_passed_on(bench: Bench) -> None:
    report = bench.pull(bench.seed.lease(verified=False), settings=PullSettings(verify="sample"))
    assert not report.origin_verified


def test_without_verification_no_digests_are_asked_for(bench: Bench) -> None:
    lease = bench.seed.lease()
    report = bench.pull(lease, settings=PullSettings(verify="off"))
    assert lease.num_digest_requests == 0
    assert bench.shard.same_bytes(bench.seed.shard)
    assert (report.verify, report.origin_verified) == ("off", False)


def test_digests_that_do_not_cover_the_manifest_are_refused(bench: Bench) -> None:
    lease = bench.seed.lease()
    lease.table = type(lease.table)(lease.table.algorithm, lease.table.chunk_nbytes, lease.table.values[:-1])
    error = bench.fails(SeedRefused, "do not cover", lease=lease)
    assert error.reason == "unverified"


def test_digests_of_another_kind_are_refused(bench: Bench) -> None:
    lease = bench.seed.lease()
    lease.table = type(lease.table)("mix64-1", lease.table.chunk_nbytes, lease.table.values)
    bench.fails(SeedRefused, "mix64-1 digests, this device computes xxh3-64", lease=lease)


def test_a_dead_endpoint_is_followed_by_the_next(bench: Bench) -> None:
    bench.seed.endpoints = (Endpoint("memory", "memory:99"), *bench.seed.endpoints)
    bench.pull()
    assert bench.shard.same_bytes(bench.seed.shard)


def test_no_usable_endpoint_says_what_was_offered_and_tried(bench: Bench) -> None:
    bench.seed.endpoints = (Endpoint("memory", "memory:99"), Endpoint("rdma", "192.0.2.1:1", "host:x"))
    error = bench.fails(SeedUnreachable, "offers memory")
    assert "rdma (host:x)" in str(error)
    assert "nobody answers at memory:99" in str(error)


def test_another_instances_fence_is_refused(bench: Bench) -> None:
    """An address that was reused (P17)."""
    bench.seed.instance_id = "i-other"
    bench.fails(FenceBroken, "belongs to another instance")
    assert bench.shard.is_untouched


def test_weights_that_change_already_are_refused(bench: Bench) -> None:
    bench.seed.fence.close()
    bench.fails(FenceBroken, "is changing its weights")
    assert bench.shard.is_untouched


def test_weights_that_change_while_they_are_read_are_refused(bench: Bench) -> None:
    def update() -> None:
        bench.seed.fence.close()
        bench.seed.fence.open()

    bench.fails(FenceBroken, "has changed its weights", observer=OnBytes(update))
    assert bench.life.state is PullState.SEEKING


def test_a_read_that_brings_nothing_is_seen_by_the_fence(bench: Bench) -> None:
    """A transport that reports success without moving a byte (P04)."""

    def wipe(part: Slice) -> TransferState:
        ctypes.memset(part.local, 0, part.nbytes)
        return TransferState.DONE

    bench.fails(FenceBroken, "no fence page", transports=[Toxic(bench.transport, wipe)])


def test_a_byte_flipped_on_the_way_is_read_again(bench: Bench) -> None:
    flips: list[int] = []

    def flip_once(part: Slice) -> TransferState:
        if not flips and part.nbytes == SIZES["a.weight"]:
            flips.append(part.local)
            ctypes.c_uint8.from_address(part.local + 100_000).value ^= 1
        return TransferState.DONE

    bench.pull(transports=[Toxic(bench.transport, flip_once)])
    assert flips
    assert bench.shard.same_bytes(bench.seed.shard)


def test_bytes_that_stay_wrong_are_blamed_by_name(bench: Bench) -> None:
    bench.seed.shard.group(0)[200_000] ^= 1
    error = bench.fails(DigestMismatch, r"a\.weight \(uint8\[300000\]\) chunk 4, bytes 196608 to 262144")
    assert "read twice" in str(error)
    assert bench.shard.applied == []
    assert bench.life.state is PullState.SEEKING


def test_a_slice_that_fails_is_a_lost_seed(bench: Bench) -> None:
    def fail(part: Slice) -> TransferState:
        return TransferState.FAILED if part.nbytes == SIZES["d.weight"] else TransferState.DONE

    bench.fails(SeedLost, "reading 70000 bytes", transports=[Toxic(bench.transport, fail)])
    assert bench.life.state is PullState.SEEKING
    assert "seed_lost" in bench.life.history[-1].note


def test_a_seed_that_closes_in_the_middle_is_a_lost_seed(any_bench: Bench) -> None:
    close = OnBytes(lambda: [e.close(10) for e in any_bench.seed.engines])
    any_bench.fails(SeedLost, "reading [0-9]+ bytes at", observer=close)
    assert any_bench.life.state is PullState.SEEKING


def test_a_lease_that_ends_early_ends_the_read(bench: Bench) -> None:
    lease = bench.seed.lease()

    def revoke() -> None:
        lease.lost = SeedRefused("the weights change", reason="stale_generation")

    error = bench.fails(SeedRefused, "the weights change", lease=lease, observer=OnBytes(revoke))
    assert error.reason == "stale_generation"


def test_an_engine_that_can_not_be_destroyed_ends_everything(bench: Bench) -> None:
    """I8 beats I9: also over the error that led there."""

    class Stuck(ToxicEngine):
        def close(self, timeout_s: float) -> None:
            super().close(timeout_s)
            raise NotQuiet("the engine is still there")

    class StuckTransport(Toxic):
        def open(self) -> Engine:
            return Stuck(self.inner.open(), self.poison)

    bench.fails(NotQuiet, "still there", transports=[StuckTransport(bench.transport, lambda _: TransferState.FAILED)])
    assert bench.life.state is PullState.REFUSED


def test_a_bug_on_our_side_still_destroys_the_engine(bench: Bench) -> None:
    def bug() -> None:
        raise KeyError("oops")

    with pytest.raises(KeyError):
        bench.pull(observer=OnBytes(bug))


def test_bytes_and_phases_are_told_as_they_happen(bench: Bench) -> None:
    class Listing(Silent):
        def __init__(self) -> None:
            self.phases: list[str] = []
            self.nbytes = 0
            self.total = 0

        def on_phase(self, name: str) -> None:
            self.phases.append(name)

        def on_total(self, nbytes: int) -> None:
            self.total = nbytes

        def on_bytes(self, nbytes: int) -> None:
            self.nbytes += nbytes

    told = Listing()
    bench.pull(observer=told)
    assert told.nbytes == told.total == sum(SIZES.values())
    assert " ".join(told.phases) == "lease pair pair register register connect read verify close finish"


def test_an_empty_manifest_is_equal_and_moves_nothing(bench: Bench) -> None:
    empty: Manifest = manifest_of({})
    bench.seed.shard.manifest = bench.shard.manifest = empty
    bench.seed.shard.addresses = bench.shard.addresses = ()
    bench.seed.table = bench.seed.shard.digests(65536, ())
    assert bench.pull().nbytes == 0
