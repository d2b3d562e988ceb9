"""When no instance has the asked key: which come nearest, and in which identity fields they differ."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from rfork.planner.pool import Pool
from rfork.wire.planner import Field, Nearest

MAX_POOLS = 256
MAX_FIELDS = 16
MAX_INSTANCES = 5


def nearest(asked: dict[str, Field] | None, key: str, pools: Iterable[Pool], count: int = 3) -> list[Nearest]:
    """The `count` other keys with offered instances and fewest differing fields; none if the asker has no identity."""
    if asked is None:
        return []
    found: list[tuple[int, str, Pool, list[str]]] = []
    for pool, _ in zip(pools, range(MAX_POOLS), strict=False):
        if pool.key == key or pool.identity is None or not pool.offered:
            continue
        theirs = pool.identity
        names = [n for n in asked.keys() | theirs.keys() if asked.get(n) != theirs.get(n)]
        found.append((len(names), pool.key, pool, sorted(names)))
    return [
        Nearest(
            instance_key=other,
            instances=[i for i, _ in zip(pool.offered, range(MAX_INSTANCES), strict=False)],
            num_differing=num,
            differs={n: (asked.get(n), (pool.identity or {}).get(n)) for n in names[:MAX_FIELDS]},
        )
        for num, other, pool, names in heapq.nsmallest(count, found, key=lambda line: line[:2])
    ]
