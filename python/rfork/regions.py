"""From tensors to memory that a transport can register.

A region never joins two allocations. On the host that is one region per torch storage; on a device one per segment of
the caching allocator, from the segment's base to the last byte that is wanted.
"""

from __future__ import annotations

import bisect
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


def regions_of(spans: Sequence[Span], device: torch.device) -> tuple[Region, ...]:
    """Sorted regions that cover the spans. Raises UnsupportedModel naming tensor and setting if memory can't be
    registered.
    """
    return host_regions(spans) if device.type == "cpu" else segment_regions(spans, _segments(device))


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
