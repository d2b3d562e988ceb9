"""What both services do about tickets, as ASGI: where a request's target is, and the proof on its answer.

An app sets `scope[VERDICT]` once its guard has looked at a request; everything else is done around it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from typing import Any

from rfork.auth import PROOF_HEADER, TICKET_HEADER, Guard, Verdict

VERDICT = "rfork.verdict"
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


def admit(guard: Guard, scope: Scope, headers: Mapping[str, str], body: bytes) -> Verdict:
    """Let the guard look at a request, and remember what it says."""
    ticket = headers.get(TICKET_HEADER, "") or headers.get("authorization", "")
    verdict = scope[VERDICT] = guard.admit(ticket, str(scope["method"]), target_of(scope), body)
    return verdict


def target_of(scope: Scope) -> str:
    """Path and query as they came, without the prefix under which a server may be mounted."""
    path: bytes = scope.get("raw_path") or scope["path"].encode()
    root: bytes = scope.get("root_path", "").encode()
    query: bytes = scope.get("query_string", b"")
    return (path.removeprefix(root) + (b"?" + query if query else b"")).decode("latin-1")


def proof_headers(guard: Guard | None, verdict: Verdict | None, status: int, body: bytes) -> dict[str, str]:
    """For an app that is not ours, which can't be wrapped: the headers of one answer."""
    proof = guard.proof(verdict, status, hashlib.sha256(body).hexdigest()) if guard and verdict else None
    return {PROOF_HEADER: proof} if proof else {}


class Proving:
    """Puts a proof on the answer to every genuine ticket. Goes around the whole app, errors included."""

    def __init__(self, app: App, guard: Guard) -> None:
        self._app = app
        self._guard = guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        start: MutableMapping[str, Any] | None = None

        async def proving(message: MutableMapping[str, Any]) -> None:
            nonlocal start
            if message["type"] == "http.response.start":
                start = message  # held back until the body is there, which is at once
                return
            if start is not None:
                verdict: Verdict | None = scope.get(VERDICT)
                if verdict is not None and not message.get("more_body"):
                    self._add(start, verdict, message.get("body", b""))
                await send(start)
                start = None
            await send(message)

        await self._app(scope, receive, proving)

    def _add(self, start: MutableMapping[str, Any], verdict: Verdict, body: bytes) -> None:
        headers = list(start.get("headers", ()))
        named = {bytes(name).lower(): bytes(value) for name, value in headers}
        if named.get(b"content-encoding"):
            digest = named.get(b"etag", b"").decode().strip('"')  # of what it unpacks to
        else:
            digest = hashlib.sha256(body).hexdigest()
        proof = self._guard.proof(verdict, start["status"], digest)
        if proof is not None:
            start["headers"] = [*headers, (PROOF_HEADER.encode(), proof.encode())]
