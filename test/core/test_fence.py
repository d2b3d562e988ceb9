"""The fence: a reader accepts only what did not change while it read."""

import contextlib
import itertools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.every_kind import CPU

from rfork.errors import FenceBroken
from rfork.fence import FENCE_NBYTES, FencePage, check_fence, instance_digest, read_fence


@pytest.fixture
def page() -> FencePage:
    return FencePage("i-1", CPU)


def test_the_layout_is_pinned(page: FencePage) -> None:
    page.open(4)
    data = bytes(page.tensor.numpy())
    assert data[:8] == b"rforkfn1"
    assert data[8:24] == instance_digest("i-1")
    assert data[8:24].hex() == "e35a6031646d4784c5c0a85ae4fc3529"
    assert data[24:32] == (4).to_bytes(8, "little")
    assert data[32:] == bytes(4096 - 32)


def test_a_page_is_aligned_and_whole(page: FencePage) -> None:
    assert page.address % 64 == 0
    assert page.nbytes == page.tensor.nbytes == FENCE_NBYTES == 4096


def test_a_new_page_lets_nobody_in(page: FencePage) -> None:
    with pytest.raises(FenceBroken, match="changing"):
        check_fence(page.snapshot(), "i-1", 2)


def test_an_open_page_passes_at_its_generation_only(page: FencePage) -> None:
    assert page.open() == page.generation == 2
    check_fence(page.snapshot(), "i-1", 2)
    with pytest.raises(FenceBroken, match="fence at 2, lease at 4"):
        check_fence(page.snapshot(), "i-1", 4)


def test_another_instance_is_told_apart(page: FencePage) -> None:
    page.open()
    with pytest.raises(FenceBroken, match="another instance than i-2"):
        check_fence(page.snapshot(), "i-2", 2)


@pytest.mark.parametrize("data", [b"", b"rforkfn1", bytes(4096), b"x" * 64])
def test_bytes_that_are_no_fence_are_refused(data: bytes) -> None:
    with pytest.raises(FenceBroken):
        read_fence(data)


def test_a_change_is_odd_while_it_runs_and_two_later_afterwards(page: FencePage) -> None:
    page.open()
    page.close()
    assert read_fence(page.snapshot()).generation == page.generation == 3
    assert page.open() == 4
    assert read_fence(page.snapshot()).generation == page.generation == 4


def test_closing_twice_is_closing_once(page: FencePage) -> None:
    page.open()
    page.close()
    page.close()
    assert page.generation == 3


@pytest.mark.parametrize("generation", [3, 2, 0])
def test_a_generation_is_even_and_never_goes_back(page: FencePage, generation: int) -> None:
    page.open(4)
    with pytest.raises(ValueError, match="can't open at generation"):
        page.open(generation)
    assert page.generation == 4


def writing(page: FencePage, weights: list[int]) -> Iterator[None]:
    """A writer that changes the weights over and over, one step at a time."""
    for version in itertools.count(1):
        yield
        page.close()
        yield
        weights[0] = version
        yield
        weights[1] = version
        yield
        page.open()


def reading(page: FencePage, weights: list[int], accepted: list[tuple[int, int]]) -> Iterator[None]:
    """A reader as a client is one: fence, both halves, fence."""
    while True:
        before = page.snapshot()
        yield
        first = weights[0]
        yield
        second = weights[1]
        yield
        with contextlib.suppress(FenceBroken):
            generation = read_fence(before).generation
            check_fence(before, "i-1", generation)
            check_fence(page.snapshot(), "i-1", generation)
            accepted.append((first, second))
        yield


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 6)), max_size=30))
def test_a_reader_never_accepts_a_torn_read(turns: list[tuple[bool, int]]) -> None:
    """However the two interleave, what passes both fences is of one version."""
    page, weights, accepted = FencePage("i-1", CPU), [0, 0], list[tuple[int, int]]()
    page.open()
    writer, reader = writing(page, weights), reading(page, weights, accepted)
    for is_writer, steps in turns:
        for _ in range(steps):
            next(writer if is_writer else reader)
    assert all(first == second for first, second in accepted)


def test_a_reader_accepts_what_stood_still() -> None:
    page, weights, accepted = FencePage("i-1", CPU), [0, 0], list[tuple[int, int]]()
    page.open()
    writer, reader = writing(page, weights), reading(page, weights, accepted)
    for _ in range(5):
        next(writer)
    for _ in range(4):
        next(reader)
    assert accepted == [(1, 1)]


def test_pages_can_be_written_under_inference_mode() -> None:
    with torch.inference_mode():
        page = FencePage("i-1", CPU)
        page.open()
    page.close()
    assert page.open() == 4


def test_a_page_tells_its_story(page: FencePage) -> None:
    assert repr(page) == "<FencePage i-1 generation 1 closed>"
    page.open()
    assert repr(page) == "<FencePage i-1 generation 2 open>"
