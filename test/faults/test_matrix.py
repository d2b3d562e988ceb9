"""Each fault of a transfer at each moment of a pull, in one process: how the start ends, and that nothing is left."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack
from typing import NamedTuple

import pytest
from support.chaos import Stage
from support.every_kind import noted
from support.leaks import nothing_left
from support.seed_rank import CHUNK_NBYTES

from rfork.clock import ManualClock
from rfork.config import Config
from rfork.inventory.target import PullTarget
from rfork.manifest import InlineEntry, StateEntry
from rfork.transports.toxic import Moment, Poison, ToxicTransport, Toxin

FIRST, LAST = 1, 10
"""A pull of the model reads its ten pieces of memory as numbers 1 to 10, between the fence before and after."""

MOMENTS = {"connect": 0, "read-0%": FIRST, "read-50%": 5, "read-99%": LAST, "fence-after": LAST + 1}
LARGEST = 6
"""The read of a tensor that has several chunks."""


class Row(NamedTuple):
    toxin: Toxin
    moments: tuple[str, ...]
    reason: str | None
    """Why the seed was no use; None where the pull mends it or the fault does no harm."""


READS = ("read-0%", "read-50%", "read-99%")
ROWS = (
    Row(Toxin.REFUSE, ("connect",), "unreachable"),
    Row(Toxin.REFUSE, (*READS, "fence-after"), "seed_lost"),
    Row(Toxin.FAIL, ("connect",), "unreachable"),
    Row(Toxin.FAIL, (*READS, "fence-after"), "seed_lost"),
    Row(Toxin.LIE, ("connect", "fence-after"), "fence"),
    Row(Toxin.LIE, READS, None),
    Row(Toxin.FLIP, ("connect",), "fence"),
    Row(Toxin.FLIP, READS, None),
    Row(Toxin.TRUNCATE, ("connect", "fence-after"), None),
    Row(Toxin.TRUNCATE, READS, None),
    Row(Toxin.STALL, ("connect",), "unreachable"),
    Row(Toxin.STALL, (*READS, "fence-after"), "seed_lost"),
    Row(Toxin.LATE, ("connect",), "unreachable"),
    Row(Toxin.LATE, (*READS, "fence-after"), "seed_lost"),
    Row(Toxin.DIE, ("connect",), "unreachable"),
    Row(Toxin.DIE, (*READS, "fence-after"), "seed_lost"),
)
CASES = [pytest.param(row, moment, id=f"{row.toxin.value}-at-{moment}") for row in ROWS for moment in row.moments]
BOUND_S = Config().connect_timeout_s + 4 * Config().read_timeout_s + 5
"""No fault of one seed may take longer, by the clock that the pull is given."""


def once(moment: str, toxin: Toxin) -> Poison:
    """That read of the first engine, and no other."""
    number = MOMENTS[moment]
    return lambda at: toxin if (at.engine, at.number) == (0, number) else Toxin.NONE


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture(scope="module")
def pair() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, num_seeds=2)


@pytest.fixture(autouse=True)
def nothing_is_left(pair: Stage) -> Iterator[None]:
    """Sockets, threads, tensors, processes and registrations of a client end with its fork; leases are given back."""
    with nothing_left(pair.fabric):
        yield
    assert all(seed.node.num_readers == 0 for seed in pair.seeds)


@pytest.mark.parametrize(("row", "moment"), CASES)
def test_the_only_seed_has_a_fault(row: Row, moment: str, pair: Stage) -> None:
    """The pull mends it, or the disk is read and the reason is said."""
    transport, clock = ToxicTransport(pair.transport(), once(moment, row.toxin)), ManualClock()
    ending = pair.load(transport, addresses=pair.addresses[:1], clock=clock)
    assert (ending.source, ending.reason) == (("disk", row.reason) if row.reason else ("seed", "")), ending.detail
    assert ending.elapsed_s <= BOUND_S
    assert transport.wake() == 0, "a read that came late has written into memory that something else uses"
    pair.assert_right(ending)


@pytest.mark.parametrize(("row", "moment"), CASES)
def test_the_next_seed_mends_the_fault_of_the_first(row: Row, moment: str, pair: Stage) -> None:
    transport, clock = ToxicTransport(pair.transport(), once(moment, row.toxin)), ManualClock()
    ending = pair.load(transport, clock=clock)
    assert ending.report is not None, ending
    assert ending.report.seed is not None
    expected = pair.seeds[1 if row.reason else 0]
    assert ending.report.seed.instance_id == expected.node.instance_id
    assert ending.elapsed_s <= BOUND_S
    assert transport.wake() == 0
    pair.assert_right(ending)


@pytest.mark.parametrize("toxin", [Toxin.LIE, Toxin.FLIP, Toxin.TRUNCATE])
@pytest.mark.parametrize("number", [FIRST, LARGEST, LAST])
def test_bytes_that_are_wrong_each_time_are_never_served(toxin: Toxin, number: int, pair: Stage) -> None:
    """The chunk is read twice; then the seed is given up, and the tensor is named."""
    address: list[int] = []

    def poison(at: Moment) -> Toxin:
        if at.number == number:
            address.append(at.part.remote)
        inside = address and address[0] <= at.part.remote < address[0] + 256_000
        return toxin if inside and at.number >= FIRST and at.part.nbytes != 4096 else Toxin.NONE

    ending = pair.load(ToxicTransport(pair.transport(), poison), addresses=pair.addresses[:1])
    assert (ending.source, ending.reason) == ("disk", "digest_mismatch"), ending
    assert "chunk" in ending.detail
    pair.assert_right(ending)


@pytest.mark.parametrize("toxin", [Toxin.FAIL, Toxin.STALL, Toxin.DIE, Toxin.LATE])
def test_the_second_read_of_a_wrong_chunk_fails_too(toxin: Toxin, pair: Stage) -> None:
    def poison(at: Moment) -> Toxin:
        return Toxin.FLIP if at.number == LARGEST else toxin if at.number == LAST + 2 else Toxin.NONE

    transport = ToxicTransport(pair.transport(), poison)
    ending = pair.load(transport, addresses=pair.addresses[:1])
    assert (ending.source, ending.reason) == ("disk", "seed_lost"), ending
    assert transport.wake() == 0
    pair.assert_right(ending)


@pytest.mark.parametrize("moment", MOMENTS)
def test_an_engine_that_may_still_write_ends_the_process(moment: str, pair: Stage) -> None:
    """I8 beats I9: where silence can't be proven, nothing is loaded into that memory."""
    transport = ToxicTransport(pair.transport(), once(moment, Toxin.FAIL), noisy=True)
    ending = pair.load(transport)
    assert (ending.source, ending.reason) == ("exit", "not_quiet")


