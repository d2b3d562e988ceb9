"""From tensors to memory that a transport can register.

A region never joins two allocations. On the host that is one region per torch storage; on a device one per segment of
the caching allocator, from the segment's base to the last byte that is wanted.
"""

from __future__ import annotations

import bisect
import ctypes
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from rfork.binding import Region
from rfork.errors import UnsupportedModel

_CUDA_BLOCK_NBYTES = 512  # torch's caching allocator hands out whole multiples of this


class Span(NamedTuple):
    """Bytes [start, end) of a tensor, and the storage that they are part of.

    `slack`: bytes from `end` on that the allocator keeps for this storage alone, and that nothing reads.
    """

    start: int
    end: int
    storage: int
    name: str
    slack: int = 0


def span_of(name: str, tensor: torch.Tensor) -> Span:
    """All bytes that shape and stride reach. Raises UnsupportedModel if there is no memory behind them."""
    start = int(tensor.data_ptr())
    storage = tensor.untyped_storage()
    base = int(storage.data_ptr())
    limit = base + int(storage.nbytes())
    if tensor.is_contiguous():
        end = start + int(tensor.nbytes)
    else:
        reach = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        end = start + reach * int(tensor.element_size())
    if not start or end > limit:
        raise UnsupportedModel(f"{name}: its memory is released")
    own_block = tensor.is_cuda and end == limit and base % _CUDA_BLOCK_NBYTES == 0
    return Span(start, end, base, name, -end % _CUDA_BLOCK_NBYTES if own_block else 0)


def regions_of(
    spans: Sequence[Span], device: torch.device, *, max_region_nbytes: int | None = None
) -> tuple[Region, ...]:
    """Sorted regions that cover the spans. Raises UnsupportedModel naming tensor and setting if memory can't be
    registered.
    """
    regions = host_regions(spans) if device.type == "cpu" else segment_regions(spans, _segments(device))
    return regions if max_region_nbytes is None else split_regions(regions, max_region_nbytes)


def host_regions(spans: Iterable[Span]) -> tuple[Region, ...]:
    """One region per storage, from the first wanted byte to the last; storages over the same memory count as one."""
    extents: dict[int, tuple[int, int]] = {}
    for start, end, storage, *_ in spans:
        low, high = extents.get(storage, (start, end))
        extents[storage] = (min(low, start), max(high, end))
    merged: list[tuple[int, int]] = []
    for low, high in sorted(extents.values()):
        if merged and low < merged[-1][1]:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return tuple(Region(low, high - low) for low, high in merged)


def segment_regions(spans: Iterable[Span], segments: Iterable[Mapping[str, Any]]) -> tuple[Region, ...]:
    """One region per allocator segment that holds wanted bytes. `segments` is what `memory_snapshot()` gives."""
    ordered = sorted(segments, key=lambda s: int(s["address"]))
    bases = [int(s["address"]) for s in ordered]
    ends: dict[int, int] = {}
    for span in spans:
        i = bisect.bisect_right(bases, span.start) - 1
        if i < 0 or span.end > bases[i] + int(ordered[i]["total_size"]):
            raise UnsupportedModel(
                f"{span.name} at {span.start:#x} lies in no segment of torch's caching allocator: no peer can read it. "
                "Unset backend:cudaMallocAsync in PYTORCH_CUDA_ALLOC_CONF, and what else may have placed it there: "
                "weight cache, offloading"
            )
        if ordered[i].get("is_expandable"):
            raise UnsupportedModel(
                f"{span.name} lies in an expandable segment, which peers can't map: "
                "unset expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF"
            )
        ends[bases[i]] = max(ends.get(bases[i], 0), span.end)
    return tuple(Region(base, end - base) for base, end in sorted(ends.items()))


def _segments(device: torch.device) -> list[Mapping[str, Any]]:
    module = torch.get_device_module(device)
    if not hasattr(module, "memory_snapshot"):
        raise UnsupportedModel(f"torch can't list the memory segments of a {device.type} device")
    index = device.index if device.index is not None else module.current_device()
    return [s for s in module.memory_snapshot() if s["device"] == index]


