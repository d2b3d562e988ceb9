"""The fence: a seqlock that travels with the weights.

A registered page on the seed's device that says whose weights these are and which generation; the generation is odd
while bytes change. Readers take it before and after the weights, one-sided, over the same transport. What was read
counts only if both agree with the lease. Layout, little-endian:

    magic (8 bytes) | XXH3-128 of the instance id (16) | generation (8) | zeros
"""

from __future__ import annotations

import ctypes
import struct
import threading
from typing import NamedTuple

import torch
import xxhash

from rfork.errors import FenceBroken

FENCE_NBYTES = 4096
FENCE_HEADER_NBYTES = 32
_ALIGNMENT = 64
_MAGIC = b"rforkfn1"
_HEADER = struct.Struct("<8s16sQ")
_GENERATION_OFFSET = 24
_CLOSED = 1


def instance_digest(instance_id: str) -> bytes:
    """The 16 bytes that stand for an instance on its fence page."""
    return xxhash.xxh3_128_digest(instance_id.encode())


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` is done; nothing to do for host memory."""
    if device.type != "cpu":
        torch.get_device_module(device).synchronize(device)


class Fence(NamedTuple):
    """What a fence page says."""

    instance_digest: bytes
    generation: int


def read_fence(page: bytes | bytearray | memoryview) -> Fence:
    """Parse the first bytes of a page that was read from a seed. Raises FenceBroken if it is no fence page."""
    if len(page) < FENCE_HEADER_NBYTES:
        raise FenceBroken(f"a fence page has at least {FENCE_HEADER_NBYTES} bytes, got {len(page)}")
    magic, digest, generation = _HEADER.unpack_from(page)
    if magic != _MAGIC:
        raise FenceBroken(
            f"no fence page at the address that the seed gave: expected {_MAGIC!r}, got {bytes(magic)!r}. "
            "Its memory was released or belongs to another process by now"
        )
    return Fence(digest, generation)


def check_fence(page: bytes | bytearray | memoryview, instance_id: str, generation: int) -> None:
    """Raise FenceBroken unless `page` is the fence of `instance_id`, at `generation`, with nothing changing."""
    fence = read_fence(page)
    if fence.instance_digest != instance_digest(instance_id):
        raise FenceBroken(f"the fence page belongs to another instance than {instance_id}: an address was reused")
    if fence.generation % 2:
        raise FenceBroken(
            f"{instance_id} is changing its weights: fence at {fence.generation} (odd), lease at {generation}"
        )
    if fence.generation != generation:
        raise FenceBroken(f"{instance_id} has changed its weights: fence at {fence.generation}, lease at {generation}")


class FencePage:
    """The writer's side, in the process that owns the weights. Thread-safe.

    Born closed (odd). `close()` before every change of bytes makes the generation odd, `open()` after it even. It never
    goes back. Every write is finished before the call that made it returns.
    """

    def __init__(self, instance_id: str, device: torch.device) -> None:
        with torch.inference_mode(False):
            backing = torch.zeros(FENCE_NBYTES + _ALIGNMENT, dtype=torch.uint8, device=device)
            start = -backing.data_ptr() % _ALIGNMENT
            self.tensor = backing[start : start + FENCE_NBYTES]
            header = bytearray(_HEADER.pack(_MAGIC, instance_digest(instance_id), _CLOSED))
            self.tensor[: len(header)].copy_(torch.frombuffer(header, dtype=torch.uint8))
        self.device = self.tensor.device
        self.instance_id = instance_id
        self._generation = _CLOSED
        self._lock = threading.Lock()
        synchronize(self.device)

    def __repr__(self) -> str:
        state = "closed" if self._generation % 2 else "open"
        return f"<FencePage {self.instance_id} generation {self._generation} {state}>"

    @property
    def address(self) -> int:
        return int(self.tensor.data_ptr())

    @property
    def nbytes(self) -> int:
        return FENCE_NBYTES

    @property
    def generation(self) -> int:
        """What the page says now: even when the weights can be read, odd while they can't."""
        return self._generation

    def open(self, generation: int | None = None) -> int:
        """Let readers in, at `generation` or the next even one, and return it.

        Raises ValueError if `generation` is odd or lies behind what readers may have seen.
        """
        with self._lock:
            target = self._next_even() if generation is None else generation
            if target % 2 or target < self._generation:
                raise ValueError(f"can't open at generation {target}: it must be even and not below {self._generation}")
            synchronize(self.device)
            self._write(target)
            return target

    def close(self) -> None:
        """Turn readers away until the next `open()`. On return no later read is accepted."""
        with self._lock:
            if self._generation % 2 == 0:
                self._write(self._generation + 1)
            synchronize(self.device)

    def snapshot(self) -> bytes:
        """The page's header as readers see it, for transports that carry it themselves."""
        return bytes(self.tensor[:FENCE_HEADER_NBYTES].cpu().numpy())

    def _next_even(self) -> int:
        return self._generation + (self._generation % 2 or 2)

    def _write(self, generation: int) -> None:
        """One aligned 8-byte store, visible to one-sided readers on return."""
        if self.device.type == "cpu":
            ctypes.c_uint64.from_address(self.address + _GENERATION_OFFSET).value = generation
        else:
            value = torch.frombuffer(bytearray(struct.pack("<Q", generation)), dtype=torch.uint8)
            module = torch.get_device_module(self.device)
            side = module.Stream(device=self.device)
            with module.stream(side):
                self.tensor[_GENERATION_OFFSET:FENCE_HEADER_NBYTES].copy_(value)
            side.synchronize()
        self._generation = generation
