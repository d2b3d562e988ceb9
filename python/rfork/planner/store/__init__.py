"""Where planners meet: `memory` for one planner, `redis://…` for several behind one address."""

from __future__ import annotations

from rfork.planner.store.base import Store
from rfork.planner.store.memory import MemoryStore

__all__ = ["MemoryStore", "Store", "open_store"]


def open_store(url: str, *, horizon_s: float, num_claims: int) -> Store:
    """Make the store that `--store` names, else ValueError.

    `horizon_s`: how far back shared events matter; `num_claims`: how many clients may hold a claim of one key.
    """
    if url == "memory":
        return MemoryStore()
    if url.startswith(("redis://", "rediss://", "unix://")):
        from rfork.planner.store.redis import RedisStore

        try:
            return RedisStore(url, horizon_s=horizon_s, num_claims=num_claims)
        except ValueError as error:
            why = error if "@" not in url else "special characters of a password are written as %XX"
            raise ValueError(f"--store must be redis://host:port/db: {why}") from None
    raise ValueError(f"--store must be memory or redis://host:port/db, got {url.split('@')[-1]!r}")