def split_regions(regions: Iterable[Region], max_region_nbytes: int) -> tuple[Region, ...]:
    """The same memory in pieces of at most `max_region_nbytes`, for fabrics that cut longer registrations silently."""
    if max_region_nbytes <= 0:
        raise ValueError(f"max_region_nbytes must be positive, got {max_region_nbytes}")
    return tuple(
        Region(r.base + at, min(max_region_nbytes, r.nbytes - at))
        for r in regions
        for at in range(0, r.nbytes, max_region_nbytes)
    )


_LEGACY_IPC_CAPABLE = 10  # CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE


def refuse_virtual_memory(regions: Iterable[Region]) -> None:
    """Raise UnsupportedModel if CUDA memory was mapped by hand, as memory savers do: peers can't open it.

    For fabrics that share memory through CUDA IPC handles. Does nothing where the driver isn't loaded.
    """
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    for region in regions:
        capable = ctypes.c_int(1)
        status = driver.cuPointerGetAttribute(ctypes.byref(capable), _LEGACY_IPC_CAPABLE, ctypes.c_uint64(region.base))
        if status == 0 and not capable.value:
            raise UnsupportedModel(
                f"memory at {region.base:#x} is mapped virtual memory, which peers can't open: "
                "unset expandable_segments:True, and don't enable the memory saver for weights"
            )


class RegionRegistry:
    """What one engine has registered, as intervals that never overlap, with the number of holders of each. Thread-safe.

    Holders ask for regions; where they overlap what is registered already, only the rest is new.
    """

    def __init__(self) -> None:
        self._pieces: list[Region] = []
        self._holders: Counter[Region] = Counter()
        self._held: Counter[Region] = Counter()
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<RegionRegistry {len(self._pieces)} pieces, {sum(p.nbytes for p in self._pieces)} bytes>"

    def acquire(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Hold `regions`; returns what must be registered now for that, sorted."""
        with self._lock:
            new = [gap for region in regions for gap in self._add_gaps(region)]
            for region in regions:
                self._held[region] += 1
                self._holders.update(self._touching(region))
            return tuple(sorted(new))

    def pieces(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Everything registered that `regions` touch: what a binding must list, since a read may not cross two of
        them.
        """
        with self._lock:
            return tuple(sorted({piece for region in regions for piece in self._touching(region)}))

    def release(self, regions: Sequence[Region]) -> tuple[Region, ...]:
        """Let go of `regions` as they were acquired; returns what nobody holds any more, to be unregistered.

        Raises ValueError, and changes nothing, if one of them is not held.
        """
        with self._lock:
            for region, count in Counter(regions).items():
                if self._held[region] < count:
                    raise ValueError(f"region {region.base:#x}+{region.nbytes} is not held")
            for region in regions:
                self._held[region] -= 1
                self._holders.subtract(self._touching(region))
            dead = tuple(p for p in self._pieces if self._holders[p] <= 0)
            self._pieces = [p for p in self._pieces if self._holders[p] > 0]
            self._holders, self._held = +self._holders, +self._held
            return dead

    def _touching(self, region: Region) -> list[Region]:
        i = max(bisect.bisect_right(self._pieces, region.base, key=lambda p: p.base) - 1, 0)
        out = []
        while i < len(self._pieces) and self._pieces[i].base < region.end:
            if self._pieces[i].end > region.base:
                out.append(self._pieces[i])
            i += 1
        return out

    def _add_gaps(self, region: Region) -> list[Region]:
        gaps, at = [], region.base
        for piece in self._touching(region):
            if piece.base > at:
                gaps.append(Region(at, piece.base - at))
            at = piece.end
        if at < region.end:
            gaps.append(Region(at, region.end - at))
        for gap in gaps:
            bisect.insort(self._pieces, gap)
        return gaps
