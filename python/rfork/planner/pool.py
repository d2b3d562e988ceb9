"""All instances of one key, indexed for choosing, and the clients that wait for one of them."""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field

from rfork.planner.records import Instance, Waiter
from rfork.wire.planner import Ask, Field

Shelf = dict[str, dict[str, dict[str, Instance]]]


@dataclass(slots=True, eq=False)
class Pool:
    """`free[load][fabric][zone][id]` holds the offered instances under capacity, least recently changed first.
    `resting` are seeds that are fine but have just refused somebody: they count as seeds, and nobody is sent there now.
    `queue` is sorted by arrival and holds the waiters whose ask is open; `waiters` has those between two asks too.
    """

    key: str
    identity: dict[str, Field] | None = None
    members: dict[str, Instance] = field(default_factory=dict)
    offered: dict[str, Instance] = field(default_factory=dict)
    resting: dict[str, Instance] = field(default_factory=dict)
    free: dict[int, Shelf] = field(default_factory=dict)
    waiters: dict[str, Waiter] = field(default_factory=dict)
    queue: list[tuple[float, str]] = field(default_factory=list)
    claims: dict[str, float] = field(default_factory=dict)
    granted_at: float = 0.0

    @property
    def empty(self) -> bool:
        return not (self.members or self.waiters or self.claims)

    def shelve(self, inst: Instance) -> None:
        """Index an offered instance; `inst.slot` is set already (None: at capacity)."""
        self.offered[inst.id] = inst
        if inst.slot is not None:
            load, fabric, zone = inst.slot
            self.free.setdefault(load, {}).setdefault(fabric, {}).setdefault(zone, {})[inst.id] = inst

    def unshelve(self, inst: Instance) -> None:
        """Undo `shelve`; harmless for an instance that is not indexed."""
        self.offered.pop(inst.id, None)
        self.resting.pop(inst.id, None)
        if inst.slot is None:
            return
        load, fabric, zone = inst.slot
        fabrics = self.free.get(load, {})
        zones = fabrics.get(fabric, {})
        shelf = zones.get(zone, {})
        shelf.pop(inst.id, None)
        if not shelf:
            zones.pop(zone, None)
            if not zones:
                fabrics.pop(fabric, None)
                if not fabrics:
                    self.free.pop(load, None)

    def lowest_load(self) -> int | None:
        return min(self.free) if self.free else None

    def ranked(self, labels: dict[str, str]) -> Iterator[Instance]:
        """Offered instances under capacity: fewest leases, then same fabric and zone, same fabric, same zone, any."""
        fabric, zone = labels.get("fabric", ""), labels.get("zone", "")
        for load in sorted(self.free):
            fabrics = self.free[load]
            near = fabrics.get(fabric, {})
            yield from near.get(zone, {}).values()
            for other_zone, shelf in near.items():
                if other_zone != zone:
                    yield from shelf.values()
            for other, zones in fabrics.items():
                if other != fabric:
                    yield from zones.get(zone, {}).values()
            for other, zones in fabrics.items():
                if other != fabric:
                    for other_zone, shelf in zones.items():
                        if other_zone != zone:
                            yield from shelf.values()

    def enqueue(self, waiter: Waiter) -> None:
        self.waiters[waiter.ask.client] = waiter
        bisect.insort(self.queue, waiter.order)

    def leave_queue(self, waiter: Waiter) -> None:
        """Its ask is no longer open; it keeps its place for a while in `waiters`."""
        at = bisect.bisect_left(self.queue, waiter.order)
        if at < len(self.queue) and self.queue[at] == waiter.order:
            del self.queue[at]
        waiter.poll = None

    def forget(self, waiter: Waiter) -> None:
        self.leave_queue(waiter)
        self.waiters.pop(waiter.ask.client, None)


def acceptable(inst: Instance, ask: Ask, now: float) -> bool:
    """Whether this client may be sent there: alive, not itself nor its former life, not one that it has given up on."""
    return (
        inst.offered(now)
        and inst.id != ask.client
        and inst.id not in ask.exclude
        and (not ask.listener or inst.beat.listener != ask.listener)
        and bool(inst.beat.listener)
    )
