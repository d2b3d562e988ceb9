"""Cutting a shard into frames: what one broadcast of a collective transfer carries. Pure.

Both sides hold the same alias groups in the same order, so the same cut gives the same frames. Small groups share a
frame, long ones are cut: a frame shows progress within its deadline, and what is staged stays small.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

MIB = 1 << 20
MIN_FRAME_NBYTES = MIB // 4
STAGE_NBYTES = 32 * MIB
"""Small groups are gathered up to this; a seed's device has little memory to spare."""

_FRAMES_AT_LEAST = 50


class Pace(NamedTuple):
    """How a backend likes to be fed: the longest frame, from which size on a group has frames of its own, how many
    frames and bytes fly at once, and how many frames and bytes the seed starts together.
    """

    frame_nbytes: int
    lone_nbytes: int
    flying_frames: int
    flying_nbytes: int
    batch_frames: int = 1
    batch_nbytes: int = 0


PACES = {
    # A gloo operation that waits in a queue can't be taken back, so nothing waits there.
    "gloo": Pace(64 * MIB, MIB // 4, 4, 256 * MIB),
    # The device's own queue holds a thousand launches; whoever fills it hangs where no deadline is seen.
    "nccl": Pace(256 * MIB, 4 * MIB, 128, 4096 * MIB, 32, 512 * MIB),
    "hccl": Pace(256 * MIB, 4 * MIB, 64, 1024 * MIB),
}


class Piece(NamedTuple):
    """Bytes [offset, offset + nbytes) of one alias group."""

    group: int
    offset: int
    nbytes: int


Frame = tuple[Piece, ...]
"""One piece travels in place; several are gathered in a buffer, in this order, and scattered from one."""


def frame_nbytes_for(nbytes: int, longest: int) -> int:
    """The frame size that a seed announces: progress shows in fiftieths, between 256 KiB and `longest`."""
    return min(longest, max(MIN_FRAME_NBYTES, -(-nbytes // _FRAMES_AT_LEAST)))


def cut(group_nbytes: Sequence[int], frame_nbytes: int, lone_nbytes: int) -> list[Frame]:
    """Every byte of every group once, in frames of at most `frame_nbytes`. Raises ValueError below 1.

    Groups from `lone_nbytes` on travel by themselves, in place and in order; gathering them would cost more than their
    own broadcasts. The others share frames, each sent when it is full.
    """
    if frame_nbytes < 1:
        raise ValueError(f"a frame holds at least one byte, got {frame_nbytes}")
    lone, stage = min(lone_nbytes, frame_nbytes), min(STAGE_NBYTES, frame_nbytes)
    frames: list[Frame] = []
    gathered: list[Piece] = []
    room = stage
    for group, nbytes in enumerate(group_nbytes):
        if nbytes >= lone:
            starts = range(0, nbytes, frame_nbytes)
            frames += [(Piece(group, at, min(frame_nbytes, nbytes - at)),) for at in starts]
            continue
        if nbytes > room:
            frames.append(tuple(gathered))
            gathered, room = [], stage
        gathered.append(Piece(group, 0, nbytes))
        room -= nbytes
    return [*frames, tuple(gathered)] if gathered else frames


def batches(frames: Sequence[Frame], most_frames: int, most_nbytes: int) -> Iterator[list[Frame]]:
    """All frames, in order, in runs that may be started together. A gathered frame is a run of its own."""
    run: list[Frame] = []
    for frame in frames:
        if run and (
            len(run) >= most_frames
            or sum(map(nbytes_of, run)) + nbytes_of(frame) > most_nbytes
            or len(frame) > 1
            or len(run[0]) > 1
        ):
            yield run
            run = []
        run.append(frame)
    if run:
        yield run


def nbytes_of(frame: Frame) -> int:
    return sum(piece.nbytes for piece in frame)
