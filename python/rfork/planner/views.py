"""The state as operators see it: frozen lines with durations, made on demand."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import islice

from rfork.planner.lifecycle import UnknownInstance
from rfork.planner.records import Instance
from rfork.planner.service import PlannerService
from rfork.planner.state import PlannerState
from rfork.wire.planner import (
    Instances,
    InstanceState,
    InstanceStory,
    InstanceView,
    LeaseLine,
    Leases,
    Overview,
    WaitingLine,
)

MAX_LINES = 10_000
DASHBOARD_LINES = 500


def instance_view(inst: Instance, now: float) -> InstanceView:
    beat = inst.beat
    return InstanceView(
        instance_id=inst.id,
        instance_key=beat.instance_key,
        state=beat.state.value,
        listener=beat.listener,
        generation=beat.generation,
        content=beat.content,
        weight_version=beat.weight_version,
        model=beat.model,
        capacity=beat.capacity,
        num_leases=inst.load,
        ranks=beat.ranks,
        ranks_ready=beat.ranks_ready,
        labels=beat.labels,
        parent=beat.parent,
        age_s=round(now - inst.since, 3),
        heartbeat_age_s=round(now - inst.seen_at, 3),
        offered=inst.offered(now),
        set_aside_s=round(max(inst.aside_until - now, 0.0), 3),
        drain_asked=inst.drain_asked,
    )


def instances(
    state: PlannerState, now: float, *, key: str = "", in_state: str = "", limit: int = MAX_LINES
) -> Instances:
    """Instances alive at `now`, whose key starts with `key`, in the given state."""
    found = [
        inst
        for inst in state.instances.values()
        if inst.expires_at > now
        and inst.beat.instance_key.startswith(key)
        and (not in_state or inst.beat.state.value == in_state)
    ]
    return Instances(len(found), [instance_view(inst, now) for inst in found[: max(min(limit, MAX_LINES), 0)]])


def story(state: PlannerState, instance_id: str, now: float) -> InstanceStory:
    inst = state.instances.get(instance_id)
    if inst is None or inst.expires_at <= now:
        raise UnknownInstance(f"no instance {instance_id} is registered")
    identity = state.pools[inst.beat.instance_key].identity or {}
    return InstanceStory(instance_view(inst, now), identity, list(inst.story))


def leases(state: PlannerState, now: float, limit: int = MAX_LINES) -> Leases:
    lines = [
        LeaseLine(
            seed=inst.id,
            client=client,
            instance_key=inst.beat.instance_key,
            granted=use.granted,
            age_s=round(now - use.since, 3),
            ttl_s=round(max(use.until - now, 0.0), 3),
        )
        for inst in state.instances.values()
        for client, use in inst.uses.items()
    ]
    return Leases(len(lines), lines[: max(min(limit, MAX_LINES), 0)])


def waiting(state: PlannerState, now: float) -> Iterable[WaitingLine]:
    """Claim holders, then waiting clients in order of arrival, pool by pool."""
    for pool in state.pools.values():
        for client in pool.claims:
            yield WaitingLine(client=client, instance_key=pool.key, waited_s=0.0, bound_s=0.0, claim=True)
        for waiter in sorted(pool.waiters.values(), key=lambda w: w.order):
            yield WaitingLine(
                client=waiter.ask.client,
                instance_key=pool.key,
                waited_s=round(now - waiter.since, 3),
                bound_s=round(waiter.bound_at - waiter.since, 3),
            )


def totals(state: PlannerState) -> dict[str, int]:
    """Counts that head the dashboard and `rfork watch`."""
    states = Counter(inst.beat.state.value for inst in state.instances.values())
    return {
        **{s.value: states[s.value] for s in InstanceState if s is not InstanceState.STOPPED},
        "leases": sum(inst.load for inst in state.instances.values()),
        "waiting": len(state.pool_of_waiter),
        "claims": sum(len(pool.claims) for pool in state.pools.values()),
        "keys": len(state.pools),
    }


def overview(service: PlannerService) -> Overview:
    state, now = service.state, service.clock.now()
    return Overview(
        planner=service.name,
        uptime_s=round(now - state.started_at, 3),
        store=service.store.name if service.store.healthy else f"{service.store.name} (not answering)",
        totals=totals(state),
        instances=instances(state, now, limit=DASHBOARD_LINES).instances,
        leases=leases(state, now, limit=DASHBOARD_LINES).leases,
        waiting=list(islice(waiting(state, now), DASHBOARD_LINES)),
        failures=service.lines(prefix="report_f", limit=50),
    )
