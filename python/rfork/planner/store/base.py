"""What planners share. The state is soft: a store that fails costs agreement between planners, never an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from typing import Protocol

from rfork.planner.events import Shared

Deliver = Callable[[Shared, float], None]
"""Called with each event of another planner and its age in seconds."""


class Store(Protocol):
    """How a planner tells the others what it saw, and settles who may read the disk.

    No method raises for trouble with the store's server, and none waits longer than its own short deadline.
    """

    name: str

    @property
    def healthy(self) -> bool:
        """False while the server does not answer: this planner acts alone."""
        ...

    async def start(self, planner: str, deliver: Deliver) -> None:
        """Begin to deliver the others' events, those of the last time to live first."""
        ...

    async def stop(self) -> None: ...

    def share(self, event: Shared) -> None:
        """Tell the others, soon; never blocks."""
        ...

    async def claim(self, key: str, client: str, ttl_s: float) -> dict[str, float]:
        """Take a claim of `key` for `client`; return its holders and for how long each.

        `client` is among them on success and on trouble. None at all: they let go in this moment.
        """
        ...

    async def renew(self, key: str, client: str, ttl_s: float) -> None: ...

    async def release(self, key: str, client: str) -> None: ...


async def end_tasks(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks until each has ended: one cancellation that meets a library's own time-out can get lost."""
    left = set(tasks)
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=0.2)
