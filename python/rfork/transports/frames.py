"""Cutting a shard into frames: what one broadcast of a collective transfer carries. Pure.

Both sides hold the same alias groups in the same order, so the same cut gives the same frames. Small groups share a
frame, long ones are cut: a frame is small enough to be staged, and to show progress within its deadline.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

MIN_FRAME_NBYTES = 256 << 10
MAX_FRAME_NBYTES = 64 << 20
_FRAMES_AT_LEAST = 50


class Piece(NamedTuple):
    """Bytes [offset, offset + nbytes) of one alias group."""

    group: int
    offset: int
    nbytes: int


Frame = tuple[Piece, ...]
"""One piece travels in place; several are gathered in a buffer, in this order, and scattered from one."""


def frame_nbytes_for(nbytes: int) -> int:
    """The frame size that a seed announces: progress shows in fiftieths, between 256 KiB and 64 MiB."""
    return min(MAX_FRAME_NBYTES, max(MIN_FRAME_NBYTES, -(-nbytes // _FRAMES_AT_LEAST)))


def cut(group_nbytes: Sequence[int], frame_nbytes: int) -> list[Frame]:
    """Every byte of every group once, in order, in frames of at most `frame_nbytes`. Raises ValueError below 1."""
    if frame_nbytes < 1:
        raise ValueError(f"a frame holds at least one byte, got {frame_nbytes}")
    frames: list[Frame] = []
    open_pieces: list[Piece] = []
    room = frame_nbytes
    for group, nbytes in enumerate(group_nbytes):
        if nbytes > room and open_pieces:
            frames.append(tuple(open_pieces))
            open_pieces, room = [], frame_nbytes
        whole = nbytes - nbytes % frame_nbytes
        frames += [(Piece(group, at, frame_nbytes),) for at in range(0, whole, frame_nbytes)]
        if nbytes > whole:
            open_pieces.append(Piece(group, whole, nbytes - whole))
            room -= nbytes - whole
    if open_pieces:
        frames.append(tuple(open_pieces))
    return frames


def nbytes_of(frame: Frame) -> int:
    return sum(piece.nbytes for piece in frame)
