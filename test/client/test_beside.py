"""What a fork does beside the build: it is ready when the model is, and nothing of it outlives the attempt."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator

import pytest
import torch
from support.host_shard import HostLease, HostSeed, HostShard, manifest_of

from rfork.client.beside import Approach, PrefetchedLease
from rfork.client.contract import PullSettings
from rfork.client.pause import collector_paused, freeze_what_exists
from rfork.client.pull import connector, pull
from rfork.client.warm import warm_up_in_background
from rfork.clock import SystemClock
from rfork.errors import FenceBroken, SeedUnreachable, TransportError
from rfork.fence import check_fence
from rfork.inventory.target import DevicePage
from rfork.manifest import Manifest, StateEntry
from rfork.transports.base import Transport
from rfork.transports.memory import MemoryEngine, MemoryFabric, MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import DigestTable, WeightsReport

SETTINGS = PullSettings(connect_timeout_s=5, progress_timeout_s=5, close_timeout_s=5)
CPU = torch.device("cpu")
SIZES = {"a.weight": 300_000, "b.weight": 1, "c.bias": 4096, "d.weight": 70_000}
STATES = (StateEntry("c.k_scale_float", 0.5, True),)


class Bench:
    """A seed, and a client that connects before it has a shard."""

    def __init__(self, fabric: MemoryFabric) -> None:
        self.fabric = fabric
        self.transport: Transport = MemoryTransport(fabric)
        self.seed = HostSeed(manifest_of(SIZES, STATES), [self.transport], gap=512)

    def approach(self, lease: HostLease) -> Approach:
        connecting = connector(lease.reply, GivenFabrics([self.transport]), SETTINGS, check_fence, SystemClock())
        return Approach(connecting, DevicePage(CPU), 5)

    def pull(self, lease: HostLease, approach: Approach) -> WeightsReport:
        self.shard = HostShard(manifest_of(SIZES, STATES))
        return pull(
            self.shard,
            lease,
            GivenFabrics([self.transport]),
            SETTINGS,
            check_fence=check_fence,
            clock=SystemClock(),
            approach=approach,
        )


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = threading.active_count()
    bench = Bench(MemoryFabric())
    yield bench
    assert bench.fabric.num_open == 1, "the seed's engine is the only one that is left"
    assert threading.active_count() == before


def test_a_pull_reads_through_the_engine_that_connected_beside_the_build(bench: Bench) -> None:
    lease = bench.seed.lease()
    with bench.approach(lease) as approach:
        report = bench.pull(lease, approach)
    assert bench.shard.same_bytes(bench.seed.shard)
    assert list(report.phases_s) == ["lease", "pair", "connect", "register", "read", "verify", "close", "finish"]


def test_an_engine_that_nobody_takes_is_destroyed(bench: Bench) -> None:
    with pytest.raises(ZeroDivisionError), bench.approach(bench.seed.lease()):
        raise ZeroDivisionError


def test_a_fence_that_is_broken_early_ends_the_attempt(bench: Bench) -> None:
    lease = bench.seed.lease()
    bench.seed.fence.close()
    with pytest.raises(FenceBroken), bench.approach(lease) as approach:
        bench.pull(lease, approach)


def test_a_fence_that_is_broken_during_the_build_ends_the_attempt(bench: Bench) -> None:
    lease = bench.seed.lease()
    with bench.approach(lease) as approach:
        approach.take()
        bench.seed.fence.close()
        with pytest.raises(FenceBroken):
            bench.pull(lease, approach)


def test_a_seed_that_nobody_reaches_is_told_once(bench: Bench) -> None:
    lease = bench.seed.lease()
    bench.seed.close()
    bench.seed.engines = [bench.transport.open()]  # for the fixture's count
    with pytest.raises(SeedUnreachable, match="nobody answers") as caught, bench.approach(lease) as approach:
        bench.pull(lease, approach)
    assert str(caught.value).count("nobody answers") == 1


def test_where_the_shard_cant_be_registered_the_next_endpoint_is_tried(bench: Bench) -> None:
    class Picky(MemoryEngine):
        def register(self, regions):  # type: ignore[no-untyped-def]
            if len(regions) > 1:
                raise TransportError("only a page fits")
            super().register(regions)

    class PickyTransport(MemoryTransport):
        def open(self):  # type: ignore[no-untyped-def]
            return Picky(bench.fabric)

    lease = bench.seed.lease()
    connecting = connector(
        lease.reply, GivenFabrics([PickyTransport(bench.fabric), bench.transport]), SETTINGS, check_fence, SystemClock()
    )
    with Approach(connecting, DevicePage(CPU), 5) as approach:
        report = bench.pull(lease, approach)
    assert bench.shard.same_bytes(bench.seed.shard)
    assert report.origin_verified


def test_a_page_that_has_become_part_of_a_larger_region_is_registered_anew(bench: Bench) -> None:
    """What the page's region was before the model was built may overlap what the model needs."""
    lease = bench.seed.lease()
    page = DevicePage(CPU)
    connecting = connector(lease.reply, GivenFabrics([bench.transport]), SETTINGS, check_fence, SystemClock())
    with Approach(connecting, page, 5) as approach:
        link = approach.take()
        (alone,) = page.regions
        wider = type(alone)(alone.base - 64, alone.nbytes + 64)
        link.register([wider])
        link.engine.close(5)