def test_late_bytes_would_be_seen_by_this_suite(stack: ExitStack) -> None:
    """The suite's own check: a read whose engine is still open does write when it wakes."""
    stage = Stage(stack)
    transport = ToxicTransport(stage.transport(), lambda at: Toxin.LATE if at.number == 5 else Toxin.NONE)
    landed: list[int] = []

    class Waking(ManualClock):
        def sleep(self, duration_s: float) -> None:
            super().sleep(duration_s)
            landed.append(transport.wake())

    stage.load(transport, clock=Waking())
    assert sum(landed) == 1


def test_values_that_can_not_be_set_lead_to_the_disk(pair: Stage) -> None:
    """A bug on our side after the last byte: no other seed could help, and the half-built model goes."""

    @dataclasses.dataclass
    class Stubborn:
        target: PullTarget

        def __getattr__(self, name: str) -> object:
            return getattr(self.target, name)

        def apply(self, states: list[StateEntry], inline: list[InlineEntry]) -> None:
            raise RuntimeError("this value has no setter")

    ending = pair.load(wrap=Stubborn)  # type: ignore[arg-type]
    assert (ending.source, ending.reason) == ("disk", "error")
    pair.assert_right(ending)


def test_the_next_seed_is_asked_only_for_what_is_missing(pair: Stage) -> None:
    """Nine of ten pieces came from the first seed, one of them wrong: two are read from the second."""
    reads: dict[str, list[int]] = {}

    def poison(at: Moment) -> Toxin:
        if at.part.nbytes != 4096:
            reads.setdefault(at.peer, []).append(at.part.nbytes)
        if at.engine == 0:
            return Toxin.FAIL if at.number == LAST else Toxin.FLIP if at.number == 5 else Toxin.NONE
        return Toxin.NONE

    ending = pair.load(ToxicTransport(pair.transport(), poison))
    first, second = reads.values()
    wrong = first[4]
    chunk = min(CHUNK_NBYTES, wrong - 5 * 7919 % wrong // CHUNK_NBYTES * CHUNK_NBYTES)
    assert ending.report is not None
    assert ending.report.nbytes == sum(second) == chunk + first[-1]
    pair.assert_right(ending)


def test_what_the_first_seed_brought_is_checked_before_it_is_kept(pair: Stage) -> None:
    """Every piece of the first seed was wrong, so every one is read again."""

    def poison(at: Moment) -> Toxin:
        if at.engine > 0 or at.number == 0:
            return Toxin.NONE
        return Toxin.FAIL if at.number == LAST else Toxin.LIE

    ending = pair.load(ToxicTransport(pair.transport(), poison))
    assert ending.report is not None
    assert ending.report.nbytes == sum(noted(pair.models[0]).resolve().manifest.group_nbytes)
    pair.assert_right(ending)


def test_a_seed_that_sends_the_same_wrong_bytes_twice_is_blamed(pair: Stage) -> None:
    weight = pair.models[0].layers[4]
    weight[5, 5] ^= 1
    try:
        ending = pair.load(addresses=pair.addresses[:1])
    finally:
        weight[5, 5] ^= 1
    assert f"{pair.seeds[0].node.instance_id} holds other bytes than it published" in ending.detail


def test_a_path_that_brings_other_wrong_bytes_each_time_is_blamed(pair: Stage) -> None:
    """The bit that flips depends on the read's number."""
    large = 256_000

    def poison(at: Moment) -> Toxin:
        return Toxin.FLIP if at.number == LARGEST or (at.number > LAST + 1 and at.part.nbytes <= large) else Toxin.NONE

    ending = pair.load(ToxicTransport(pair.transport(), poison), addresses=pair.addresses[:1])
    assert ending.reason in ("digest_mismatch", "fence")
    if ending.reason == "digest_mismatch":
        assert "the path between the two is at fault" in ending.detail
