"""The one decision: who in a pool's queue gets which answer now."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from itertools import chain, islice
from typing import TYPE_CHECKING

from rfork.planner.events import Assigned, Effect, Note, Share
from rfork.planner.nearest import nearest
from rfork.planner.policy import Policy
from rfork.planner.pool import Pool, acceptable
from rfork.planner.records import Instance, Waiter
from rfork.wire.planner import Answer, Ask, Candidate, FallBack, ForkFrom, Nearest, ReadDisk, Wait

if TYPE_CHECKING:
    from rfork.planner.state import PlannerState

SCAN = 64
"""Waiters looked at per change when the first ones can't use what is free (they gave up on that very seed)."""


def decide_all(state: PlannerState, pool: Pool, now: float, out: list[Effect]) -> Iterator[tuple[Waiter, Answer]]:
    """Yield (waiter, answer) for whoever can be answered, in order of arrival; the caller takes it out of the queue."""
    passed_over = 0
    while passed_over < min(len(pool.queue), SCAN):
        waiter = pool.waiters[pool.queue[passed_over][1]]
        answer = decide(state, pool, waiter, now, out)
        if answer is not None:
            yield waiter, answer
        elif _nothing_left(state, pool, now) and not waiter.ask.exclude:
            return
        else:
            passed_over += 1


def decide(state: PlannerState, pool: Pool, waiter: Waiter, now: float, out: list[Effect]) -> Answer | None:
    """None: it waits on.

    1. It holds the claim to read the disk: it still does.
    2. An acceptable seed is free: fork from it.
    3. There are seeds but it gave up on all of them: fall back.
    4. Its bound is passed: fall back.
    5. There is no seed, the planner has settled and a claim is free: read the disk.
    6. Else it waits, for a seed in use, for the holder of the claim, or for the planner to settle.
    """
    policy, ask = state.policy, waiter.ask
    if ask.client in pool.claims:
        pool.claims[ask.client] = now + policy.claim_ttl_s
        return ReadDisk(policy.claim_ttl_s)
    seeds = _free_seeds(state, pool, waiter, now)
    if seeds:
        pool.granted_at = now
        answer = ForkFrom([_candidate(inst) for inst in seeds])
        state.reserve(seeds[0], ask.client, now)
        out.append(Share(Assigned(pool.key, ask.client, seeds[0].id)))
        out.append(Note(kind="assigned", instance=seeds[0].id, client=ask.client, instance_key=pool.key))
        return answer
    if _gave_up_on_all(pool, ask, now):
        return gives_up(state, pool, waiter, "all_excluded", now)
    if now >= waiter.bound_at:
        return gives_up(state, pool, waiter, "bound", now)
    if ask.allow_disk and _claim_is_free(state, pool, now):
        pool.claims[ask.client] = now + policy.claim_ttl_s
        out.append(Note(kind="claim", client=ask.client, instance_key=pool.key, text="reads the disk"))
        return ReadDisk(policy.claim_ttl_s, _nearest(state, pool, ask))
    return None


def waits(state: PlannerState, pool: Pool, waiter: Waiter, now: float) -> Wait:
    """What to tell a client whose ask was open long enough."""
    if pool.offered or pool.resting:
        reason, names = "seeds_busy", list(islice(chain(pool.offered, pool.resting), 3))
    elif pool.claims:
        reason, names = "claim_held", list(islice(pool.claims, 3))
    elif not state.settled(now):
        reason, names = "settling", []
    else:
        reason, names = "no_seed", []
    return Wait(
        reason=reason,
        waiting_for=names,
        waited_s=round(now - waiter.since, 3),
        bound_s=round(waiter.bound_at - waiter.since, 3),
        position=sum(1 for since, _ in pool.queue[:1000] if since < waiter.since),
        nearest=[] if pool.offered else _nearest(state, pool, waiter.ask),
    )


def replaced(waiter: Waiter, now: float) -> Wait:
    """The answer to an ask whose client has asked again."""
    return Wait("replaced", [], round(now - waiter.since, 3), round(waiter.bound_at - waiter.since, 3), 0)


def gives_up(state: PlannerState, pool: Pool, waiter: Waiter, reason: str, now: float) -> FallBack:
    return FallBack(reason, round(now - waiter.since, 3), [] if pool.offered else _nearest(state, pool, waiter.ask))


def bound_s(ask: Ask, policy: Policy) -> float:
    """How long this client waits at most: as asked, capped, and spread by its name so no fleet gives up at once."""
    bound = min(ask.bound_s or policy.wait_bound_s, policy.wait_bound_max_s)
    return bound * (1 - policy.bound_jitter * zlib.crc32(ask.client.encode()) / 0xFFFFFFFF)


def _free_seeds(state: PlannerState, pool: Pool, waiter: Waiter, now: float) -> list[Instance]:
    """The candidates for this client, best first; empty unless the best may take one more now."""
    lowest = pool.lowest_load()
    fan_out = state.policy.fan_out
    if lowest is None or (fan_out and lowest >= fan_out and not _stalled(state, pool, waiter, now)):
        return []
    fit = (inst for inst in pool.ranked(waiter.ask.labels) if acceptable(inst, waiter.ask, now))
    best = next(fit, None)
    if best is None or (fan_out and best.load >= fan_out and not _stalled(state, pool, waiter, now)):
        return []
    return [best, *islice(fit, state.policy.candidates - 1)]


def _stalled(state: PlannerState, pool: Pool, waiter: Waiter, now: float) -> bool:
    """It has waited for `patience_s`, and no seed that it may use took anybody in that time: readers are slow or stuck,
    so it shares their seed. Who came before it was looked at before it.
    """
    then = now - state.policy.patience_s
    if waiter.since > then:
        return False
    if pool.granted_at <= then or not waiter.ask.exclude:
        return pool.granted_at <= then
    mine = (inst for inst in pool.ranked(waiter.ask.labels) if acceptable(inst, waiter.ask, now))
    return all(inst.granted_at <= then for inst in mine)


def _gave_up_on_all(pool: Pool, ask: Ask, now: float) -> bool:
    num_seeds = len(pool.offered) + len(pool.resting)
    if not ask.exclude or not num_seeds or num_seeds > len(ask.exclude) + 2:
        return False
    if any(name not in ask.exclude for name in pool.resting):
        return False
    return not any(acceptable(inst, ask, now) for inst in pool.offered.values())


def _claim_is_free(state: PlannerState, pool: Pool, now: float) -> bool:
    return not (pool.offered or pool.resting) and state.settled(now) and len(pool.claims) < state.policy.disk_claims


def _nothing_left(state: PlannerState, pool: Pool, now: float) -> bool:
    """Nobody further back can be answered either, unless this one gave up on seeds that others may share: no seed is
    free, no claim, and bounds are kept by deadlines.
    """
    lowest, fan_out = pool.lowest_load(), state.policy.fan_out
    return (lowest is None or bool(fan_out and lowest >= fan_out)) and not _claim_is_free(state, pool, now)


def _nearest(state: PlannerState, pool: Pool, ask: Ask) -> list[Nearest]:
    return nearest(ask.identity or pool.identity, pool.key, state.pools.values())


def _candidate(inst: Instance) -> Candidate:
    beat = inst.beat
    return Candidate(
        instance_id=inst.id,
        listener=beat.listener,
        generation=beat.generation,
        content=beat.content,
        instance_key=beat.instance_key,
        weight_version=beat.weight_version,
        nodes=beat.nodes,
        labels=beat.labels,
        ticket=beat.ticket,
    )
