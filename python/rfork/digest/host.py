"""Digests of host memory, and `mix64-1` in numpy: its definition, and what a host uses to check a device's digests.

mix64-1 of n bytes: pad with zeros to whole 64-bit little-endian words w[0..], then, modulo 2**64,

    digest = n * SEED + sum over i of f(w[i] ^ ((i + 1) * GOLDEN))
    f(x) = g(g(x * FIRST) * SECOND),  g(y) = y ^ (y >> 32)

f is a bijection and every index has its own key, so a changed word always shows, moved words show, and a run of zeros
is not silent. The sum does not depend on the order of evaluation.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

XXH3 = "xxh3-64"
MIX64 = "mix64-1"
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
SEED = 0xD6E8FEB86659FD93
_BLOCK_WORDS = 1 << 16
_MAX_WORKERS = 8
_ALONE_NBYTES = 1 << 24
_BATCH_NBYTES = 1 << 22


def memory(address: int, nbytes: int) -> memoryview:
    """Host memory at an address, without a copy."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


def mix64(address: int, nbytes: int) -> int:
    """mix64-1 of host memory. Slow beside XXH3; needs 1 MiB of its own."""
    return mix64_bytes(memory(address, nbytes))


def mix64_bytes(data: bytes | bytearray | memoryview) -> int:
    """mix64-1 of a buffer."""
    whole = len(data) // 8
    words = np.frombuffer(data, dtype="<u8", count=whole)
    total = len(data) * SEED
    for at in range(0, whole, _BLOCK_WORDS):
        total += _mixed_sum(words[at : at + _BLOCK_WORDS], at)
    if tail := bytes(data[8 * whole :]):
        total += _mixed_sum(np.frombuffer(tail.ljust(8, b"\0"), dtype="<u8"), whole)
    return total % (1 << 64)


def _mixed_sum(words: npt.NDArray[np.uint64], first_index: int) -> int:
    shift = np.uint64(32)
    keys = np.arange(first_index + 1, first_index + 1 + len(words), dtype=np.uint64) * np.uint64(GOLDEN)
    x = (words ^ keys) * np.uint64(FIRST)
    x ^= x >> shift
    x *= np.uint64(SECOND)
    x ^= x >> shift
    return int(np.add.reduce(x))


def begin_host_chunks(spans: npt.NDArray[Any], algorithm: str) -> Callable[[], list[int]]:
    """Digests of host spans, in order, by what this returns. Several at a time: hashing releases the interpreter lock.

    Small spans go to a thread in batches; too little for a thread is digested here and now.
    """
    one = _xxh3 if algorithm == XXH3 else mix64
    total = int(spans[:, 1].sum())
    if total < _ALONE_NBYTES:
        done = _digest_each(one, spans)
        return lambda: done
    batch = 1 + np.cumsum(spans[:, 1]) // max(_BATCH_NBYTES, total // (4 * _workers()))
    edges = np.append(np.flatnonzero(np.diff(batch, prepend=0)), len(spans))
    parts = [_pool().submit(_digest_each, one, spans[a:b]) for a, b in itertools.pairwise(edges)]
    return lambda: [value for part in parts for value in part.result()]


def _digest_each(one: Callable[[int, int], int], spans: npt.NDArray[Any]) -> list[int]:
    return [one(address, nbytes) for address, nbytes in spans.tolist()]


def _xxh3(address: int, nbytes: int) -> int:
    return xxhash.xxh3_64_intdigest(memory(address, nbytes))


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(_workers(), thread_name_prefix="rfork-digest")


def _workers() -> int:
    return min(_MAX_WORKERS, len(os.sched_getaffinity(0)))
