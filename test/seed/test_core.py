"""What a node decides, by itself: no threads, no listener, and time as the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
from support.seed_rank import CHECKPOINT, CPU, IDENTITY, BufferShard, report

from rfork.binding import Binding
from rfork.fence import FencePage
from rfork.identity import InstanceId, instance_key
from rfork.manifest import encode_manifest
from rfork.seed.core import NodeCore, Stepped
from rfork.seed.leases import Ended, LeaseState, Renew
from rfork.seed.lifecycle import SeedEvent, SeedState
from rfork.seed.shards import ShardRecord
from rfork.wire.control import Changing, Hello, Loaded, Published, Seeking
from rfork.wire.seed import LeaseReply, LeaseRequest, Refusal

SHARD = BufferShard()
FENCE = FencePage("i-1", CPU)


def publication(generation: int) -> ShardRecord:
    resolved = SHARD.resolve()
    binding = Binding(
        manifest_digest=resolved.manifest.digest,
        generation=generation,
        regions=resolved.regions_for([FENCE.tensor]),
        addresses=resolved.addresses,
        group_nbytes=SHARD.sizes,
        fence_address=FENCE.address,
        fence_nbytes=FENCE.nbytes,
    )
    published = Published(
        shard=SHARD.rank,
        rank=0,
        engine=IDENTITY.engine,
        identity=IDENTITY.fields,
        content=str(CHECKPOINT),
        weight_version=None,
        generation=generation,
        manifest=encode_manifest(resolved.manifest),
        binding=binding,
        digests=None,
        verified=True,
    )
    return ShardRecord(published, 0)


class Rank(NamedTuple):
    """A rank's connection, as far as the core looks at it."""

    hello: Hello


@pytest.fixture
def rank() -> Rank:
    return Rank(Hello(pid=1, rank=0, num_ranks=1, replica=0, num_replicas=1, instance_id=""))


@pytest.fixture
def core(rank: Rank) -> NodeCore:
    """It serves one shard since second 0."""
    core = NodeCore(InstanceId("i-1"), capacity=1, lease_ttl_s=10.0)
    core.num_expected, core.is_healthy = 1, True
    core.hello(rank, 0.0)
    core.hear(rank, Loaded(shard=SHARD.rank, rank=0, report=report()), 0.0)
    core.hear(rank, publication(2), 0.0)
    assert [found.peer for found in core.to_check(0.0)] == [rank]
    core.check = True
    assert core.to_check(0.0) == []
    assert core.take_effects() == [Stepped(SeedState.STARTING, SeedState.SERVING, "", False)]
    return core


@pytest.fixture
def ask(core: NodeCore) -> Callable[..., LeaseReply | Refusal]:
    def ask(client: str, now: float) -> LeaseReply | Refusal:
        request = LeaseRequest(
            client=client,
            instance_key=instance_key(IDENTITY, CHECKPOINT),
            identity=IDENTITY.fields,
            engine=IDENTITY.engine,
            content=str(CHECKPOINT),
            rank=SHARD.rank,
        )
        return core.grant(request, now)

    return ask


def test_a_place_is_free_again_once_its_lease_ran_out(core: NodeCore, ask: Callable[..., LeaseReply]) -> None:
    lease = ask("i-a", 0.0).lease
    assert core.renew_or_release(Renew(lease), 5.0) is None
    assert ask("i-b", 14.9).reason == "busy"  # type: ignore[attr-defined]
    assert isinstance(ask("i-b", 15.1), LeaseReply)
    (ended,) = core.take_effects()
    assert isinstance(ended, Ended)
    assert (ended.lease.id, ended.state) == (lease, LeaseState.EXPIRED)
    assert (core.num_granted, dict(core.num_refused)) == (2, {"busy": 1})


def test_a_change_pauses_and_revokes_and_the_next_publication_serves(
    core: NodeCore, rank: Rank, ask: Callable[..., LeaseReply]
) -> None:
    ask("i-a", 0.0)
    core.hear(rank, Changing(0, "an update"), 1.0)
    stepped, ended = core.take_effects()
    assert stepped == Stepped(SeedState.SERVING, SeedState.PAUSED, "rank 0: an update", False)
    assert ended.state is LeaseState.REVOKED
    assert ask("i-b", 2.0).reason == "paused"  # type: ignore[attr-defined]
    core.hear(rank, publication(4), 3.0)
    core.to_check(3.0)
    assert ask("i-b", 4.0).generation == 4


def test_that_one_rank_reads_the_disk_for_the_fleet_outlives_what_the_others_say(core: NodeCore) -> None:
    for rank, reads_disk in ((0, False), (0, True), (1, False)):
        core.seeks(Seeking(rank=rank, engine="test", identity={}, content="checkpoint:1", reads_disk=reads_disk))
    snapshot = core.snapshot(1.0)
    assert snapshot is not None
    assert snapshot.what.reads_disk


def test_what_was_asked_for_is_no_news_and_what_comes_late_is_nothing(core: NodeCore) -> None:
    core.step(SeedEvent.STOP, "it was shut down", 1.0, is_asked_for=True)
    core.step(SeedEvent.DRAIN, "too late", 2.0)
    assert core.take_effects() == [Stepped(SeedState.SERVING, SeedState.STOPPED, "it was shut down", True)]
    assert core.take_effects() == []
