"""Agreement over torch.distributed's own store, between threads that stand for ranks; never waits for ever."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from support.ports import lend
from support.server import HOST

from rfork.client.agreement import Agreement, AgreementLost, Vote
from sglang_rfork.srt.managers.board import StoreBoard

NUM_RANKS = 3

impatient = pytest.mark.parametrize("ranks", [1.0], ids=["1 s"], indirect=True)
"""For tests that wait for the time-out; the others end before it."""


@pytest.fixture
def ranks(request: pytest.FixtureRequest) -> list[Agreement]:
    """Each with a connection of its own to one TCP store, as each process has."""
    timeout_s = getattr(request, "param", 10.0)
    block = lend()
    first = dist.TCPStore(HOST, block.port, NUM_RANKS, is_master=True, wait_for_workers=False)
    stores = [first, *(dist.TCPStore(HOST, block.port, NUM_RANKS, wait_for_workers=False) for _ in range(1, NUM_RANKS))]
    block.release()
    return [
        Agreement(StoreBoard(s, "rfork"), rank=r, num_ranks=NUM_RANKS, name="target/1", timeout_s=timeout_s)
        for r, s in enumerate(stores)
    ]


def vote(ranks: list[Agreement], votes: list[Vote | None]) -> list[Vote | Exception]:
    """What each rank that votes gets; None stands for a rank that never does."""

    def one(rank: Agreement, mine: Vote | None) -> Vote | Exception:
        try:
            return rank.vote("lease/0", mine) if mine else Vote(False, "did not vote")
        except AgreementLost as lost:
            return lost

    with ThreadPoolExecutor(NUM_RANKS) as pool:
        return list(pool.map(one, ranks, votes))


def test_all_for_it_and_of_one_mind(ranks: list[Agreement]) -> None:
    assert vote(ranks, [Vote(True, fact="i-1/2")] * 3) == [Vote(True, fact="i-1/2")] * 3


def test_one_no_is_everybodys_no_and_says_whose(ranks: list[Agreement]) -> None:
    found = vote(ranks, [Vote(True), Vote(True), Vote(False, "its link is down", reason="unreachable")])
    assert [v.reason for v in found if isinstance(v, Vote)] == ["unreachable"] * 3
    assert [v.ok for v in found if isinstance(v, Vote)] == [False] * 3
    assert [v.why for v in found if isinstance(v, Vote)] == ["rank 2: its link is down"] * 2 + ["its link is down"]


def test_two_instances_behind_one_address_are_noticed(ranks: list[Agreement]) -> None:
    """A Service name must never give two ranks two instances, nor one instance at two generations."""
    found = vote(ranks, [Vote(True, fact="i-1/2"), Vote(True, fact="i-1/2"), Vote(True, fact="i-2/2")])
    assert [v.ok for v in found if isinstance(v, Vote)] == [False] * 3
    assert all("ranks disagree" in v.why for v in found if isinstance(v, Vote))


@impatient
def test_a_rank_that_never_votes_is_named_after_the_time_out(ranks: list[Agreement]) -> None:
    started_s = time.monotonic()
    found = vote(ranks, [Vote(True), None, Vote(True)])
    assert 1.0 <= time.monotonic() - started_s < 9.0
    assert [str(found[r]) for r in (0, 2)] == ["rank 1 did not vote on 'lease/0' in time"] * 2


@impatient
def test_ranks_wait_for_what_rank_0_says_and_not_for_ever(ranks: list[Agreement]) -> None:
    ranks[0].from_leader("seed/0", b"here")
    assert ranks[2].from_leader("seed/0", None) == b"here"
    with pytest.raises(AgreementLost, match="rank 0 did not say 'seed/1'"):
        ranks[1].from_leader("seed/1", None)


def test_polling_never_waits(ranks: list[Agreement]) -> None:
    board = ranks[1]._board
    assert isinstance(board, StoreBoard)
    assert board.poll("nothing") is None
    board.set("something", b"1")
    assert board.poll("something") == b"1"
