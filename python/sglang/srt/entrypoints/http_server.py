"""SGLang's own port: the stock R-Fork end-points with exact bodies, and `/rfork/v1/status`.

Everything here is answered from memory of this process and never waits for a rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import Request, Response

import rfork
from rfork.seed.app import accepts_gzip
from rfork.seed.door import status_answer
from rfork.seed.node import NodeService
from rfork.seed.stock import stock_reply
from rfork.wire.seed import STATUS_PATH
from sglang_rfork.srt.compat import installed_release
from sglang_rfork.srt.entrypoints import engine, several_workers
from sglang_rfork.srt.entrypoints.collective import install_collective_routes

log = logging.getLogger("rfork")

SIGTERM_POLL_S = 0.2
STOCK_PATHS = ("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info")


def around_run_http_server(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND _setup_and_run_http_server: routes in front, and readers finish before all of it ends."""
    node = engine.running_node()
    if node is None:
        return original(*args, **kwargs)
    from sglang.srt.entrypoints import http_server

    server_args, release = kwargs.get("server_args", args[0] if args else None), installed_release()
    try:
        if int(release.arguments(server_args).tokenizer_worker_num or 1) > 1:
            several_workers.announce_when_healthy(server_args, node)
            with several_workers.handed_on(release, node, install_routes):
                return original(*args, **kwargs)
        install_routes(http_server.app, node)
        drain_with(http_server.app)
        return original(*args, **kwargs)
    finally:
        engine.finish_node()


def around_wait_and_warmup(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND _wait_and_warmup, in its own thread: the instance becomes a seed once SGLang calls itself up."""
    result = original(*args, **kwargs)
    node = engine.running_node()
    if node is not None:
        from sglang.srt.entrypoints.http_server import get_global_state
        from sglang.srt.managers.tokenizer_manager import ServerStatus

        manager = get_global_state().tokenizer_manager
        if manager.server_status == ServerStatus.Up:
            _take_label_over(manager, node)
            engine.announce_ready(node)
    return result


def _take_label_over(manager: Any, node: NodeService) -> None:
    """Live weights bring their `weight_version` along; SGLang shows it in `/model_info` and with each answer."""
    seen = node.snapshot()
    if seen is not None and seen.what.content.startswith("live:") and seen.weight_version:
        manager._update_weight_version_if_provided(seen.weight_version)


def before_sigterm(*args: Any, **kwargs: Any) -> None:
    """BEFORE SignalHandler.sigterm_handler: grant no more leases while SGLang finishes its requests."""
    node = engine.running_node()
    if node is not None:
        node.drain()


async def around_sigterm_watchdog(original: Callable[..., Any], self: Any) -> None:
    """AROUND TokenizerManager.sigterm_watchdog: readers finish before it ends the ranks whose memory they read.

    It starts with the first request and runs until SIGTERM; requests in flight go on meanwhile.
    """
    while not self.gracefully_exit:
        await asyncio.sleep(SIGTERM_POLL_S)
    if engine.running_node() is not None:
        await asyncio.to_thread(engine.finish_node)
    await original(self)


def drain_with(app: Any) -> None:
    """Let readers finish when the application shuts down: all that SIGTERM means before SGLang's handler is there.

    uvicorn raises the signal again once that is done, so nothing after it would run.
    """
    lifespan = app.router.lifespan_context

    @contextlib.asynccontextmanager
    async def lifespan_and_drain(app: Any) -> AsyncIterator[Any]:
        async with lifespan(app) as state:
            yield state
            await asyncio.to_thread(engine.finish_node)

    app.router.lifespan_context = lifespan_and_drain


def install_routes(app: Any, node: NodeService) -> None:
    """Put our routes in place of the stock ones; a second route on an existing path would never be reached."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) not in (*STOCK_PATHS, STATUS_PATH)]

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def transfer_engine_info(request: Request) -> Response:
        gzip = accepts_gzip(request.headers.get("accept-encoding"))
        status, headers, body = stock_reply(node, request.query_params.get("rank"), gzip)
        return Response(body, status_code=status, headers=dict(headers))

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def rfork_status(request: Request) -> Response:
        code, body, headers = status_answer(node.guard, node.status_reply(), request.scope, request.headers)
        return Response(body, status_code=code, headers=headers, media_type="application/json")

    for path in STOCK_PATHS:
        app.add_api_route(path, transfer_engine_info, methods=["GET"], include_in_schema=False)
    app.add_api_route(STATUS_PATH, rfork_status, methods=["GET"], include_in_schema=False)
    install_collective_routes(app, node)
    log.debug("rfork %s: routes installed", rfork.__version__)
