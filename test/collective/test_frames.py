"""How a shard is cut into frames."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.transports.frames import (
    MIB,
    MIN_FRAME_NBYTES,
    STAGE_NBYTES,
    Piece,
    batches,
    cut,
    frame_nbytes_for,
    nbytes_of,
)


def test_small_groups_share_a_frame_in_manifest_order() -> None:
    assert cut([3, 4, 5], 12, 12) == [(Piece(0, 0, 3), Piece(1, 0, 4), Piece(2, 0, 5))]


def test_a_frame_is_never_longer_than_agreed() -> None:
    assert cut([5, 6, 7], 12, 12) == [(Piece(0, 0, 5), Piece(1, 0, 6)), (Piece(2, 0, 7),)]


def test_a_long_group_is_cut_and_travels_by_itself() -> None:
    assert cut([3, 25, 4], 10, 10) == [
        (Piece(1, 0, 10),),
        (Piece(1, 10, 10),),
        (Piece(1, 20, 5),),
        (Piece(0, 0, 3), Piece(2, 0, 4)),
    ]


def test_what_is_gathered_stays_small_however_long_a_frame_may_be() -> None:
    """Twenty groups of 3 MiB are staged in two goes; one of 5 MiB is sent from where it lies."""
    frames = cut([3 * MIB] * 20 + [5 * MIB], 256 * MIB, 4 * MIB)
    assert [len(f) for f in frames] == [10, 1, 10]
    assert max(nbytes_of(f) for f in frames if len(f) > 1) <= STAGE_NBYTES


@pytest.mark.parametrize("frame_nbytes", [1, 7, 64, 1000])
def test_every_byte_travels_exactly_once(frame_nbytes: int) -> None:
    sizes = [1, 999, 64, 7, 128, 3000, 2]
    seen = [bytearray(n) for n in sizes]
    for frame in cut(sizes, frame_nbytes, 100):
        assert sum(p.nbytes for p in frame) <= frame_nbytes
        for group, offset, nbytes in frame:
            for at in range(offset, offset + nbytes):
                seen[group][at] += 1
    assert all(set(group) == {1} for group in seen)


def test_no_groups_make_no_frames() -> None:
    assert cut([], 10, 10) == []


def test_a_frame_without_room_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        cut([1], 0, 1)


def test_progress_shows_in_fiftieths_between_two_bounds() -> None:
    assert frame_nbytes_for(1, 64 * MIB) == MIN_FRAME_NBYTES
    assert frame_nbytes_for(1_000_000_000, 64 * MIB) == 20_000_000
    assert frame_nbytes_for(30_900_000_000, 64 * MIB) == 64 * MIB


def test_a_batch_has_its_limits_and_a_gathered_frame_is_one_of_its_own() -> None:
    """What is started together is bounded in frames and bytes; all frames stay in order."""
    frames = cut([10, 10, 10, 3, 2, 7, 9, 10], 10, 7)
    assert [len(f) for f in frames] == [1, 1, 1, 1, 1, 1, 2]
    assert [len(b) for b in batches(frames, 2, 100)] == [2, 2, 2, 1]
    assert [len(b) for b in batches(frames, 9, 25)] == [2, 2, 2, 1]
    assert [len(b) for b in batches(frames, 1, 0)] == [1] * 7
    assert [f for b in batches([frames[6], *frames], 9, 999) for f in b] == [frames[6], *frames]
    assert [len(b) for b in batches([frames[6], *frames], 9, 999)] == [1, 6, 1]


@given(
    st.lists(st.integers(1, 60), max_size=60), st.integers(1, 25), st.integers(0, 30), st.integers(1, 9),
    st.integers(0, 80),
)  # fmt: skip
def test_batches_are_all_frames_in_order_within_bounds_and_no_shorter_than_they_must_be(
    group_nbytes: list[int], frame_nbytes: int, lone_nbytes: int, most_frames: int, most_nbytes: int
) -> None:
    """A frame above the bound is one by itself."""
    frames = cut(group_nbytes, frame_nbytes, lone_nbytes)
    found = list(batches(frames, most_frames, most_nbytes))
    assert [frame for batch in found for frame in batch] == frames
    for batch in found:
        assert 1 <= len(batch) <= most_frames
        assert len(batch) == 1 or sum(map(nbytes_of, batch)) <= most_nbytes
        assert len(batch) == 1 or all(len(frame) == 1 for frame in batch)
    for batch, (after, *_) in pairwise(found):
        is_full = len(batch) == most_frames or sum(map(nbytes_of, [*batch, after])) > most_nbytes
        assert is_full or len(batch[0]) > 1 or len(after) > 1
