"""What both HTTP services grant a stranger's connection: so long, so many, so much. The rest is uvicorn's.

Sockets are accepted here and not in uvicorn, which would wait a minute for a TLS handshake, for ever for the rest of a
request, and take descriptors until the process has none. What a client owes is read off its connection once in a while,
so that it costs a request nothing. A connection that is idle between two requests is closed by uvicorn's own time-out;
one that waits for its answer owes nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import uvicorn
from uvicorn.protocols.http.auto import AutoHTTPProtocol

logger = logging.getLogger("rfork.http")

MAX_REQUEST_NBYTES = 8 << 20
"""Of one request with all that comes before the next one's head is whole; the apps have smaller bounds for bodies."""

SAID_EVERY_S = 60.0
_ACCEPT_AGAIN_S = 1.0
_ACCEPTS_AT_ONCE = 64
_START_FAILED = 3
_GOODBYE_S = 1.0


class Patience(NamedTuple):
    """Bounds on connections. A tenth of `head_s`, at most a second, may pass before one is noticed."""

    max_connections: int
    head_s: float = 10.0
    """For a handshake, and for the whole head of a request: from the connect, or from the first byte of a later one."""
    body_s: float = 15.0
    """For the body after it. The apps answer 400 after 10 s."""
    unread_s: float = 60.0
    """For taking any more of an answer."""
    reserve: float = 0.25
    """Share of the process's descriptors that is left to others."""


LISTENER = Patience(max_connections=1024)
PLANNER = Patience(max_connections=16384)


def run(config: uvicorn.Config, patience: Patience, *, let_go: Callable[[], None]) -> None:
    """Serve on the config's host and port until a signal, as `uvicorn.run` does.

    `let_go` is called first then: it makes answers that are held back come now, as the server waits for all of them.
    """
    server = Server(config, patience, let_go)
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[config.bind_socket()])
    if not server.started:
        sys.exit(_START_FAILED)


class Server(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, on bound sockets that it is given, with bounds."""

    def __init__(self, config: uvicorn.Config, patience: Patience, let_go: Callable[[], None] = lambda: None) -> None:
        super().__init__(config)
        self._let_go = let_go
        self._patience = patience
        self._arriving: set[asyncio.Task[None]] = set()
        self._owing: dict[Any, tuple[_Debt, float]] = {}
        self._next_look: asyncio.TimerHandle | None = None
        self._say_full, self._say_out, self._say_slow = _Seldom(), _Seldom(), _Seldom()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        sockets = sockets or []
        for sock in sockets:
            sock.setblocking(False)
            sock.listen(self.config.backlog)
        await super().startup(sockets=[])
        for sock in sockets:
            self._listen(sock)
        self._look()

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._next_look is not None:
            self._next_look.cancel()
        for sock in sockets or []:
            asyncio.get_running_loop().remove_reader(sock)
        for task in self._arriving:
            task.cancel()
        self._let_go()
        for connection in tuple(self.server_state.connections):
            if _is_idle(connection):  # over TLS uvicorn would wait for a goodbye, and nobody there is listening
                connection.transport.close()  # what was said last goes out first
                asyncio.get_running_loop().call_later(_GOODBYE_S, connection.transport.abort)
        await super().shutdown(sockets=sockets)

    def _listen(self, sock: socket.socket) -> None:
        if sock.fileno() >= 0:
            asyncio.get_running_loop().add_reader(sock, self._accept, sock)

    def _accept(self, sock: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                connection, _ = sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._say_out(logging.ERROR, "can't accept connections: %s (%d times)", error.strerror)
                # Whoever knocks goes on waiting, and the socket would wake us for it all the time.
                loop.remove_reader(sock)
                loop.call_later(_ACCEPT_AGAIN_S, self._listen, sock)
                return
            why = self._full(connection)
            if why:
                connection.close()
                self._say_full(logging.WARNING, "no room for a connection: %s (%d closed)", why)
                continue
            connection.setblocking(False)
            task = loop.create_task(self._begin(connection))
            self._arriving.add(task)
            task.add_done_callback(self._arriving.discard)

    def _full(self, newest: socket.socket) -> str:
        """Why there is no room, or nothing. A descriptor is the lowest free number, so it tells how many are in use."""
        limit = self._patience.max_connections
        if len(self.server_state.connections) + len(self._arriving) >= limit:
            return f"{limit} are open"
        descriptors, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if descriptors != resource.RLIM_INFINITY and newest.fileno() >= descriptors * (1 - self._patience.reserve):
            return f"the process uses {newest.fileno()} of its {descriptors} descriptors (ulimit -n)"
        return ""

    async def _begin(self, connection: socket.socket) -> None:
        tls = {"ssl": self.config.ssl, "ssl_handshake_timeout": self._patience.head_s} if self.config.ssl else {}
        with contextlib.suppress(OSError):  # its TLS is broken or takes too long, or it is gone
            await asyncio.get_running_loop().connect_accepted_socket(self._protocol, connection, **tls)

    def _protocol(self) -> _Protocol:
        return _Protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def _look(self) -> None:
        """Close whatever has owed the same for too long."""
        loop, now, owing = asyncio.get_running_loop(), time.monotonic(), {}
        self._next_look = loop.call_later(min(self._patience.head_s / 10, 1.0), self._look)
        for connection in tuple(self.server_state.connections):
            debt = _debt(connection)
            if debt is None:
                continue
            before = self._owing.get(connection)
            since = before[1] if before is not None and before[0] == debt else now
            bound_s = getattr(self._patience, debt.bound)
            if now - since >= bound_s:
                connection.transport.abort()
                self._say_slow(logging.INFO, "a connection owed us for %g s (%s; %d closed)", bound_s, debt.bound)
            else:
                owing[connection] = debt, since
        self._owing = owing


class _Debt(NamedTuple):
    """What a client owes: of which bound, and for which request, or how much."""

    bound: str
    what: tuple[Any, ...]


def _debt(connection: Any) -> _Debt | None:
    """`cycle` is the last request whose head was whole. uvicorn's timer runs from its answer until the next byte."""
    cycle = connection.cycle
    unread = connection.transport.get_write_buffer_size()
    if unread:
        return _Debt("unread_s", (cycle, unread))
    if cycle is not None and cycle.more_body:
        return _Debt("body_s", (cycle,))
    if cycle is None or (cycle.response_complete and connection.timeout_keep_alive_task is None):
        return _Debt("head_s", (cycle,))
    return None


def _is_idle(connection: Any) -> bool:
    """Between two requests, with nothing left to send."""
    is_answered = connection.cycle is None or connection.cycle.response_complete
    return bool(is_answered) and not connection.transport.get_write_buffer_size()


class _Protocol(AutoHTTPProtocol):  # type: ignore[misc]
    """uvicorn's, which bounds a head in one of its two parsers only."""

    _cycle: Any = None
    _nbytes = 0

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not self._cycle:
            self._cycle, self._nbytes = self.cycle, 0
        self._nbytes += len(data)
        if self._nbytes > MAX_REQUEST_NBYTES:
            self.transport.abort()


class _Seldom:
    """Logs the same once a minute at most, with how often it was since; the last of the values is that number."""

    def __init__(self) -> None:
        self._count = 0
        self._next = 0.0

    def __call__(self, level: int, message: str, *values: object) -> None:
        self._count += 1
        if time.monotonic() >= self._next:
            logger.log(level, message, *values, self._count)
            self._count, self._next = 0, time.monotonic() + SAID_EVERY_S
