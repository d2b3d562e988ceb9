"""The binding: where a manifest's bytes lie, at one generation, and how to reach them.

`bind()` joins a transfer plan with the two sides' addresses into slices: contiguous on both sides, each inside one
region on both sides, none longer than the link likes.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec

from rfork.manifest import TransferPlan

ANYWHERE = "any"


class Region(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Registered contiguous memory inside one allocation."""

    base: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.base <= 0 or self.nbytes <= 0:
            raise ValueError(f"a region needs a positive base and size, got {self.base:#x}+{self.nbytes}")

    @property
    def end(self) -> int:
        return self.base + self.nbytes


class Endpoint(msgspec.Struct, frozen=True):
    """One way to reach a shard. `scope` is `any`, or `host:<boot id>` where only that host can use it."""

    protocol: str
    session_id: str
    scope: str = ANYWHERE


class Binding(msgspec.Struct, frozen=True):
    """Manifest → memory. `addresses[g]` is where group g starts; `fence_address` where the fence page starts.

    Raises ValueError at birth unless every byte lies inside exactly one region (I4) and belongs to one group only.
    """

    manifest_digest: str
    generation: int
    regions: tuple[Region, ...]
    addresses: tuple[int, ...]
    group_nbytes: tuple[int, ...]
    fence_address: int
    fence_nbytes: int
    endpoints: tuple[Endpoint, ...] = ()

    def __post_init__(self) -> None:
        if len(self.addresses) != len(self.group_nbytes):
            raise ValueError(f"{len(self.group_nbytes)} groups but {len(self.addresses)} addresses")
        index = RegionIndex(self.regions)
        for address, nbytes in zip(self.addresses, self.group_nbytes, strict=True):
            index.cover(address, nbytes)
        index.cover(self.fence_address, self.fence_nbytes)
        spans = sorted([*zip(self.addresses, self.group_nbytes, strict=True), (self.fence_address, self.fence_nbytes)])
        for (left, nbytes), (right, _) in itertools.pairwise(spans):
            if left + nbytes > right:
                raise ValueError(f"bytes at {left:#x}+{nbytes} and {right:#x} overlap")


class RegionIndex:
    """Sorted, non-overlapping regions with a look-up. Raises ValueError on overlap."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions)
        self._bases = [r.base for r in self._regions]
        for left, right in zip(self._regions, self._regions[1:], strict=False):
            if left.end > right.base:
                raise ValueError(f"regions overlap: {left.base:#x}+{left.nbytes} and {right.base:#x}+{right.nbytes}")

    def find(self, address: int, nbytes: int) -> Region:
        """The one region that holds [address, address + nbytes); ValueError if none does."""
        i = bisect.bisect_right(self._bases, address) - 1
        if i < 0 or address + nbytes > self._regions[i].end:
            raise ValueError(f"bytes at {address:#x}+{nbytes} lie in no registered region")
        return self._regions[i]

    def cover(self, address: int, nbytes: int) -> list[Region]:
        """The regions that hold [address, address + nbytes), in order and without a gap; ValueError if a byte is in
        none.
        """
        i = max(bisect.bisect_right(self._bases, address) - 1, 0)
        out: list[Region] = []
        at = address
        while at < address + nbytes:
            if i >= len(self._regions) or not self._regions[i].base <= at < self._regions[i].end:
                raise ValueError(f"bytes at {address:#x}+{nbytes} lie in no registered region")
            out.append(self._regions[i])
            at = self._regions[i].end
            i += 1
        return out


class Slice(NamedTuple):
    """One read: `nbytes` from `remote` on the seed to `local` here."""

    local: int
    remote: int
    nbytes: int


def bind(plan: TransferPlan, local: Binding, remote: Binding, *, max_slice_nbytes: int) -> list[Slice]:
    """Reads for the whole plan, ordered by remote address; runs contiguous on both sides are one slice.

    A slice never crosses a region's edge on either side, so a group may lie in several regions that touch.
    """
    if max_slice_nbytes <= 0:
        raise ValueError(f"max_slice_nbytes must be positive, got {max_slice_nbytes}")
    if remote.group_nbytes != plan.group_nbytes or local.group_nbytes != plan.group_nbytes:
        raise ValueError("plan and bindings do not describe the same groups")
    theirs, ours = RegionIndex(remote.regions), RegionIndex(local.regions)
    runs: list[list[int]] = []
    run_regions: tuple[Region, Region] | None = None
    for there, here, nbytes in sorted(zip(remote.addresses, local.addresses, plan.group_nbytes, strict=True)):
        for at, size, regions in _pieces(theirs.cover(there, nbytes), ours.cover(here, nbytes), there, here, nbytes):
            last = runs[-1] if runs else None
            if last and regions == run_regions and last[1] + last[2] == there + at and last[0] + last[2] == here + at:
                last[2] += size
            else:
                runs.append([here + at, there + at, size])
                run_regions = regions
    return [s for here, there, nbytes in runs for s in _split(here, there, nbytes, max_slice_nbytes)]


def _pieces(
    theirs: list[Region], ours: list[Region], there: int, here: int, nbytes: int
) -> Iterator[tuple[int, int, tuple[Region, Region]]]:
    """Cut one group at every edge of either side: (offset in the group, bytes, the region on both sides)."""
    at = i = j = 0
    while at < nbytes:
        end = min(theirs[i].end - there, ours[j].end - here, nbytes)
        yield at, end - at, (theirs[i], ours[j])
        at = end
        i += theirs[i].end - there == end
        j += ours[j].end - here == end


def _split(here: int, there: int, nbytes: int, limit: int) -> list[Slice]:
    return [Slice(here + o, there + o, min(limit, nbytes - o)) for o in range(0, nbytes, limit)]
