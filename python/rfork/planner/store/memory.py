"""One planner, nothing shared: its state is its memory, and heartbeats refill it after a restart."""

from __future__ import annotations

from rfork.planner.events import Shared
from rfork.planner.store.base import Deliver


class MemoryStore:
    """The default store; also the reference for what a store must do when it is alone."""

    name = "memory"
    healthy = True

    async def start(self, planner: str, deliver: Deliver) -> None:
        pass

    async def stop(self) -> None:
        pass

    def share(self, event: Shared) -> None:
        pass

    async def claim(self, key: str, client: str, ttl_s: float) -> dict[str, float]:
        return {client: ttl_s}

    async def renew(self, key: str, client: str, ttl_s: float) -> None:
        pass

    async def release(self, key: str, client: str) -> None:
        pass
