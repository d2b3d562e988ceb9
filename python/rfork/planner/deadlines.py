"""Things that fall due, in order. Entries are never cancelled: who is called looks whether it is still due."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from itertools import count


class Deadlines:
    """A heap of (when, kind, name, other)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, str, str]] = []
        self._order = count()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, when: float, kind: str, name: str, other: str = "") -> None:
        heapq.heappush(self._heap, (when, next(self._order), kind, name, other))

    def due(self, now: float) -> Iterator[tuple[str, str, str]]:
        """Take out what is due at `now`; the caller may add more while it iterates."""
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, name, other = heapq.heappop(self._heap)
            yield kind, name, other
