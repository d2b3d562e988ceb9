"""What always holds of a PlannerState, whatever it was fed. Tests check it after every step."""

from __future__ import annotations

from rfork.planner.pool import Pool
from rfork.planner.records import Instance
from rfork.planner.state import PlannerState


class BrokenInvariant(AssertionError):
    """A bug of the planner; the message names the rule and the object."""


def check(state: PlannerState, now: float) -> None:
    """Raise BrokenInvariant for the first rule that does not hold at `now`."""
    for inst in state.instances.values():
        _check_instance(state, inst, now)
    for pool in state.pools.values():
        _check_pool(state, pool, now)
    for client, key in state.pool_of_waiter.items():
        _rule(client in state.pools[key].waiters, "a waiting client is in its pool", client)
    for client, seeds in state.seeds_of_client.items():
        for seed in seeds:
            _rule(client in state.instances[seed].uses, "a client's seeds list it as a reader", (client, seed))


def _check_instance(state: PlannerState, inst: Instance, now: float) -> None:
    for key in inst.keys:
        _rule(
            state.pools[key].members.get(inst.id) is inst, "an instance is a member of the pools of its keys", inst.id
        )
    for client in inst.uses:
        _rule(inst.id in state.seeds_of_client.get(client, ()), "a reader's record names the seed", (client, inst.id))
    if inst.slot is not None:
        _rule(inst.healthy, "only healthy instances are indexed", inst.describe(now))
        _rule(inst.slot[0] == inst.load < inst.beat.capacity, "the index has the true load", inst.describe(now))


def _check_pool(state: PlannerState, pool: Pool, now: float) -> None:
    _rule(not pool.empty, "empty pools are dropped", pool.key)
    shelved = [
        (inst, (load, fabric, zone))
        for load, fabrics in pool.free.items()
        for fabric, zones in fabrics.items()
        for zone, shelf in zones.items()
        for inst in shelf.values()
    ]
    _rule(all(zones for f in pool.free.values() for zones in f.values()), "no empty shelves", pool.key)
    for inst, place in shelved:
        _rule(inst.slot == place, "an instance is on the one shelf that its record names", inst.id)
        _rule(inst.id in pool.offered and inst.id in pool.members, "shelved instances are offered members", inst.id)
    for inst in pool.offered.values():
        _rule(inst.healthy, "offered instances are healthy", inst.describe(now))
        _rule(state.instances.get(inst.id) is inst, "offered instances are registered", inst.id)
    for inst in pool.resting.values():
        _rule(inst.healthy, "resting instances are healthy", inst.describe(now))
        _rule(inst.id not in pool.offered and inst.id in pool.members, "resting instances are members", inst.id)
    _rule(pool.queue == sorted(pool.queue), "the queue is in order of arrival", pool.key)
    open_asks = {w.ask.client for w in pool.waiters.values() if w.poll is not None}
    _rule({client for _, client in pool.queue} == open_asks, "exactly the open asks are queued", pool.key)
    for client in pool.waiters:
        _rule(state.pool_of_waiter.get(client) == pool.key, "a client waits in one pool", client)
    # Several planners may each have granted a claim before they heard of the other: bounded by the number of planners.


def _rule(holds: bool, rule: str, what: object) -> None:
    if not holds:
        raise BrokenInvariant(f"{rule}: {what}")
