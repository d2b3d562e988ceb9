"""The seed service over HTTP: one ASGI app, engine-neutral. Routes translate; `NodeService` decides.

GET changes nothing. Every answer that is not a success is a `Refusal` in JSON, with Retry-After where waiting helps; no
request, however malformed, gets a traceback or an unbounded buffer. Nothing here blocks the loop.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING

from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from rfork import wire
from rfork.guarded import App, Proving
from rfork.metrics import CONTENT_TYPE
from rfork.seed import door
from rfork.seed.admission import STATUS_CODES, refuse
from rfork.seed.bodies import BadRequest, body_of
from rfork.seed.groups import reply_body
from rfork.seed.shards import Blob
from rfork.wire.collective import INIT_PATH, SEND_PATH, InitGroup, SendWeights
from rfork.wire.seed import AUDIT_PATH, DRAIN_PATH, LEASES_PATH, STATUS_PATH, LeaseRequest, Refusal

if TYPE_CHECKING:
    from rfork.seed.node import NodeService

logger = logging.getLogger(__name__)

MAX_LEASE_NBYTES = 256 << 10
_JSON = "application/json"
_MSGPACK = "application/msgpack"
Handler = Callable[["NodeService", Request], Awaitable[Response]]


def make_app(node: NodeService) -> App:
    def route(method: str, path: str, handler: Handler) -> Route:
        return Route(path, functools.partial(_guarded, node, handler), methods=[method])

    app = Starlette(
        routes=[
            route("GET", STATUS_PATH, _status),
            route("POST", LEASES_PATH, _grant),
            route("GET", LEASES_PATH + "/{lease}/manifest", _manifest),
            route("GET", LEASES_PATH + "/{lease}/digests", _digests),
            route("POST", LEASES_PATH + "/{lease}/renew", _renew),
            route("DELETE", LEASES_PATH + "/{lease}", _release),
            route("POST", INIT_PATH, _init_group),
            route("POST", SEND_PATH, _send_weights),
            route("POST", DRAIN_PATH, _drain),
            route("POST", AUDIT_PATH, _audit),
            route("GET", "/metrics", _metrics),
        ],
        exception_handlers={HTTPException: _http_error},
    )
    return Proving(app, node.guard) if node.guard is not None else app


async def _guarded(node: NodeService, handler: Handler, request: Request) -> Response:
    try:
        if node.guard is not None and handler not in OPEN:
            body = await body_of(request, MAX_LEASE_NBYTES)  # a ticket covers it
            refusal = door.refusal_of(node.guard, request.scope, request.headers, body)
            if refusal is not None:
                return refused(refusal)
        return await handler(node, request)
    except BadRequest as error:
        return refused(error.refusal)
    except Exception:
        logger.exception("rfork: %s %s failed", request.method, request.url.path)
        return refused(refuse("error", "this seed failed on that request; its log says why"))


def refused(refusal: Refusal) -> Response:
    headers = {}
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    return _json(refusal, STATUS_CODES[refusal.reason], headers)


def accepts_gzip(header: str | None) -> bool:
    """Whether an Accept-Encoding header lets us send gzip."""
    for part in (header or "").lower().split(","):
        name, _, parameters = part.strip().partition(";")
        if name.strip() in ("gzip", "*"):
            return parameters.replace(" ", "") not in ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return False


def _json(body: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(wire.encode(body), status, headers, media_type=_JSON)


def _blob(blob: Blob, request: Request) -> Response:
    body, headers = blob.choose(accepts_gzip(request.headers.get("accept-encoding")))
    if headers["ETag"] in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers={"ETag": headers["ETag"]})
    return Response(body, 200, headers, media_type=_MSGPACK)


async def _status(node: NodeService, request: Request) -> Response:
    code, body, _ = door.status_answer(node.guard, node.status_reply(), request.scope, request.headers)
    return Response(body, code, media_type=_JSON)


async def _grant(node: NodeService, request: Request) -> Response:
    try:
        body = wire.decode(await body_of(request, MAX_LEASE_NBYTES), LeaseRequest, limit=MAX_LEASE_NBYTES)
    except (ValueError, RecursionError) as error:
        raise BadRequest("bad_request", f"not a lease request: {error}") from None
    reply = node.grant(body)
    response = refused(reply) if isinstance(reply, Refusal) else _json(reply, 201)
    response.background = BackgroundTask(node.metrics.update)
    return response


async def _manifest(node: NodeService, request: Request) -> Response:
    record = node.leased(request.path_params["lease"])
    return refused(record) if isinstance(record, Refusal) else _blob(record.manifest, request)


async def _digests(node: NodeService, request: Request) -> Response:
    record = node.leased(request.path_params["lease"])
    if isinstance(record, Refusal):
        return refused(record)
    blob = record.digests or await run_in_threadpool(node.digests, record)
    return refused(blob) if isinstance(blob, Refusal) else _blob(blob, request)


async def _renew(node: NodeService, request: Request) -> Response:
    lease = request.path_params["lease"]
    refusal = node.renew(lease)
    return refused(refusal) if refusal else _json({"lease": lease, "ttl_s": node.config.lease_ttl_s})


async def _release(node: NodeService, request: Request) -> Response:
    refusal = node.release(request.path_params["lease"])
    return refused(refusal) if refusal else Response(status_code=204)


async def _init_group(node: NodeService, request: Request) -> Response:
    return await collective_response(node, INIT_PATH, request, await body_of(request, MAX_LEASE_NBYTES))


async def _send_weights(node: NodeService, request: Request) -> Response:
    return await collective_response(node, SEND_PATH, request, await body_of(request, MAX_LEASE_NBYTES))


async def collective_response(node: NodeService, path: str, request: Request, body: bytes) -> Response:
    """The answer to either of SGLang's two end-points, on its port and on ours."""
    try:
        if path == INIT_PATH:
            init = wire.decode(body, InitGroup, limit=MAX_LEASE_NBYTES)
            caller = door.caller_of(request.scope, request.headers)
            status, found = reply_body(await run_in_threadpool(node.groups.init, init, caller))
        else:
            send = wire.decode(body, SendWeights, limit=MAX_LEASE_NBYTES)
            status, found = reply_body(await run_in_threadpool(node.groups.send, send))
    except (ValueError, RecursionError) as error:
        status, found = reply_body(refuse("bad_request", f"not what this end-point takes: {error}"))
    return _json(found, status)


async def _drain(node: NodeService, request: Request) -> Response:
    node.drain("asked for over HTTP")
    return _json(node.status_reply(), 202)


async def _audit(node: NodeService, request: Request) -> Response:
    found = await run_in_threadpool(node.auditor.run)
    return refused(found) if isinstance(found, Refusal) else _json(found)


async def _metrics(node: NodeService, request: Request) -> Response:
    return Response(await run_in_threadpool(node.metrics.render), media_type=CONTENT_TYPE)


OPEN: tuple[Handler, ...] = (_status, _metrics)
"""What needs no ticket: a status then shows no address, and metrics never do."""


async def _http_error(request: Request, error: Exception) -> Response:
    code = error.status_code if isinstance(error, HTTPException) else 500
    reason = "not_found" if code == 404 else "bad_request"
    return _json(refuse(reason, f"{request.method} {request.url.path[:200]}: no such end-point"), code)
