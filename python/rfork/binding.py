"""The binding: where a manifest's bytes lie, at one generation, and how to reach them.

`bind()` joins a transfer plan with the two sides' addresses into slices: contiguous on both sides, each inside one
region on both sides, none longer than the link likes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from rfork.manifest import TransferPlan

if TYPE_CHECKING:
    import numpy.typing as npt

    Column = npt.NDArray[Any]

ANYWHERE = "any"
MAX_ADDRESS = 1 << 64
_TOO_MUCH = 1 << 62


class Region(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Registered contiguous memory inside one allocation."""

    base: int
    nbytes: int

    def __post_init__(self) -> None:
        if self.base <= 0 or self.nbytes <= 0 or self.end > MAX_ADDRESS:
            raise ValueError(f"a region needs a positive base and size, got {self.base:#x}+{self.nbytes}")

    @property
    def end(self) -> int:
        return self.base + self.nbytes


class Endpoint(msgspec.Struct, frozen=True):
    """One way to reach a shard. `scope` is `any`, or `host:<boot id>` where only that host can use it."""

    protocol: str
    session_id: str
    scope: str = ANYWHERE


class Binding(msgspec.Struct, frozen=True, dict=True):
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
        starts, nbytes = self.columns
        if self.fence_nbytes <= 0 or _where(nbytes <= 0):
            raise ValueError("a binding names spans of no or negative length")
        index = RegionIndex(self.regions)
        for span in _where(index.holders(starts, nbytes) < 0):
            index.cover(int(starts[span]), int(nbytes[span]))
        index.cover(self.fence_address, self.fence_nbytes)
        fence = _column([self.fence_address]), _column([self.fence_nbytes])
        _refuse_overlap(*(_joined(pair) for pair in zip(self.columns, fence, strict=True)))

    @cached_property
    def columns(self) -> tuple[Column, Column]:
        """Where each group starts and how long it is, as arrays."""
        return _column(self.addresses), _column(self.group_nbytes)


class Layout(msgspec.Struct, frozen=True, dict=True):
    """Where groups lie, from a side whose word needs no proof: what `bind` has to know of a binding, and no more."""

    regions: tuple[Region, ...]
    addresses: tuple[int, ...]
    group_nbytes: tuple[int, ...]

    @cached_property
    def columns(self) -> tuple[Column, Column]:
        """Where each group starts and how long it is, as arrays."""
        return _column(self.addresses), _column(self.group_nbytes)


class RegionIndex:
    """Sorted, non-overlapping regions with a look-up. Raises ValueError on overlap."""

    def __init__(self, regions: Sequence[Region]) -> None:
        self._regions = sorted(regions)
        self._bases = [r.base for r in self._regions]
        self._columns: tuple[Column, Column] | None = None
        for left, right in zip(self._regions, self._regions[1:], strict=False):
            if left.end > right.base:
                raise ValueError(f"regions overlap: {left.base:#x}+{left.nbytes} and {right.base:#x}+{right.nbytes}")

    def find(self, address: int, nbytes: int) -> Region:
        """The one region that holds [address, address + nbytes); ValueError if none does."""
        i = bisect.bisect_right(self._bases, address) - 1
        if i < 0 or address + nbytes > self._regions[i].end:
            raise ValueError(f"bytes at {address:#x}+{nbytes} lie in no registered region")
        return self._regions[i]

    def holders(self, starts: Column, nbytes: Column) -> Column:
        """For each span the number of the one region that holds it, counted by address; -1 where there is none."""
        import numpy as np

        if self._columns is None:
            self._columns = _column(self._bases), _column([r.nbytes for r in self._regions])
        bases, sizes = self._columns
        if not len(bases):
            return np.full(len(starts), -1)
        found = np.searchsorted(bases, starts, side="right") - 1
        inside = (found >= 0) & (starts + nbytes <= (bases + sizes)[found])
        return np.where(inside, found, -1)

    def cover(self, address: int, nbytes: int) -> list[tuple[int, Region]]:
        """The regions that hold [address, address + nbytes), with their numbers, in order and without a gap.

        Raises ValueError if a byte is in none.
        """
        i = max(bisect.bisect_right(self._bases, address) - 1, 0)
        out: list[tuple[int, Region]] = []
        at = address
        while at < address + nbytes:
            if i >= len(self._regions) or not self._regions[i].base <= at < self._regions[i].end:
                raise ValueError(f"bytes at {address:#x}+{nbytes} lie in no registered region")
            out.append((i, self._regions[i]))
            at = self._regions[i].end
            i += 1
        return out


