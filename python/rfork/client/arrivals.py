"""Digests of what has landed, taken while the rest still flies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rfork.binding import Binding, Slice
from rfork.wire.seed import DigestTable

_PORTIONS = 12
"""In so many turns digests are begun while a shard is read; the last one is all that is left to wait for at the end."""


class ArrivingDigests(Protocol):
    """Digests that are taken while later bytes are still on their way; `rfork.digest.GroupDigests` is one."""

    def feed(self, groups: Sequence[int]) -> None:
        """Begin with these groups: their bytes are there."""

    def table(self) -> DigestTable:
        """Wait for all that were fed; rows of other groups are empty."""


class Arrivals:
    """Has `groups` digested as they arrive, in a few large portions, so that this costs the reader little.

    Without `digests` there is nothing to do.
    """

    def __init__(self, digests: ArrivingDigests | None, binding: Binding, groups: Sequence[int]) -> None:
        self._digests = digests
        starts, nbytes = binding.columns
        ends = (starts + nbytes)[list(groups) if digests is not None else []]
        order = ends.argsort(kind="stable")
        self._ends, self._groups = ends[order], [groups[i] for i in order.tolist()]
        self._at = 0
        self._portion = max(1, len(self._groups) // _PORTIONS)

    def landed(self, slices: Sequence[Slice], count: int) -> None:
        """The first `count` slices are there; slices come in the order of the seed's memory."""
        end = slices[count].remote if count < len(slices) else None
        arrived = len(self._groups) if end is None else int(self._ends.searchsorted(end, side="right"))
        if arrived - self._at >= self._portion or end is None:
            self._feed(arrived)

    def table(self) -> DigestTable:
        """Digests of everything, waited for."""
        assert self._digests is not None
        self._feed(len(self._groups))
        return self._digests.table()

    def _feed(self, upto: int) -> None:
        if self._digests is not None and upto > self._at:
            self._digests.feed(self._groups[self._at : upto])
            self._at = upto
