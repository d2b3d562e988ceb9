"""Keeping an instance registered: heartbeats and reports, from a thread of their own."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable

import msgspec

from rfork.clock import Clock, SystemClock
from rfork.errors import RForkError
from rfork.planner.client import PlannerClient, PlannerRefused
from rfork.wire.planner import Heartbeat, HeartbeatReply, Report

log = logging.getLogger("rfork.planner.heartbeat")

MIN_GAP_S = 0.25
MAX_REPORTS = 256
REPORT_TRIES = 8


class Heartbeater:
    """Keeps one instance registered from a thread of its own, and delivers its reports.

    `describe` gives the instance as it is now, identity included, or None while not every rank answers (then no
    heartbeat goes out, and the entry dies in its time). It is called from the thread and must not block. `on_drain` is
    called once when an operator asks the instance to drain. `instance_id` is who is withdrawn in the end, also where it
    has said nothing yet but holds a claim; without it, who was described last. Nothing here raises into the caller, and
    nothing stops while no planner answers.
    """

    def __init__(
        self,
        planner: PlannerClient,
        describe: Callable[[], Heartbeat | None],
        *,
        on_drain: Callable[[], None] | None = None,
        clock: Clock | None = None,
        instance_id: str = "",
    ) -> None:
        self._planner = planner
        self._describe = describe
        self._instance_id = instance_id
        self._on_drain = on_drain
        self._clock = clock or SystemClock()
        self._wake = threading.Event()
        self._stopped = threading.Event()
        self._reports: deque[tuple[Report, int]] = deque(maxlen=MAX_REPORTS)
        self._seq = 0
        self._send_identity = True
        self._failures = 0
        self._gone = False
        self._leaving = ""
        self._thread: threading.Thread | None = None
        self._beating = threading.Lock()
        self.last_reply: HeartbeatReply | None = None

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="rfork-heartbeat", daemon=True)
        self._thread.start()

    def poke(self) -> None:
        """Something changed (state, generation, leases): tell the planner at once."""
        self._wake.set()

    def report(self, report: Report) -> None:
        """Deliver a report soon; tried again with the heartbeats until it arrives, the oldest are dropped first."""
        self._reports.append((report, 0))
        self._wake.set()

    def leave(self, reason: str) -> None:
        """Withdraw for good, soon, and again until a planner hears it; reports are still delivered."""
        self._leaving = reason
        self._wake.set()

    def stop(self, reason: str = "", *, timeout_s: float = 2.0) -> None:
        """End the thread; with a `reason`, withdraw the instance for good, within `timeout_s` in all or so."""
        self._stopped.set()
        self._wake.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)
        if not reason or self._gone or not self._instance_id:
            return
        try:
            self._planner.withdraw(self._instance_id, reason, timeout_s=timeout_s)
            self._gone = True
        except RForkError as error:
            log.warning("rfork: could not withdraw, the entry dies in its time: %s", error)

    def _run(self) -> None:
        while not self._stopped.is_set():
            self._wake.clear()
            pause_s = self.beat_once()
            self._clock.wait(self._stopped, MIN_GAP_S)
            self._clock.wait(self._wake, pause_s - MIN_GAP_S)

    def beat_once(self) -> float:
        """Send what is due; return how long to pause. For the thread, and for tests that hold the clock."""
        self._deliver_reports()
        with self._beating:
            return self._beat()

    def beat_now(self, timeout_s: float) -> None:
        """Tell from the caller's thread how the instance is, and wait for the answer, `timeout_s` at most or so."""
        deadline = time.monotonic() + timeout_s
        if self._beating.acquire(timeout=timeout_s):
            try:
                self._beat(max(deadline - time.monotonic(), 0.1))
            finally:
                self._beating.release()

    def _beat(self, timeout_s: float | None = None) -> float:
        interval_s = self.last_reply.interval_s if self.last_reply is not None else 2.0
        try:
            if self._leaving and self._instance_id and not self._gone:
                self._planner.withdraw(self._instance_id, self._leaving, timeout_s=timeout_s)
                self._gone = True
            beat = None if self._leaving or self._gone else self._describe()
            if beat is None:
                return interval_s
            self._instance_id = beat.instance_id
            self._seq += 1
            identity = beat.identity if self._send_identity else None
            beat = msgspec.structs.replace(beat, seq=self._seq, identity=identity)
            reply = self._planner.heartbeat(beat, timeout_s=timeout_s)
        except PlannerRefused as error:
            self._gone = error.status == 410
            log.error("rfork: %s", error)
            return interval_s
        except RForkError as error:
            self._failures += 1
            if self._failures in (1, 5) or self._failures % 50 == 0:
                log.warning("rfork: heartbeat failed %d times, this instance serves on: %s", self._failures, error)
            return _spread(min(2.0**self._failures, interval_s, 10.0))
        except Exception:
            log.exception("rfork: could not describe this instance; the next heartbeat tries again")
            return interval_s
        self._took(reply)
        if reply.identity_wanted and identity is None:
            return MIN_GAP_S
        return _spread(reply.interval_s)

    def _took(self, reply: HeartbeatReply) -> None:
        if self._failures:
            log.info("rfork: the planner answers again after %d failed heartbeats", self._failures)
        self._failures = 0
        self._send_identity = reply.identity_wanted
        drain = reply.drain and not (self.last_reply is not None and self.last_reply.drain)
        self.last_reply = reply
        if drain and self._on_drain is not None:
            self._on_drain()

    def _deliver_reports(self) -> None:
        for _ in range(len(self._reports)):
            report, tries = self._reports.popleft()
            try:
                self._planner.report(report)
            except PlannerRefused as error:
                log.warning("rfork: a report was refused and is dropped: %s", error)
            except RForkError as error:
                if tries + 1 < REPORT_TRIES:
                    self._reports.append((report, tries + 1))
                else:
                    log.warning(
                        "rfork: a report could not be delivered in %d tries and is dropped: %s", REPORT_TRIES, error
                    )
                return


def _spread(seconds: float) -> float:
    return seconds * random.uniform(0.9, 1.0)
