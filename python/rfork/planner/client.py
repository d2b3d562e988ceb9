"""What instances and operators use to talk to a planner: blocking, a deadline on every call, safe between threads."""

from __future__ import annotations

import base64
import logging
import random
import threading
import time
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from rfork import config_values
from rfork.auth import PLANNER, Signer
from rfork.client.calls import Caller, Headers, Reply
from rfork.clock import Clock, SystemClock
from rfork.errors import ConfigError, RForkError, SeedError
from rfork.tls import Tls
from rfork.wire.planner import (
    PREFIX,
    Answer,
    Ask,
    Events,
    FallBack,
    ForkFrom,
    Heartbeat,
    HeartbeatReply,
    Instances,
    InstanceStory,
    Leases,
    Overview,
    Problem,
    ReadDisk,
    Report,
    Wait,
)

log = logging.getLogger("rfork.planner.client")

CALL_S = 5.0
POLL_S = 10.0
MAX_REPLY_NBYTES = 64 << 20
ANSWER: Any = Answer
MIN_GAP_S = 0.25
MAX_REPORTS = 256
REPORT_TRIES = 8

T = TypeVar("T")


class PlannerUnavailable(RForkError):
    """No planner answered in time. Consequence: the next source of seeds; serving instances go on."""

    reason = "planner_unavailable"


class PlannerRefused(RForkError):
    """A planner answered no. `status` and `code` are its own; the message is for people."""

    reason = "planner_refused"

    def __init__(self, status: int, problem: Problem) -> None:
        story = "".join(f"\n  {line}" for line in problem.story)
        super().__init__(f"the planner refused ({problem.code}): {problem.message}{story}")
        self.status = status
        self.code = problem.code


class PlannerClient:
    """Calls a planner; with several addresses, the next one when one does not answer. `urls` has no passwords.

    `signer` proves the fleet key, and then only answers that prove it count. Environment proxies are not used: planners
    are in the cluster. Connections are kept, one for each call that is under way at a time.
    """

    def __init__(
        self,
        urls: str | Sequence[str],
        *,
        timeout_s: float = CALL_S,
        signer: Signer | None = None,
        tls: Tls | None = None,
    ) -> None:
        try:
            listed = config_values.urls(urls if isinstance(urls, str) else [*urls]).split(",")
        except config_values.Invalid as error:
            raise ConfigError(f"planner_url: expected {error}, got {config_values.shown(urls)}") from None
        self._headers = dict(map(_without_auth, listed))
        self.urls = tuple(self._headers)
        self.timeout_s = timeout_s
        self._signer, self._tls = signer, tls
        self._free = {url: deque([self._caller(url)]) for url in self.urls}

    def close(self) -> None:
        for callers in self._free.values():
            while callers:
                callers.pop().close()

    def _caller(self, url: str) -> Caller:
        return Caller(url, tls=self._tls, headers=self._headers[url], signer=self._signer, audience=PLANNER)

    def heartbeat(self, beat: Heartbeat, *, timeout_s: float | None = None) -> HeartbeatReply:
        path = f"{PREFIX}/instances/{quote(beat.instance_id, safe='')}"
        return self._call("PUT", path, HeartbeatReply, beat, timeout_s=timeout_s)

    def withdraw(self, instance_id: str, reason: str = "withdrawn", *, timeout_s: float | None = None) -> None:
        """Take the instance off for good. Idempotent."""
        path = f"{PREFIX}/instances/{quote(instance_id, safe='')}?reason={quote(reason[:200], safe='')}"
        self._call("DELETE", path, None, timeout_s=timeout_s)

    def drain(self, instance_id: str) -> None:
        """Ask the instance to drain; it hears of it within one heartbeat."""
        self._call("POST", f"{PREFIX}/instances/{quote(instance_id, safe='')}/drain", None)

    def ask(self, ask: Ask) -> Answer:
        """One ask, held open by the planner up to `ask.wait_s`."""
        answer: Answer = self._call("POST", f"{PREFIX}/asks", ANSWER, ask, timeout_s=ask.wait_s + self.timeout_s)
        return answer

    def report(self, report: Report) -> None:
        self._call("POST", f"{PREFIX}/reports", None, report)

    def instances(self, *, key: str = "", state: str = "") -> Instances:
        return self._call("GET", f"{PREFIX}/instances?key={quote(key)}&state={quote(state)}", Instances)

    def story(self, instance_id: str) -> InstanceStory:
        return self._call("GET", f"{PREFIX}/instances/{quote(instance_id, safe='')}", InstanceStory)

    def leases(self) -> Leases:
        return self._call("GET", f"{PREFIX}/leases", Leases)

    def events(self, after: int = 0, wait_s: float = 0.0) -> Events:
        path = f"{PREFIX}/events?after={after}&wait_s={wait_s:g}"
        return self._call("GET", path, Events, timeout_s=wait_s + self.timeout_s)

    def overview(self) -> Overview:
        return self._call("GET", f"{PREFIX}/overview", Overview)

    def _call(
        self, method: str, path: str, reply: type[T] | None, body: object = None, *, timeout_s: float | None = None
    ) -> T:
        """Try each address once. Raises PlannerUnavailable or PlannerRefused."""
        data = b"" if body is None else msgspec.json.encode(body)
        what, said = "no planner answers", list[str]()
        for url in self.urls:
            try:
                answer = self._ask_one(url, method, path, data, timeout_s or self.timeout_s)
                if answer.status >= 500:
                    said.append(f"{url}: HTTP {answer.status}")
                    continue
                if answer.status >= 300:
                    raise PlannerRefused(answer.status, _problem(answer.body))
                return msgspec.json.decode(answer.body, type=reply) if reply is not None else None  # type: ignore[return-value]
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                said.append(f"{url}: {type(error).__name__} {error}")
            except (SeedError, ConfigError) as error:
                if error.reason in ("unproven", "unauthorized"):
                    what = "no planner proves the fleet key"
                said.append(str(error))
        raise PlannerUnavailable(f"{what}: {'; '.join(said)}")

    def _ask_one(self, url: str, method: str, path: str, data: bytes, timeout_s: float) -> Reply:
        free = self._free[url]
        try:
            caller = free.pop()
        except IndexError:
            caller = self._caller(url)
        try:
            return caller.call(method, path, timeout_s=timeout_s, limit=MAX_REPLY_NBYTES, body=data)
        finally:
            free.append(caller)


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


def _without_auth(url: str) -> tuple[str, Headers | None]:
    """The address, which errors and logs show, and apart from it what it says about who asks."""
    parts = urlsplit(url)
    user, at, netloc = parts.netloc.rpartition("@")
    if not at:
        return url, None
    name, _, password = user.partition(":")
    proof = base64.b64encode(f"{unquote(name)}:{unquote(password)}".encode()).decode()
    return urlunsplit(parts._replace(netloc=netloc)), lambda method, path, body: {"Authorization": f"Basic {proof}"}


def _problem(data: bytes) -> Problem:
    try:
        return msgspec.json.decode(data, type=Problem)
    except msgspec.MsgspecError:
        return Problem("unknown", "an answer that is not the planner's; is planner_url right?")