class Slow:
    """A lease whose documents arrive when they are let go, one after another over one connection."""

    def __init__(self, lease: HostLease) -> None:
        self._lease = lease
        self.reply, self.address, self.check = lease.reply, lease.address, lease.check
        self.gate = threading.Event()
        self.under_way = 0

    def manifest(self) -> Manifest:
        return self._one(self._lease.manifest)  # type: ignore[return-value]

    def digests(self) -> DigestTable:
        return self._one(self._lease.digests)  # type: ignore[return-value]

    def _one(self, call):  # type: ignore[no-untyped-def]
        self.under_way += 1
        assert self.under_way == 1
        assert self.gate.wait(5)
        self.under_way -= 1
        return call()


def test_manifest_and_digests_are_fetched_while_nobody_waits(bench: Bench) -> None:
    slow = Slow(bench.seed.lease())
    with PrefetchedLease(slow, with_digests=True) as prefetched:
        slow.gate.set()
        assert prefetched.manifest() == bench.seed.shard.manifest
        assert prefetched.table is None
        assert prefetched.digests() is prefetched.table
        assert prefetched.table is bench.seed.table


def test_digests_that_nobody_needs_are_not_asked_for(bench: Bench) -> None:
    lease = bench.seed.lease()
    with PrefetchedLease(lease, with_digests=False) as prefetched:
        prefetched.manifest()
    assert lease.num_digest_requests == 0


def test_what_a_request_raised_is_raised_where_its_answer_is_needed(bench: Bench) -> None:
    lease = bench.seed.lease()
    lease.lost = SeedUnreachable("gone")
    broken = Slow(lease)
    broken.manifest = lambda: lease.check()  # type: ignore[method-assign, assignment, return-value]
    with PrefetchedLease(broken, with_digests=False) as prefetched, pytest.raises(SeedUnreachable, match="gone"):
        prefetched.manifest()


@pytest.mark.parametrize("was_enabled", [True, False])
def test_the_collector_is_as_it_was_after_a_pause(was_enabled: bool) -> None:
    (gc.enable if was_enabled else gc.disable)()
    try:
        with collector_paused():
            assert not gc.isenabled()
        assert gc.isenabled() is was_enabled
    finally:
        gc.enable()


def test_what_exists_is_never_looked_at_again() -> None:
    before = gc.get_freeze_count()
    freeze_what_exists()
    try:
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("device", ["cpu", "meta", "cuda:99"])
def test_warming_up_never_raises(device: str) -> None:
    thread = warm_up_in_background(torch.device(device))
    thread.join(30)
    assert not thread.is_alive()
