"""The planner's pure core: one door, event and time in, effects out. No sockets, threads, clocks or randomness.

An event that is refused raises a PlannerError and changes nothing. `check` states what always holds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rfork.planner import matching
from rfork.planner.events import (
    Assigned,
    Claimed,
    ClaimLost,
    ClaimOver,
    Deliver,
    Drain,
    Effect,
    Event,
    Hangup,
    Note,
    Parked,
    Tick,
    Withdraw,
)
from rfork.planner.lifecycle import FOLLOWS, IllegalTransition, InstanceGone, PlannerFull, UnknownInstance
from rfork.planner.policy import Policy
from rfork.planner.pool import Pool
from rfork.planner.records import Instance, Use, Waiter, shape, stored
from rfork.planner.registry import Registry
from rfork.wire.planner import Answer, FallBack, Heartbeat, InstanceState, Outcome, ReadDisk, Report

GONE_S = 600.0
NO_FAULT_OF_THE_SEED = frozenset({"manifest_mismatch", "fence", "stale_generation", "content", "cancelled"})

Out = list[Effect]


class PlannerState(Registry):
    """Who is registered, who reads whom, who waits, who may read the disk.

    Two planners that see the same events agree up to the order in which these reach them; where they disagree, a seed
    refuses a lease and the client moves on.
    """

    def __init__(self, policy: Policy, started_at: float) -> None:
        super().__init__(policy, started_at)
        self._id_at: dict[str, str] = {}
        self._gone: dict[str, str] = {}
        self._failed_seeds: dict[str, set[str]] = {}
        self._handlers: dict[type, Callable[[Any, float, Out], None]] = {
            Heartbeat: self._on_heartbeat,
            Withdraw: self._on_withdraw,
            Drain: self._on_drain,
            Report: self._on_report,
            Parked: self._on_ask,
            Hangup: self._on_hangup,
            Assigned: self._on_assigned,
            Claimed: self._on_claimed,
            ClaimLost: self._on_claim_lost,
            Tick: self._on_tick,
        }

    def handle(self, event: Event, now: float, age_s: float = 0.0) -> list[Effect]:
        """Take one event. `age_s` is how long ago another planner took a heartbeat in, or granted a claim."""
        out: Out = []
        try:
            if age_s and isinstance(event, Heartbeat):
                self._on_heartbeat(event, now, out, age_s)
            elif age_s and isinstance(event, Claimed):
                self._on_claimed(event, now - age_s, out)
            else:
                self._handlers[type(event)](event, now, out)
        finally:
            self._drop_empty_pools()
        return out

    # Instances

    def _on_heartbeat(self, beat: Heartbeat, now: float, out: Out, age_s: float = 0.0) -> None:
        inst = self.instances.get(beat.instance_id)
        if inst is None:
            if beat.instance_id in self._gone:
                raise InstanceGone(f"instance {beat.instance_id} is gone: {self._gone[beat.instance_id]}")
            if beat.state is InstanceState.STOPPED:
                return
            if len(self.instances) >= self.policy.max_instances:
                raise PlannerFull(f"this planner holds {self.policy.max_instances} instances and takes no more")
            if self._too_many_keys(beat.instance_key):
                raise PlannerFull(f"this planner holds {self.policy.max_keys} instance keys and takes no more")
            self._register(beat, now, age_s, out)
            return
        if beat.seq and beat.seq <= inst.beat.seq:
            return
        if beat.state not in FOLLOWS[inst.beat.state]:
            raise IllegalTransition(
                f"{inst.describe(now)} can't become {beat.state.name}: from {inst.beat.state.name} it may become "
                f"{', '.join(sorted(s.name for s in FOLLOWS[inst.beat.state])) or 'nothing'}",
                inst.story,
            )
        if beat.state is InstanceState.STOPPED:
            self._remove(inst, now, "stopped", out, tombstone=True)
            return
        self._learn_identity(beat)
        inst.seen_at = now - age_s
        inst.expires_at = inst.seen_at + self.policy.ttl_s
        self._renew_claim(inst, beat)
        if inst.uses or beat.leases or shape(beat) != shape(inst.beat):
            self._update(inst, beat, now, out)
        else:
            inst.beat = stored(beat)

    def _too_many_keys(self, key: str) -> bool:
        return len(self.pools) >= self.policy.max_keys and key not in self.pools

    def _register(self, beat: Heartbeat, now: float, age_s: float, out: Out) -> None:
        seen_at = now - age_s
        inst = Instance(stored(beat), since=seen_at, seen_at=seen_at, expires_at=seen_at + self.policy.ttl_s)
        self.instances[inst.id] = inst
        for key in inst.keys:
            self.pool(key).members[inst.id] = inst
        self._deadlines.add(inst.expires_at, "instance", inst.id)
        inst.tell(now, f"registered {beat.state.name} gen={beat.generation}")
        out.append(_note("registered", inst, beat.state.value))
        self._learn_identity(beat)
        self._renew_claim(inst, beat)
        self._update(inst, beat, now, out)

    def _update(self, inst: Instance, beat: Heartbeat, now: float, out: Out) -> None:
        """Take over a heartbeat that changes something, and see who can be served now."""
        before = inst.beat
        self.unshelve(inst)
        self._move_pools(inst, beat, out)
        inst.beat = stored(beat)
        if beat.listener and self._id_at.get(beat.listener) != inst.id:
            self._take_address(inst, now, out)
        self._take_leases(inst, beat, now)
        self.shelve(inst, now)
        if before.state is not beat.state or before.generation != beat.generation:
            inst.tell(now, f"{before.state.name} -> {beat.state.name} gen={beat.generation}")
            out.append(_note("state", inst, f"{before.state.value} -> {beat.state.value} generation {beat.generation}"))
        if beat.state is not InstanceState.STARTING:
            self._pull_is_over(inst.id, now, out)
            self._end_claim(beat.instance_key, inst.id, out)
        for key in inst.keys:
            self.match(self.pool(key), now, out)

    def _move_pools(self, inst: Instance, beat: Heartbeat, out: Out) -> None:
        new = (beat.instance_key, beat.live_key) if beat.live_key else (beat.instance_key,)
        for key in inst.keys:
            if key not in new:
                self.pool(key).members.pop(inst.id, None)
                self._end_claim(key, inst.id, out)
        for key in new:
            self.pool(key).members[inst.id] = inst

    def _take_address(self, inst: Instance, now: float, out: Out) -> None:
        """One address, one instance: who was there before is a former life, whatever its time to live says."""
        former = self.instances.get(self._id_at.get(inst.beat.listener, ""))
        if former is not None and former is not inst and former.beat.listener == inst.beat.listener:
            self._remove(former, now, f"replaced by {inst.id} at {inst.beat.listener}", out, tombstone=True)
        self._id_at[inst.beat.listener] = inst.id

    def _take_leases(self, inst: Instance, beat: Heartbeat, now: float) -> None:
        listed = {lease.client: lease for lease in beat.leases}
        for client in [c for c, use in inst.uses.items() if use.granted and c not in listed]:
            self._drop_use(inst, client)
        for client, lease in listed.items():
            inst.uses[client] = Use(now - lease.age_s, now + lease.ttl_s, granted=True)
            self.seeds_of_client.setdefault(client, set()).add(inst.id)
            self._deadlines.add(now + lease.ttl_s, "use", inst.id, client)

    def _learn_identity(self, beat: Heartbeat) -> None:
        if beat.identity is not None:
            self.pool(beat.instance_key).identity = beat.identity

    def _on_withdraw(self, event: Withdraw, now: float, out: Out) -> None:
        inst = self.instances.get(event.instance_id)
        if inst is not None:
            self._remove(inst, now, event.reason, out, tombstone=True)
        else:
            self._bury(event.instance_id, event.reason, now)
            for key in [k for k, pool in self.pools.items() if event.instance_id in pool.claims]:
                self._end_claim(key, event.instance_id, out)
                self._match_key(key, now, out)
        self._leave(event.instance_id, now, out)

    def _on_drain(self, event: Drain, now: float, out: Out) -> None:
        inst = self.instances.get(event.instance_id)
        if inst is None:
            raise UnknownInstance(f"no instance {event.instance_id} is registered")
        if not inst.drain_asked:
            self.unshelve(inst)
            inst.drain_asked = True
            inst.tell(now, "asked to drain")
            out.append(_note("drain", inst))
            self._match_all(inst, now, out)

    def _remove(self, inst: Instance, now: float, reason: str, out: Out, *, tombstone: bool) -> None:
        self.unshelve(inst)
        for client in list(inst.uses):
            self._drop_use(inst, client)
        del self.instances[inst.id]
        if self._id_at.get(inst.beat.listener) == inst.id:
            del self._id_at[inst.beat.listener]
        if tombstone:
            self._bury(inst.id, reason, now)
        out.append(_note("gone", inst, reason))
        self._end_claim(inst.beat.instance_key, inst.id, out)
        self._pull_is_over(inst.id, now, out)
        for key in inst.keys:
            pool = self.pool(key)
            pool.members.pop(inst.id, None)
            self.match(pool, now, out)

    def _bury(self, instance_id: str, reason: str, now: float) -> None:
        self._gone[instance_id] = reason
        self._deadlines.add(now + GONE_S, "gone", instance_id)
        if len(self._gone) > self.policy.max_instances:
            del self._gone[next(iter(self._gone))]

    # Who reads whom

    def _on_assigned(self, event: Assigned, now: float, out: Out) -> None:
        self.give_back(event.client, now, out)
        inst = self.instances.get(event.seed)
        if inst is not None and event.client not in inst.uses:
            self.reserve(inst, event.client, now)
        pool = self.pools.get(event.instance_key)
        if pool is not None:
            pool.granted_at = now

    def give_back(self, client: str, now: float, out: Out, *, granted_too: bool = False) -> None:
        """End a client's reservations; its granted leases too once it reads no more."""
        for seed_id in list(self.seeds_of_client.get(client, ())):
            inst = self.instances[seed_id]
            if granted_too or not inst.uses[client].granted:
                self._release(inst, client, now, out)

    def _pull_is_over(self, client: str, now: float, out: Out) -> None:
        self.give_back(client, now, out, granted_too=True)

    def _release(self, inst: Instance, client: str, now: float, out: Out) -> None:
        if client in inst.uses:
            self.unshelve(inst)
            self._drop_use(inst, client)
            self._match_all(inst, now, out)

    def _on_report(self, report: Report, now: float, out: Out) -> None:
        inst = self.instances.get(report.seed)
        text = " ".join(p for p in (report.outcome.value, report.reason, report.detail) if p)
        out.append(
            Note(
                kind=f"report_{report.outcome.value}",
                instance=report.seed,
                client=report.client,
                instance_key=report.instance_key,
                text=text,
            )
        )
        if report.outcome is Outcome.FELL_BACK:
            self._leave(report.client, now, out)
        if report.outcome is Outcome.FAILED and not report.seed:
            self._end_claim(report.instance_key, report.client, out)
            self._match_key(report.instance_key, now, out)
        if inst is None:
            return
        inst.tell(now, f"{report.client}: {text}")
        if report.outcome is Outcome.LOADED:
            inst.strikes.clear()
            inst.struck_until = 0.0
            self._set_aside(inst, 0.0, now)
        elif report.outcome is Outcome.REFUSED or report.reason in NO_FAULT_OF_THE_SEED:
            self._set_aside(inst, max(inst.aside_until, now + self.policy.busy_s), now)
        elif report.outcome is Outcome.FAILED:
            self._strike(inst, report.client, now, out)
        self._release(inst, report.client, now, out)

    def _strike(self, inst: Instance, client: str, now: float, out: Out) -> None:
        if len(self._failed_seeds) >= self.policy.max_waiting and client not in self._failed_seeds:
            return
        failed = self._failed_seeds.setdefault(client, set())
        failed.add(inst.id)
        self._deadlines.add(now + self.policy.set_aside_max_s, "suspect", client)
        if len(failed) >= self.policy.suspect_after:
            out.append(_note("suspect", inst, f"{client} failed with {len(failed)} seeds: its own link is suspect"))
            return
        inst.strikes.add(client)
        back_off_s = min(self.policy.set_aside_s * 2 ** min(len(inst.strikes) - 1, 30), self.policy.set_aside_max_s)
        inst.struck_until = max(inst.struck_until, now + back_off_s)
        self._set_aside(inst, max(inst.aside_until, now + back_off_s), now)
        out.append(_note("set_aside", inst, f"for {back_off_s:g} s after {len(inst.strikes)} clients failed"))

    def _set_aside(self, inst: Instance, until: float, now: float) -> None:
        if inst.aside_until != until:
            self.unshelve(inst)
            inst.aside_until = until
            self.shelve(inst, now)
            if until > now:
                self._deadlines.add(until, "aside", inst.id)

    # Who waits

    def _on_ask(self, event: Parked, now: float, out: Out) -> None:
        ask, policy = event.ask, self.policy
        since = now - min(ask.waited_s, policy.wait_bound_max_s)
        earlier = self._forget_waiter(ask.client)
        if earlier is not None:
            if earlier.poll is not None:
                out.append(Deliver(ask.client, earlier.poll, earlier.ask.instance_key, matching.replaced(earlier, now)))
            if earlier.ask.instance_key == ask.instance_key:
                since = min(since, earlier.since)
        self.give_back(ask.client, now, out)
        if len(self.pool_of_waiter) >= policy.max_waiting or self._too_many_keys(ask.instance_key):
            out.append(Deliver(ask.client, event.poll, ask.instance_key, FallBack("planner_full", now - since)))
            return
        pool = self.pool(ask.instance_key)
        if pool.identity is None:
            pool.identity = ask.identity
        bound_at = since + matching.bound_s(ask, policy)
        poll_ends_at = min(now + min(ask.wait_s, policy.poll_max_s), max(bound_at, now))
        waiter = Waiter(ask, since, bound_at, event.poll, poll_ends_at, poll_ends_at + policy.keep_place_s)
        pool.enqueue(waiter)
        self.pool_of_waiter[ask.client] = pool.key
        self.match(pool, now, out)
        if waiter.poll is not None:
            if poll_ends_at <= now:
                self._end_poll(pool, waiter, now, out)
            else:
                self._deadlines.add(poll_ends_at, "poll", ask.client)

    def match(self, pool: Pool, now: float, out: Out) -> None:
        """Answer everyone in the queue who can be answered, first come first served."""
        for waiter, answer in matching.decide_all(self, pool, now, out):
            poll = waiter.poll
            self._forget_waiter(waiter.ask.client)
            waiter.poll = None
            if isinstance(answer, ReadDisk):
                self._deadlines.add(pool.claims[waiter.ask.client], "claim", pool.key, waiter.ask.client)
            if poll is not None:
                out.append(Deliver(waiter.ask.client, poll, pool.key, answer))

    def _end_poll(self, pool: Pool, waiter: Waiter, now: float, out: Out) -> None:
        """The ask was open long enough: say what it waits for, or that the bound is passed."""
        poll = waiter.poll
        if poll is None:
            return
        if now >= waiter.bound_at:
            self._forget_waiter(waiter.ask.client)
            answer: Answer = matching.gives_up(self, pool, waiter, "bound", now)
            out.append(
                Note(kind="gave_up", client=waiter.ask.client, instance_key=pool.key, text="the wait bound is passed")
            )
        else:
            answer = matching.waits(self, pool, waiter, now)
            pool.leave_queue(waiter)
            self._deadlines.add(waiter.place_kept_until, "place", waiter.ask.client)
        out.append(Deliver(waiter.ask.client, poll, pool.key, answer))

    def _on_hangup(self, event: Hangup, now: float, out: Out) -> None:
        pool = self.pools.get(self.pool_of_waiter.get(event.client, ""))
        waiter = pool.waiters.get(event.client) if pool else None
        if pool is not None and waiter is not None and waiter.poll == event.poll:
            pool.leave_queue(waiter)
            self._deadlines.add(now + self.policy.keep_place_s, "place", event.client)
            waiter.place_kept_until = now + self.policy.keep_place_s

    def _leave(self, client: str, now: float, out: Out) -> None:
        key = self.pool_of_waiter.get(client, "")
        waiter = self._forget_waiter(client)
        if waiter is not None and waiter.poll is not None:
            out.append(Deliver(client, waiter.poll, key, FallBack("left", now - waiter.since)))
        self._pull_is_over(client, now, out)

    # Who may read the disk

    def _on_claimed(self, event: Claimed, now: float, out: Out) -> None:
        """Another planner granted it at `now`. Told again later, it takes back neither a renewal nor an end."""
        inst = self.instances.get(event.client)
        if inst is not None and inst.beat.state is not InstanceState.STARTING:
            return
        claims = self.pool(event.instance_key).claims
        claims[event.client] = until = max(now + self.policy.claim_ttl_s, claims.get(event.client, 0.0))
        self._deadlines.add(until, "claim", event.instance_key, event.client)

    def _on_claim_lost(self, event: ClaimLost, now: float, out: Out) -> None:
        pool = self.pool(event.instance_key)
        pool.claims.pop(event.client, None)
        for holder, ttl_s in event.holders.items():
            until = max(now + ttl_s, pool.claims.get(holder, 0.0))
            pool.claims[holder] = until
            self._deadlines.add(until, "claim", event.instance_key, holder)
        self._perhaps_empty.add(event.instance_key)

    def _renew_claim(self, inst: Instance, beat: Heartbeat) -> None:
        """A heartbeat in STARTING renews its instance's claim, and brings it back where this planner knew none."""
        pool = self.pool(beat.instance_key)
        if beat.state is InstanceState.STARTING and (beat.reads_disk or inst.id in pool.claims):
            until = inst.seen_at + self.policy.claim_ttl_s
            if inst.id not in pool.claims:
                self._deadlines.add(until, "claim", pool.key, inst.id)
            pool.claims[inst.id] = until

    def _end_claim(self, key: str, client: str, out: Out) -> None:
        pool = self.pools.get(key)
        if pool is not None and pool.claims.pop(client, None) is not None:
            self._perhaps_empty.add(key)
            out.append(ClaimOver(key, client))

    # Time

    def _on_tick(self, event: Tick, now: float, out: Out) -> None:
        for kind, name, other in self._deadlines.due(now):
            getattr(self, f"_{kind}_due")(name, other, now, out)
        for key in set(self.pool_of_waiter.values()):
            self._match_key(key, now, out)

    def _instance_due(self, name: str, _: str, now: float, out: Out) -> None:
        inst = self.instances.get(name)
        if inst is None:
            return
        if inst.expires_at > now:
            self._deadlines.add(inst.expires_at, "instance", name)
        else:
            self._remove(inst, now, f"no heartbeat for {now - inst.seen_at:.0f} s", out, tombstone=False)

    def _use_due(self, name: str, client: str, now: float, out: Out) -> None:
        inst = self.instances.get(name)
        if inst is not None and client in inst.uses and inst.uses[client].until <= now:
            inst.tell(now, f"{client} let its lease or reservation end")
            self._release(inst, client, now, out)

    def _aside_due(self, name: str, _: str, now: float, out: Out) -> None:
        inst = self.instances.get(name)
        if inst is not None and inst.aside_until <= now:
            self.unshelve(inst)
            self._match_all(inst, now, out)

    def _claim_due(self, key: str, client: str, now: float, out: Out) -> None:
        until = self.pools[key].claims.get(client) if key in self.pools else None
        if until is None:
            return
        if until > now:
            self._deadlines.add(until, "claim", key, client)
        else:
            out.append(
                Note(kind="claim_expired", client=client, instance_key=key, text="no sign of life from its holder")
            )
            self._end_claim(key, client, out)
            self._match_key(key, now, out)

    def _poll_due(self, client: str, _: str, now: float, out: Out) -> None:
        pool = self.pools.get(self.pool_of_waiter.get(client, ""))
        waiter = pool.waiters.get(client) if pool else None
        if pool is not None and waiter is not None and waiter.poll_ends_at <= now:
            self._end_poll(pool, waiter, now, out)

    def _place_due(self, client: str, _: str, now: float, out: Out) -> None:
        pool = self.pools.get(self.pool_of_waiter.get(client, ""))
        waiter = pool.waiters.get(client) if pool else None
        if pool is not None and waiter is not None and waiter.poll is None and waiter.place_kept_until <= now:
            self._forget_waiter(client)

    def _gone_due(self, name: str, _: str, now: float, out: Out) -> None:
        self._gone.pop(name, None)

    def _suspect_due(self, client: str, _: str, now: float, out: Out) -> None:
        self._failed_seeds.pop(client, None)

    def _match_all(self, inst: Instance, now: float, out: Out) -> None:
        """Put an instance that was taken off the shelf back, and see whom it can serve."""
        if inst.id in self.instances:
            self.shelve(inst, now)
            for key in inst.keys:
                self.match(self.pool(key), now, out)

    def _match_key(self, key: str, now: float, out: Out) -> None:
        pool = self.pools.get(key)
        if pool is not None:
            self.match(pool, now, out)


def _note(kind: str, inst: Instance, text: str = "") -> Note:
    return Note(kind=kind, instance=inst.id, instance_key=inst.beat.instance_key, text=text)
