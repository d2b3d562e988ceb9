"""The planner's records and their index: what `PlannerState` decides upon. Nothing here decides."""

from __future__ import annotations

from rfork.planner.deadlines import Deadlines
from rfork.planner.policy import Policy
from rfork.planner.pool import Pool
from rfork.planner.records import Instance, Use, Waiter


class Registry:
    """Instances by id, pools by key, readers by seed and by client, waiters by client.

    Whoever changes an offered instance takes it off the shelf first (`unshelve`) and puts it back (`shelve`).
    """

    def __init__(self, policy: Policy, started_at: float) -> None:
        self.policy = policy
        self.started_at = started_at
        self.instances: dict[str, Instance] = {}
        self.pools: dict[str, Pool] = {}
        self.pool_of_waiter: dict[str, str] = {}
        self.seeds_of_client: dict[str, set[str]] = {}
        self._perhaps_empty: set[str] = set()
        self._deadlines = Deadlines()

    def settled(self, now: float) -> bool:
        """False in the first moments of a planner's life, when seeds may not have been heard of yet."""
        return now >= self.started_at + self.policy.settle_s

    def identity_known(self, key: str) -> bool:
        pool = self.pools.get(key)
        return pool is not None and pool.identity is not None

    def pool(self, key: str) -> Pool:
        """The pool of a key, made on demand; dropped again after this event if it ends up empty."""
        self._perhaps_empty.add(key)
        pool = self.pools.get(key)
        if pool is None:
            pool = self.pools[key] = Pool(key)
        return pool

    def unshelve(self, inst: Instance) -> None:
        for key in inst.keys:
            self.pool(key).unshelve(inst)
        inst.slot = None

    def shelve(self, inst: Instance, now: float) -> None:
        """Index an instance where its load and labels put it now, wherever it was; nowhere if it is not offered."""
        self.unshelve(inst)
        if inst.offered(now):
            labels, load = inst.beat.labels, inst.load
            inst.slot = (load, labels.get("fabric", ""), labels.get("zone", "")) if load < inst.beat.capacity else None
            for key in inst.keys:
                self.pool(key).shelve(inst)
        elif inst.resting(now):
            for key in inst.keys:
                self.pool(key).resting[inst.id] = inst

    def reserve(self, inst: Instance, client: str, now: float) -> None:
        """Count `client` as a reader of `inst` until a heartbeat lists it or the reservation ends."""
        self.unshelve(inst)
        until = now + self.policy.assignment_ttl_s
        inst.uses[client] = Use(now, until, granted=False)
        inst.granted_at = now
        self.seeds_of_client.setdefault(client, set()).add(inst.id)
        self._deadlines.add(until, "use", inst.id, client)
        inst.tell(now, f"chosen for {client}")
        self.shelve(inst, now)

    def _drop_use(self, inst: Instance, client: str) -> None:
        inst.uses.pop(client, None)
        seeds = self.seeds_of_client.get(client)
        if seeds is not None:
            seeds.discard(inst.id)
            if not seeds:
                del self.seeds_of_client[client]

    def _forget_waiter(self, client: str) -> Waiter | None:
        """Take a client out of the queue; its record as it was, open ask included."""
        pool = self.pools.get(self.pool_of_waiter.pop(client, ""))
        waiter = pool.waiters.get(client) if pool else None
        if pool is None or waiter is None:
            return None
        poll = waiter.poll
        pool.forget(waiter)
        self._perhaps_empty.add(pool.key)
        waiter.poll = poll
        return waiter

    def _drop_empty_pools(self) -> None:
        for key in self._perhaps_empty:
            pool = self.pools.get(key)
            if pool is not None and pool.empty:
                del self.pools[key]
        self._perhaps_empty.clear()
