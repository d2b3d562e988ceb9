"""Several HTTP workers (--tokenizer-worker-num): what the main process does, as it serves no HTTP itself then.

SGLang's workers are processes of their own that load no plugins. They import `http_worker` instead of its application,
and hand R-Fork's end-points on to this process over a socket in a private folder.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from typing import Any

import httpx
from fastapi import FastAPI

from rfork.guarded import App, Receive, Scope, Send
from rfork.seed.listener import Listener
from rfork.seed.node import NodeService
from sglang_rfork.srt.compat import Release
from sglang_rfork.srt.entrypoints import engine

SOCKET_ENV = "_RFORK_HTTP_SOCKET"
"""Names the socket to the workers."""

CALLER_HEADER = "rfork-caller"
"""Where a worker says who called it; from anybody else it is not passed on."""

APP_PATH = "sglang_rfork.srt.entrypoints.http_worker:app"
STOCK_APP_PATH = "sglang.srt.entrypoints.http_server:app"
HEALTH_POLL_S = 1.0
HEALTH_TIMEOUT_S = 30.0


@contextlib.contextmanager
def handed_on(release: Release, node: NodeService, install: Callable[[Any, NodeService], None]) -> Iterator[None]:
    """Serve R-Fork's end-points to the workers that SGLang starts inside this block."""
    with contextlib.ExitStack() as stack:
        folder = tempfile.mkdtemp(prefix="rfork-")
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        path = os.path.join(folder, "http")
        sock = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        sock.bind(path)
        app = FastAPI(openapi_url=None)
        install(app, node)
        listener = Listener(_with_callers(app), sock, path)
        stack.callback(listener.stop)
        listener.start()
        os.environ[SOCKET_ENV] = path
        stack.callback(os.environ.pop, SOCKET_ENV, None)
        with _worker_app(release):
            yield


def _with_callers(app: App) -> App:
    """`app`, for which a request comes from where a worker says."""

    async def told(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            caller = dict(scope["headers"]).get(CALLER_HEADER.encode(), b"").decode("latin-1")
            scope["client"] = (caller, 0) if caller else None
        await app(scope, receive, send)

    return told


@contextlib.contextmanager
def _worker_app(release: Release) -> Iterator[None]:
    """Have uvicorn's workers import our module, by SGLang's own setting where it has one; one that a user set stays."""
    if release.find("http.worker_app"):
        os.environ.setdefault("SGLANG_HTTP_SERVER_APP_PATH", APP_PATH)
        yield
        return
    import uvicorn

    run = uvicorn.run

    def run_ours(app: Any, *args: Any, **kwargs: Any) -> Any:
        return run(APP_PATH if app == STOCK_APP_PATH else app, *args, **kwargs)

    uvicorn.run = run_ours
    try:
        yield
    finally:
        uvicorn.run = run


def announce_when_healthy(server_args: Any, node: NodeService) -> None:
    """Watch the server's health from outside, and become a seed once it has it. Returns at once."""
    url = f"{server_args.url()}/health"

    def watch() -> None:
        # The certificate names what clients call this host, not the loopback address that is asked here.
        with httpx.Client(trust_env=False, verify=False, timeout=HEALTH_TIMEOUT_S) as http:
            while engine.running_node() is node:
                with contextlib.suppress(httpx.HTTPError):
                    if http.get(url).status_code == 200:
                        engine.announce_ready(node)
                        return
                threading.Event().wait(HEALTH_POLL_S)

    threading.Thread(target=watch, name="rfork-health", daemon=True).start()
