"""mix64-1 on a CUDA device: one kernel over a table of pointers, on a stream of its own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton  # type: ignore[import-untyped]
import triton.language as tl  # type: ignore[import-untyped]

from rfork.digest.host import FIRST, GOLDEN, SECOND, SEED

_PIECE_WORDS = 1 << 17
_BLOCK = 512
_GOLDEN = tl.constexpr(GOLDEN)
_FIRST = tl.constexpr(FIRST)
_SECOND = tl.constexpr(SECOND)


@triton.jit  # type: ignore[untyped-decorator]
def mix64_pieces(table, out, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """out[p] = sum of mixed words of piece p. Row p of `table`: address of word 0, its first index in the chunk,
    bytes.
    """
    piece = tl.program_id(0).to(tl.int64)
    address = tl.load(table + 3 * piece)
    first = tl.load(table + 3 * piece + 1)
    nbytes = tl.load(table + 3 * piece + 2)
    # Only aligned words are loaded: an unaligned piece is put together from two neighbours. The bytes around a piece
    # that this touches belong to the same 8-byte word as some of its own.
    shift = ((address & 7) * 8).to(tl.uint64)
    base = (address - (address & 7)).to(tl.pointer_type(tl.uint64))
    skew = address & 7
    num_words = (nbytes + 7) // 8
    num_loads = (nbytes + skew + 7) // 8
    total = tl.zeros((BLOCK,), dtype=tl.uint64)
    for start in range(0, num_words, BLOCK):
        i = start + tl.arange(0, BLOCK).to(tl.int64)
        word = tl.load(base + i, mask=i < num_loads, other=0)
        if skew != 0:
            after = tl.load(base + i + 1, mask=i + 1 < num_loads, other=0)
            word = (word >> shift) | (after << (64 - shift))
        left = nbytes - i * 8
        spare = tl.where(left >= 8, 0, (8 - tl.maximum(left, 1)) * 8).to(tl.uint64)
        word = (word << spare) >> spare
        x = (word ^ ((first + i + 1).to(tl.uint64) * _GOLDEN)) * _FIRST
        x = x ^ (x >> 32)
        x = x * _SECOND
        x = x ^ (x >> 32)
        total += tl.where(left > 0, x, 0)
    tl.store(out + piece, tl.sum(total, axis=0))


def piece_table(spans: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """Rows of the kernel's table, and each span's first row. Spans are cut so that one program has at most 1 MiB."""
    piece_nbytes = _PIECE_WORDS * 8
    counts = np.maximum(-(-spans[:, 1] // piece_nbytes), 1)
    starts = counts.cumsum() - counts
    within = np.arange(counts.sum()) - np.repeat(starts, counts)
    rows = np.empty((len(within), 3), dtype=np.int64)
    rows[:, 0] = np.repeat(spans[:, 0], counts) + within * piece_nbytes
    rows[:, 1] = within * _PIECE_WORDS
    rows[:, 2] = np.minimum(np.repeat(spans[:, 1], counts) - within * piece_nbytes, piece_nbytes)
    return rows, starts


def begin_device_chunks(spans: npt.NDArray[Any], device: torch.device) -> Callable[[], list[int]]:
    """mix64-1 of spans of device memory, in order, by what this returns.

    The kernel waits for the current stream's work so far, and for nothing else.
    """
    rows, starts = piece_table(spans)
    side = _side_stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.device(device), torch.cuda.stream(side):
        table = torch.from_numpy(rows).to(device)
        out = torch.empty(len(rows), dtype=torch.int64, device=device)
        mix64_pieces[(len(rows),)](table, out, BLOCK=_BLOCK, num_warps=4)

    def wait() -> list[int]:
        with torch.cuda.device(device), torch.cuda.stream(side):
            sums = out.cpu().numpy().view(np.uint64)
        return chunk_digests(sums, starts, spans)

    return wait


def chunk_digests(sums: npt.NDArray[Any], starts: npt.NDArray[Any], spans: npt.NDArray[Any]) -> list[int]:
    """Add up each span's pieces and its length."""
    totals = np.add.reduceat(sums, starts) + spans[:, 1].astype(np.uint64) * np.uint64(SEED)
    digests: list[int] = totals.tolist()
    return digests


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device=device)
