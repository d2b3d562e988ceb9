"""Anonymous memory with an address, for tests that move bytes without torch."""

from __future__ import annotations

import ctypes
import mmap
import random

from rfork.binding import Region, Slice


class Buffer:
    """Page-aligned memory of `nbytes` bytes, zeroed and touched."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self._map = mmap.mmap(-1, nbytes)
        self.view = memoryview(self._map)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._map))
        ctypes.memset(self.address, 0, nbytes)

    @property
    def region(self) -> Region:
        return Region(self.address, self.nbytes)

    def fill(self, seed: int = 1) -> Buffer:
        """Varied, reproducible bytes."""
        block = random.Random(seed).randbytes(min(self.nbytes, 1 << 20))
        for start in range(0, self.nbytes, len(block)):
            size = min(len(block), self.nbytes - start)
            self.view[start : start + size] = block[:size]
            self.view[start] = (start // len(block) + seed) % 251
        return self

    def num_nonzero_tail(self, start: int) -> int:
        """Bytes from `start` on that are not zero any more."""
        tail = bytes(self.view[start:])
        return len(tail) - tail.count(0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Buffer) and self.view == other.view

    __hash__ = None  # type: ignore[assignment]


def slices_of(local: Buffer, remote_address: int, slice_nbytes: int) -> list[Slice]:
    """The whole of `local`, read from a peer's equally large memory."""
    return [
        Slice(local.address + at, remote_address + at, min(slice_nbytes, local.nbytes - at))
        for at in range(0, local.nbytes, slice_nbytes)
    ]
