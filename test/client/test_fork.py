"""A fork's lease while the ranks of one instance agree: kept for as long as it is waited for, given back however that
ends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.host_shard import HostSeed, manifest_of
from support.seed_rank import CHECKPOINT, IDENTITY

from rfork.client.agreement import Agreement, AgreementLost, Vote
from rfork.client.contract import LocalShard
from rfork.client.fork import Fork
from rfork.client.resolve import Candidate
from rfork.client.sources import Offer
from rfork.config import Config
from rfork.errors import NoSeedAvailable, SeedError
from rfork.fence import check_fence
from rfork.identity import InstanceId, RankIdentity
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import WeightsReport

from .conftest import Stage


class OneSeed:
    """A source that names one seed, once."""

    bound_s = 0.0

    def __init__(self, listener: str) -> None:
        candidate = Candidate(address=listener, instance_id="i-seed", listener=listener, state="serving", generation=2)
        self._offers = [Offer(candidate)]
        self.failed_with: list[SeedError] = []

    def next(self) -> Offer:
        return self._offers.pop() if self._offers else Offer(why="there was one")

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        self.failed_with.append(error)

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None: ...


class SlowRank:
    """A board on which the other rank votes when `when()` returns; False stands for a rank that never does."""

    def __init__(self, when: Callable[[], bool], vote: Vote) -> None:
        self._when, self._vote = when, vote

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        if not self._when():
            raise TimeoutError
        return msgspec.msgpack.encode(self._vote)


@pytest.fixture
def granting(stage: Stage) -> Iterator[Stage]:
    seed = HostSeed(manifest_of({"a": 1000}), [MemoryTransport(MemoryFabric())])
    stage.grant(seed.lease(ttl_s=1.5, content=str(CHECKPOINT)).reply)
    yield stage
    seed.close()
    assert stage.asked[-1] == ("DELETE", "/rfork/v1/leases/l-1"), "the lease was not given back"
    assert not [thread for thread in threading.enumerate() if thread.name == "rfork-lease"]


def fork(seeds: OneSeed, board: SlowRank) -> None:
    def build() -> LocalShard:
        raise AssertionError("nothing is built where the ranks do not agree")

    Fork(
        who=RankIdentity(),
        identity=IDENTITY,
        content=CHECKPOINT,
        instance_id=InstanceId("i-client"),
        seeds=seeds,
        settings=Config(),
        fabrics=GivenFabrics([]),
        agreement=Agreement(board, rank=0, num_ranks=2, name="target/1", timeout_s=5),
        check_fence=check_fence,
    ).run(build)


def test_a_lease_is_renewed_while_another_rank_takes_its_time_to_vote(granting: Stage) -> None:
    """Else the slowest rank would make the leases of all others expire, and the seed would count as failed."""
    seeds = OneSeed(granting.url)
    no = Vote(False, "its link is down", reason="unreachable")
    with pytest.raises(NoSeedAvailable):
        fork(seeds, SlowRank(lambda: granting.renewed.wait(10), no))
    assert granting.renewed.is_set()
    assert str(seeds.failed_with[0]) == "rank 1: its link is down"


def test_a_lease_is_given_back_where_another_rank_never_votes(granting: Stage) -> None:
    with pytest.raises(AgreementLost, match="rank 1 did not vote"):
        fork(OneSeed(granting.url), SlowRank(lambda: False, Vote(True)))
