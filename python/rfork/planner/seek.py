"""Asking a planner until there is something to do: how a client waits, and what it says meanwhile."""

from __future__ import annotations

import logging
import random
import threading
import zlib

import msgspec

from rfork.clock import Clock, SystemClock
from rfork.planner.client import PlannerClient, PlannerUnavailable
from rfork.wire.planner import Ask, FallBack, ForkFrom, ReadDisk, Wait

log = logging.getLogger("rfork.planner.seek")

POLL_S = 10.0


def seek(
    planner: PlannerClient,
    ask: Ask,
    *,
    bound_s: float = 0.0,
    outage_s: float = 20.0,
    poll_s: float = 0.0,
    clock: Clock | None = None,
    cancelled: threading.Event | None = None,
) -> ForkFrom | ReadDisk | FallBack:
    """Ask until there is something to do, saying every `poll_s` (0: POLL_S) for whom, how long and until when.

    `bound_s` bounds the whole wait here too, whatever the planner says, and counts what `ask.waited_s` has waited
    before (0: the planner's own bound). Raises PlannerUnavailable when no planner has answered for `outage_s`: then
    other sources of seeds come first, and `storage_jitter_s` before the disk.
    """
    clock = clock or SystemClock()
    cancelled = cancelled or threading.Event()
    poll_s = poll_s or POLL_S
    answered = clock.now()
    began, said = answered - ask.waited_s, answered - poll_s
    while True:
        now = clock.now()
        waited_s = now - began
        left_s = bound_s - waited_s if bound_s else poll_s
        if left_s <= 0 or cancelled.is_set():
            return FallBack("cancelled" if cancelled.is_set() else "bound", waited_s)
        question = msgspec.structs.replace(
            ask, wait_s=min(poll_s, left_s), waited_s=waited_s, bound_s=bound_s or ask.bound_s
        )
        try:
            answer = planner.ask(question)
        except PlannerUnavailable as error:
            if clock.now() - answered >= outage_s:
                raise
            left_s = outage_s - (clock.now() - answered)
            log.warning("rfork: asking again for %.0f s more: %s", left_s, error)
            clock.wait(cancelled, random.uniform(0.5, 1.5))
            continue
        answered = clock.now()
        if isinstance(answer, ForkFrom | ReadDisk | FallBack):
            return answer
        if answer.reason == "replaced":  # another replica of this instance asks too: both are told, in turns
            clock.wait(cancelled, random.uniform(0.2, 0.5) * poll_s)
            continue
        if answered - said >= 0.9 * poll_s:
            said = answered
            log.info("%s", waiting_line(answer, bound_s))
        if answered - now < min(1.0, poll_s / 2):
            clock.wait(cancelled, random.uniform(0.5, 1.5))


def waiting_line(wait: Wait, bound_s: float = 0.0) -> str:
    """For whom, how long, and until when; `bound_s` is the client's own bound (0: the planner's alone)."""
    whom = ", ".join(wait.waiting_for) or "a seed"
    most_s = min(wait.bound_s, bound_s) if bound_s else wait.bound_s
    return (
        f"rfork: waiting for {whom} ({wait.reason}): {wait.waited_s:.0f} s of at most {most_s:.0f} s, "
        f"{wait.position} ahead"
    )


def storage_jitter_s(instance_id: str, window_s: float) -> float:
    """How long this instance waits before it reads the disk without a claim, so that no fleet reads it at once."""
    return window_s * zlib.crc32(instance_id.encode()) / 0xFFFFFFFF
