"""The shell around the core: gives it time, holds asks open, tells the other planners. One event loop, no locks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import count
from typing import Any

import msgspec

from rfork.clock import Clock
from rfork.planner import matching
from rfork.planner.events import (
    Claimed,
    ClaimLost,
    ClaimOver,
    Deliver,
    Drain,
    Effect,
    Event,
    Hangup,
    Legacy,
    Note,
    Parked,
    Reported,
    Seen,
    Share,
    Shared,
    Tick,
    Withdraw,
)
from rfork.planner.lifecycle import PlannerError
from rfork.planner.policy import Policy
from rfork.planner.state import PlannerState
from rfork.planner.store import MemoryStore, Store
from rfork.planner.store.base import end_tasks
from rfork.wire.planner import Answer, Ask, Events, Heartbeat, HeartbeatReply, ReadDisk, Report, Wait
from rfork.wire.planner import Event as EventLine

log = logging.getLogger("rfork.planner")

TICK_S = 0.25
CLAIM_GAP_S = 0.1
"""Between two tries to get a claim that this planner thinks free and the store does not."""
NUM_EVENTS = 1_000
FRESH_S = 5.0
"""Reservations and reports of others that are older are history: heartbeats told since what came of them."""
STOPS = Wait("planner_stops", [], 0.0, 0.0, 0)
QUIET = frozenset({"assigned", "registered", "report_loaded", "report_refused"})


class PlannerService:
    """One planner. `start` before the first request, `stop` after the last."""

    def __init__(self, policy: Policy, clock: Clock, store: Store | None = None) -> None:
        self.policy = policy
        self.clock = clock
        self.store: Store = store or MemoryStore()
        self.name = "p-" + secrets.token_hex(6)
        self.state = PlannerState(policy, clock.now())
        self.on_note: Callable[[Note], None] = lambda note: None
        self.on_shared: Callable[[Shared, float], bool] = lambda event, age_s: False
        self._events: deque[tuple[int, float, Note]] = deque(maxlen=NUM_EVENTS)
        self._next_event = 1
        self._news = asyncio.Event()
        self._polls = count()
        self._open: dict[int, asyncio.Future[Answer]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._releases: set[asyncio.Task[None]] = set()
        self._stops = False
        self.running = False

    async def start(self) -> None:
        self.state.started_at = self.clock.now()
        await self.store.start(self.name, self._from_others)
        self._spawn(self._tick_for_ever())
        self.running = True

    def let_go(self) -> None:
        """Answer all that is held open, and hold nothing any more: a server that ends waits for its answers first."""
        self._stops = True
        self._news.set()
        for future in self._open.values():
            if not future.done():
                future.set_result(STOPS)

    async def stop(self) -> None:
        self.running = False
        self.let_go()
        await end_tasks(self._tasks)
        await self.store.stop()

    # What the protocol offers

    def heartbeat(self, beat: Heartbeat) -> HeartbeatReply:
        self._run(beat)
        self.store.share(Seen(beat))
        inst = self.state.instances.get(beat.instance_id)
        pool = self.state.pools.get(beat.instance_key)
        if pool is not None and beat.instance_id in pool.claims:
            self._spawn(self._hold_claim(beat))
        return HeartbeatReply(
            ttl_s=self.policy.ttl_s,
            interval_s=self.policy.interval_s,
            planner=self.name,
            identity_wanted=not self.state.identity_known(beat.instance_key),
            drain=inst is not None and inst.drain_asked,
        )

    async def _hold_claim(self, beat: Heartbeat) -> None:
        """At the store too: a holder that says so gets back what a store that restarted has forgotten."""
        settle = self.store.claim if beat.reads_disk else self.store.renew
        await settle(beat.instance_key, beat.instance_id, self.policy.claim_ttl_s)
        pool = self.state.pools.get(beat.instance_key)
        if pool is None or beat.instance_id not in pool.claims:  # it ended meanwhile; the release may have come first
            await self.store.release(beat.instance_key, beat.instance_id)

    def withdraw(self, instance_id: str, reason: str) -> None:
        event = Withdraw(instance_id, reason)
        self._run(event)
        self.store.share(event)

    def drain(self, instance_id: str) -> None:
        event = Drain(instance_id)
        self._run(event)
        self.store.share(event)

    def report(self, report: Report) -> None:
        self._run(report)
        self.store.share(Reported(report))

    async def ask(self, ask: Ask, hung_up: Callable[[], Awaitable[None]] | None = None) -> Answer:
        """Answer now or within `wait_s`. `hung_up` returns once the client listens no more."""
        began = self.clock.now()
        wait_s, waited_s = min(ask.wait_s, self.policy.poll_max_s), ask.waited_s
        while True:
            answer = await self._ask_once(ask, hung_up)
            if not isinstance(answer, ReadDisk):
                return answer
            if self._releases:  # a claim that is over here is not yet free there
                await asyncio.wait(self._releases)
            holders = await self.store.claim(ask.instance_key, ask.client, self.policy.claim_ttl_s)
            if ask.client in holders:
                self.store.share(Claimed(ask.instance_key, ask.client))
                return answer
            self._run(ClaimLost(ask.instance_key, ask.client, holders))
            left_s = began + wait_s - self.clock.now()
            if left_s <= 0:
                bound_s = matching.bound_s(ask, self.policy)
                return Wait("claim_held", [*holders][:3], waited_s + wait_s - left_s, bound_s, 0)
            await asyncio.sleep(min(CLAIM_GAP_S, left_s))
            passed_s = self.clock.now() - began
            ask = msgspec.structs.replace(ask, wait_s=max(wait_s - passed_s, 0.0), waited_s=waited_s + passed_s)

    async def _ask_once(self, ask: Ask, hung_up: Callable[[], Awaitable[None]] | None) -> Answer:
        poll = next(self._polls)
        future: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self._open[poll] = future
        watcher: asyncio.Task[None] | None = None
        try:
            self._run(Parked(ask, poll))
            if self._stops:
                self.let_go()
            if not future.done() and hung_up is not None:
                watcher = asyncio.ensure_future(_finish(hung_up))
                waited: set[asyncio.Future[Any]] = {future, watcher}
                await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
                if not future.done():
                    future.set_result(Wait("hung_up", [], 0.0, 0.0, 0))
                    self._run(Hangup(ask.client, poll))
            answer = await future
            if answer is STOPS:
                self._run(Hangup(ask.client, poll))
                bound_s = matching.bound_s(ask, self.policy)
                return msgspec.structs.replace(STOPS, waited_s=ask.waited_s, bound_s=bound_s)
            return answer
        except asyncio.CancelledError:
            self._run(Hangup(ask.client, poll))
            raise
        finally:
            del self._open[poll]
            if watcher is not None:
                watcher.cancel()

    async def events(self, after: int, wait_s: float) -> Events:
        """What happened after event number `after` (0: all that is remembered); waits for news up to `wait_s`."""
        if after >= self._next_event - 1 and not self._stops:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), min(wait_s, self.policy.poll_max_s))
        return Events(self.name, self._next_event - 1, self.lines(after))

    def lines(self, after: int = 0, prefix: str = "", limit: int = NUM_EVENTS) -> list[EventLine]:
        """The last `limit` remembered events after number `after` whose kind starts with `prefix`, oldest first."""
        now = self.clock.now()
        found = [
            EventLine(
                seq=seq,
                age_s=round(now - when, 3),
                kind=note.kind,
                instance=note.instance,
                client=note.client,
                instance_key=note.instance_key,
                text=note.text,
            )
            for seq, when, note in self._events
            if seq > after and note.kind.startswith(prefix)
        ]
        return found[-limit:]

    # Effects

    def _run(self, event: Event, age_s: float = 0.0) -> None:
        now = self.clock.now()
        for effect in self.state.handle(event, now, age_s):
            self._apply(effect, now)

    def _apply(self, effect: Effect, now: float) -> None:
        if isinstance(effect, Deliver):
            future = self._open.get(effect.poll)
            if future is not None and not future.done():
                future.set_result(effect.answer)
        elif isinstance(effect, Share):
            self.store.share(effect.event)
        elif isinstance(effect, ClaimOver):
            release = self._spawn(self.store.release(effect.instance_key, effect.client))
            self._releases.add(release)
            release.add_done_callback(self._releases.discard)
        else:
            self._note(effect, now)

    def _note(self, note: Note, now: float) -> None:
        self._events.append((self._next_event, now, note))
        self._next_event += 1
        self._news.set()
        self._news = asyncio.Event()
        self.on_note(note)
        if note.kind not in QUIET:
            log.info(
                "%s instance=%s client=%s key=%.12s %r",
                note.kind,
                note.instance,
                note.client,
                note.instance_key,
                note.text,
            )

    def _from_others(self, event: Shared, age_s: float) -> None:
        """An event that another planner saw `age_s` ago."""
        if self.on_shared(event, age_s) or isinstance(event, Legacy):
            return
        with contextlib.suppress(PlannerError):  # they have refused it there, or will hear of ours
            if isinstance(event, Seen):
                self._run(event.heartbeat, age_s)
            elif isinstance(event, Claimed):
                self._run(event, age_s)
            elif isinstance(event, Withdraw | Drain):
                self._run(event)
            elif age_s > FRESH_S:
                pass
            elif isinstance(event, Reported):
                self._run(event.report)
            else:
                self._run(event)

    async def _tick_for_ever(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            try:
                self.tick()
            except Exception:
                log.exception("the planner's tick failed; the next one follows")

    def tick(self) -> None:
        """Let what is due happen; called four times a second."""
        self._run(Tick())

    def _spawn(self, work: Awaitable[None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


async def _finish(work: Callable[[], Awaitable[None]]) -> None:
    await work()
