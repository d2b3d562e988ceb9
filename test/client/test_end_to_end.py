"""Address to weights, with the real seed service, its listener and its ranks in one process; only the model is
missing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import msgspec
import pytest
from support.buffers import Buffer
from support.host_shard import HostShard
from support.seed_node import Seed, lease_body, until

from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.pull import pull
from rfork.client.resolve import Candidate, resolve
from rfork.clock import SystemClock
from rfork.errors import FenceBroken, SeedError, SeedRefused
from rfork.fence import check_fence
from rfork.transports.memory import MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import LeaseRequest, WeightsReport


@pytest.fixture
def seed() -> Iterator[Seed]:
    with ExitStack() as stack:
        yield Seed(stack, lease_ttl_s=1).serve()


def find(seed: Seed) -> Candidate:
    return resolve(str(seed.http.base_url).rstrip("/"), timeout_s=5)


def request(**changes: Any) -> LeaseRequest:
    return msgspec.convert(lease_body(**changes), LeaseRequest)


def fork(seed: Seed, shard: HostShard, **changes: Any) -> WeightsReport:
    candidate = find(seed)
    with take_lease(candidate.listener, request(seed=candidate.instance_id, **changes), timeout_s=5) as lease:
        return pull(
            shard,
            lease,
            GivenFabrics([MemoryTransport(seed.fabric)]),
            PullSettings(),
            check_fence=check_fence,
            clock=SystemClock(),
        )


def empty_shard(seed: Seed) -> HostShard:
    return HostShard(seed.shards[0].resolve().manifest)


def test_an_address_is_all_that_a_client_needs(seed: Seed) -> None:
    shard = empty_shard(seed)
    report = fork(seed, shard)
    source: Buffer = seed.shards[0].buffer
    assert shard.buffer.view == source.view
    assert report.seed is not None
    assert report.seed.instance_id == seed.node.instance_id
    assert (report.verify, report.protocol, report.origin_verified) == ("full", "memory", True)


def test_every_fork_gives_its_place_back(seed: Seed) -> None:
    for _ in range(20):
        fork(seed, empty_shard(seed))
    assert seed.fabric.num_open == 1


def test_the_seed_says_which_field_differs(seed: Seed) -> None:
    identity = {**lease_body()["identity"], "dtype": "float8_e4m3fn"}
    with pytest.raises(SeedRefused) as caught:
        fork(seed, empty_shard(seed), identity=identity, instance_key="other")
    assert caught.value.reason == "key_mismatch"
    assert ("dtype", "float8_e4m3fn", "uint8") in caught.value.differing


def test_weights_that_change_end_the_lease(seed: Seed) -> None:
    """The node refuses the manifest if it has heard of it; else the fence says so, and the renewal soon after."""
    candidate, shard = find(seed), empty_shard(seed)
    with take_lease(candidate.listener, request(), timeout_s=5) as lease:
        with seed.agents[0].changing("an update"), pytest.raises((FenceBroken, SeedRefused)):
            pull(
                shard,
                lease,
                GivenFabrics([MemoryTransport(seed.fabric)]),
                PullSettings(verify="off"),
                check_fence=check_fence,
                clock=SystemClock(),
            )

        def lost() -> bool:
            try:
                lease.check()
            except SeedError:
                return True
            return False

        until(lost)