def _column(numbers: Sequence[int]) -> Column:
    """Numbers of which two can be added without overflow. Raises ValueError: a peer's numbers may be anything."""
    import numpy as np

    try:
        column = np.array(numbers, dtype=np.int64)
        fits = not len(column) or (column.min() >= 0 and column.max() < _TOO_MUCH)
    except OverflowError:
        fits = False
    if not fits:
        raise ValueError(f"addresses and sizes lie between 0 and 2**62, got {min(numbers)} to {max(numbers)}")
    return column


def _joined(columns: Sequence[Column]) -> Column:
    import numpy as np

    return np.concatenate(columns)


def _where(mask: Column) -> list[int]:
    return [int(i) for i in mask.nonzero()[0]]


def _refuse_overlap(starts: Column, nbytes: Column) -> None:
    order = starts.argsort(kind="stable")
    starts, nbytes = starts[order], nbytes[order]
    wrong = _where(starts[:-1] + nbytes[:-1] > starts[1:])
    if wrong:
        i = wrong[0]
        raise ValueError(f"bytes at {int(starts[i]):#x}+{int(nbytes[i])} and {int(starts[i + 1]):#x} overlap")


class Slice(NamedTuple):
    """One read: `nbytes` from `remote` on the seed to `local` here."""

    local: int
    remote: int
    nbytes: int


def bind(
    plan: TransferPlan,
    local: Binding | Layout,
    remote: Binding | Layout,
    *,
    max_slice_nbytes: int,
    slack: Sequence[int] | None = None,
) -> list[Slice]:
    """Reads for the whole plan, ordered by remote address; runs contiguous on both sides are one slice.

    A slice never crosses a region's edge on either side, so a group may lie in several regions that touch. `slack` is
    the number of bytes behind each local group that are nobody's: gaps as small and alike on both sides are read over.

    Raises ValueError if a byte of either side is in no region.
    """
    import numpy as np

    if max_slice_nbytes <= 0:
        raise ValueError(f"max_slice_nbytes must be positive, got {max_slice_nbytes}")
    if remote.group_nbytes != plan.group_nbytes or local.group_nbytes != plan.group_nbytes:
        raise ValueError("plan and bindings do not describe the same groups")
    theirs, ours = RegionIndex(remote.regions), RegionIndex(local.regions)
    (there, nbytes), (here, _) = remote.columns, local.columns
    spare = _column(slack) if slack else np.zeros_like(nbytes)
    rows = np.stack([there, here, nbytes, spare, theirs.holders(there, nbytes), ours.holders(here, nbytes)], axis=1)
    whole = (rows[:, 4] >= 0) & (rows[:, 5] >= 0)
    pieces = [piece for g in _where(~whole) for piece in _pieces(theirs, ours, *map(int, rows[g, :3]))]
    rows = np.concatenate([rows[whole], np.array(pieces, dtype=np.int64).reshape(-1, 6)])
    rows = rows[rows[:, 0].argsort(kind="stable")]
    return cut([Slice(*run) for run in _runs(rows)], max_slice_nbytes)


def cut(slices: Sequence[Slice], max_slice_nbytes: int) -> list[Slice]:
    """The same reads, none longer than `max_slice_nbytes`."""
    return [
        Slice(here + at, there + at, min(max_slice_nbytes, nbytes - at))
        for here, there, nbytes in slices
        for at in range(0, nbytes, max_slice_nbytes)
    ]


def _runs(rows: Column) -> list[tuple[int, int, int]]:
    """(local, remote, nbytes) of neighbours joined. Columns: remote, local, nbytes, slack, remote and local region."""
    import numpy as np

    before, after = rows[:-1], rows[1:]
    gap = after[:, :2] - (before[:, :2] + before[:, 2:3])
    joined = (gap[:, 0] == gap[:, 1]) & (gap[:, 0] >= 0) & (gap[:, 0] <= before[:, 3])
    joined &= (before[:, 4:] == after[:, 4:]).all(axis=1)
    first = np.concatenate([[True], ~joined]).nonzero()[0] if len(rows) else np.array([], dtype=np.int64)
    last = np.append(first[1:], len(rows)) - 1 if len(rows) else first
    nbytes = rows[last, 0] + rows[last, 2] - rows[first, 0]
    return list(zip(rows[first, 1].tolist(), rows[first, 0].tolist(), nbytes.tolist(), strict=True))


def _pieces(
    theirs: RegionIndex, ours: RegionIndex, there: int, here: int, nbytes: int
) -> Iterator[tuple[int, int, int, int, int, int]]:
    """Cut one group at every edge of either side, as rows for `_runs`."""
    far, near = theirs.cover(there, nbytes), ours.cover(here, nbytes)
    at = i = j = 0
    while at < nbytes:
        end = min(far[i][1].end - there, near[j][1].end - here, nbytes)
        yield there + at, here + at, end - at, 0, far[i][0], near[j][0]
        at = end
        i += far[i][1].end - there == end
        j += near[j][1].end - here == end
