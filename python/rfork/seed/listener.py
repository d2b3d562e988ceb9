"""rfork's own HTTP listener: one for each node's main process, in a thread with an event loop of its own."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from rfork.config import Config
from rfork.errors import ConfigError
from rfork.tls import Certificate
from rfork.transports.addresses import advertise_host, is_wildcard
from rfork.transports.mooncake_host import bracketed

START_TIMEOUT_S = 15.0
_BACKLOG = 512
_IDLE_CONNECTION_S = 15


def bind(config: Config, host: str) -> socket.socket:
    """A bound socket: `listen` if given, else of `port_range`, else any free port. Raises ConfigError naming it."""
    listen_host, port = config.listen or (None, 0)
    host = listen_host or host
    ports = [port] if port or not config.port_range else list(range(config.port_range[0], config.port_range[1] + 1))
    problem: OSError | None = None
    for candidate in ports:
        try:
            return _bind(host, candidate)
        except OSError as error:
            problem = error
    tried = str(ports[0]) if len(ports) == 1 else f"{ports[0]}-{ports[-1]}"
    raise ConfigError(f"listen, port_range: can't bind {host} port {tried}: {problem and problem.strerror}")


def _bind(host: str, port: int) -> socket.socket:
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    sock = socket.socket(family, kind, proto)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6 and is_wildcard(str(address[0])):
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        sock.bind(address)
    except BaseException:
        sock.close()
        raise
    return sock


def advertised(sock: socket.socket, explicit: str | None, *, scheme: str = "http") -> str:
    """URL under which others reach the listener: the host given, else the one it is bound to, else a routable one."""
    host, port = sock.getsockname()[:2]
    if explicit or is_wildcard(host):
        host = advertise_host(explicit, family=None if explicit else sock.family)
    return f"{scheme}://{bracketed(host)}:{port}"


class Listener:
    """Serves an ASGI app on a bound socket until `stop()`."""

    def __init__(
        self, app: Callable[..., Any], sock: socket.socket, url: str, *, certificate: Certificate | None = None
    ) -> None:
        # SGLang imports uvicorn anyway; the command line may run without it.
        import uvicorn

        from rfork import patience

        self.url = url
        self.host = str(sock.getsockname()[0])
        self._socket = sock
        config = uvicorn.Config(
            app,
            access_log=False,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            server_header=False,
            timeout_graceful_shutdown=2,
            timeout_keep_alive=_IDLE_CONNECTION_S,
            backlog=_BACKLOG,
            ssl_certfile=certificate.cert_file if certificate else None,
            ssl_keyfile=certificate.key_file if certificate else None,
        )
        self._server = patience.Server(config, patience.LISTENER)
        self._thread = threading.Thread(target=self._run, name="rfork-listener", daemon=True)
        # A forked child must not keep the port of a parent that is gone.
        os.register_at_fork(after_in_child=self._socket.close)

    def start(self) -> None:
        """Returns when requests are answered. Raises ConfigError if that does not happen in time."""
        self._thread.start()
        deadline = time.monotonic() + START_TIMEOUT_S
        while not self._server.started:
            if not self._thread.is_alive() or time.monotonic() > deadline:
                raise ConfigError(f"listen: rfork's listener at {self.url} did not start")
            time.sleep(0.005)

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(timeout=5)
        self._socket.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._socket])
