"""What instances and operators use to talk to a planner: blocking, a deadline on every call, safe between threads."""

from __future__ import annotations

import base64
from collections import deque
from collections.abc import Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote, urlsplit, urlunsplit

import msgspec

from rfork import config_values
from rfork.auth import PLANNER, Signer
from rfork.client.calls import Caller, Headers, Reply
from rfork.errors import ConfigError, RForkError, SeedError
from rfork.tls import Tls
from rfork.wire.planner import (
    PREFIX,
    Answer,
    Ask,
    Events,
    Heartbeat,
    HeartbeatReply,
    Instances,
    InstanceStory,
    Leases,
    Overview,
    Problem,
    Report,
)

CALL_S = 5.0
MAX_REPLY_NBYTES = 64 << 20
ANSWER: Any = Answer

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
        self._answered = self.urls[0]
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
        """Try each address once, the one that answered last first. Raises PlannerUnavailable or PlannerRefused."""
        data = b"" if body is None else msgspec.json.encode(body)
        what, said = "no planner answers", list[str]()
        for url in sorted(self.urls, key=lambda url: url != self._answered):
            try:
                answer = self._ask_one(url, method, path, data, timeout_s or self.timeout_s)
                if answer.status >= 500:
                    said.append(f"{url}: HTTP {answer.status}")
                    continue
                self._answered = url
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
