"""The planner's HTTP shell: parse, hand to the service, encode. Nothing here decides, and nothing here dials anyone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Receive, Scope, Send

from rfork.auth import Guard
from rfork.guarded import Proving, admit
from rfork.planner import pages, views
from rfork.planner.legacy import LegacyBook
from rfork.planner.legacy import routes as legacy_routes
from rfork.planner.lifecycle import BadRequest, NotUnderstood, PlannerError, TooLarge, Unauthorized
from rfork.planner.metrics import PlannerMetrics
from rfork.planner.service import PlannerService
from rfork.wire import not_understood
from rfork.wire.planner import MAX_BODY_NBYTES, PREFIX, Ask, Heartbeat, Id, Problem, Report

BODY_DEADLINE_S = 10.0
ASKS, REPORTS, INSTANCE = PREFIX + "/asks", PREFIX + "/reports", PREFIX + "/instances/"
JSON = "application/json"
HEADERS = {"cache-control": "no-store", "x-content-type-options": "nosniff"}

T = TypeVar("T", Heartbeat, Ask, Report)


def create_app(service: PlannerService, *, guard: Guard | None = None, legacy: LegacyBook | None = None) -> FastAPI:
    """The planner as one ASGI app. With a `guard` it wants tickets and proves its answers; `legacy` adds vLLM-Ascend
    RFork's end-points, which can't carry one.
    """

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        await service.start()
        try:
            yield
        finally:
            await service.stop()

    app = FastAPI(title="R-Fork planner", lifespan=lifespan, openapi_url=None, docs_url=None, redoc_url=None)
    api = _Api(service, _Door(guard), PlannerMetrics(service))
    for kind in (PlannerError, HTTPException, Exception):
        app.add_exception_handler(kind, api.problem)
    routes = [
        ("POST", PREFIX + "/asks", api.ask),
        ("PUT", PREFIX + "/instances/{instance_id}", api.heartbeat),
        ("DELETE", PREFIX + "/instances/{instance_id}", api.withdraw),
        ("POST", PREFIX + "/instances/{instance_id}/drain", api.drain),
        ("POST", PREFIX + "/reports", api.report),
        ("GET", PREFIX + "/instances", api.instances),
        ("GET", PREFIX + "/instances/{instance_id}", api.instance),
        ("GET", PREFIX + "/leases", api.leases),
        ("GET", PREFIX + "/events", api.events),
        ("GET", PREFIX + "/overview", api.overview),
        ("GET", "/healthz", api.healthz),
        ("GET", "/readyz", api.readyz),
        ("GET", "/metrics", api.show_metrics),
        *pages.routes(),
        *(legacy_routes(legacy, service) if legacy is not None else ()),
    ]
    for method, path, handler in routes:
        app.add_route(path, handler, methods=[method])
    app.add_middleware(_ShortCut, api=api)
    if guard is not None:
        app.add_middleware(Proving, guard=guard)
    return app


class _ShortCut:
    """Takes asks, reports and heartbeats past the router: they are nearly all of the load, and routing costs more."""

    def __init__(self, app: ASGIApp, api: _Api) -> None:
        self._app = app
        self._api = api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        method, path = scope.get("method", ""), scope.get("path", "")
        if method == "POST" and path == ASKS:
            handler = self._api.ask
        elif method == "POST" and path == REPORTS:
            handler = self._api.report
        elif method == "PUT" and path.startswith(INSTANCE) and "/" not in path[len(INSTANCE) :]:
            handler = self._api.heartbeat
            scope["path_params"] = {"instance_id": path[len(INSTANCE) :]}
        else:
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive, send)
        try:
            response = await handler(request)
        except PlannerError as error:
            response = await self._api.problem(request, error)
        await response(scope, receive, send)


class _Api:
    """One method per end-point (docs/protocol.md)."""

    def __init__(self, service: PlannerService, door: _Door, metrics: PlannerMetrics) -> None:
        self._service = service
        self._door = door
        self._metrics = metrics

    async def problem(self, request: Request, error: Exception) -> Response:
        """Any error as a `Problem`. Nothing of a crash reaches the other side."""
        if isinstance(error, PlannerError):
            self._metrics.errors.labels(error.code).inc()
            return _json(Problem(error.code, str(error), list(error.story)), error.status)
        if isinstance(error, HTTPException):
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code, "http")
            return _json(Problem(code, str(error.detail)), error.status_code, error.headers)
        self._metrics.errors.labels("internal").inc()
        return _json(Problem("internal", "the planner failed; its log says why"), 500)

    async def heartbeat(self, request: Request) -> Response:
        beat = await self._door.parse(request, Heartbeat)
        named = request.path_params["instance_id"]
        if beat.instance_id != named:
            raise BadRequest(f"the path names {named!r} and the body {beat.instance_id!r}")
        self._metrics.heartbeats.inc()
        return _json(self._service.heartbeat(beat))

    async def withdraw(self, request: Request) -> Response:
        await self._door.read(request)
        reason = request.query_params.get("reason", "withdrawn")[:256]
        self._service.withdraw(_id(request.path_params["instance_id"]), reason)
        return Response(status_code=204, headers=HEADERS)

    async def drain(self, request: Request) -> Response:
        await self._door.read(request)
        self._service.drain(_id(request.path_params["instance_id"]))
        return Response(status_code=202, headers=HEADERS)

    async def ask(self, request: Request) -> Response:
        question = await self._door.parse(request, Ask)
        began = self._service.clock.now()

        async def hung_up() -> None:
            while (await request.receive())["type"] != "http.disconnect":
                pass

        answer = await self._service.ask(question, hung_up)
        self._metrics.asks.labels(type(answer).__name__).inc()
        self._metrics.waits.observe(self._service.clock.now() - began)
        return _json(answer)

    async def report(self, request: Request) -> Response:
        body = await self._door.parse(request, Report)
        self._service.report(body)
        self._metrics.report(body)
        return Response(status_code=204, headers=HEADERS)

    async def instances(self, request: Request) -> Response:
        await self._door.read(request)
        query = request.query_params
        found = views.instances(
            self._service.state,
            self._service.clock.now(),
            key=query.get("key", ""),
            in_state=query.get("state", ""),
            limit=_limit(request),
        )
        return _json(found)

    async def instance(self, request: Request) -> Response:
        await self._door.read(request)
        return _json(
            views.story(self._service.state, _id(request.path_params["instance_id"]), self._service.clock.now())
        )

    async def leases(self, request: Request) -> Response:
        await self._door.read(request)
        return _json(views.leases(self._service.state, self._service.clock.now(), _limit(request)))

    async def events(self, request: Request) -> Response:
        await self._door.read(request)
        after, wait_s = int(_number(request, "after", 0)), _number(request, "wait_s", 0)
        return _json(await self._service.events(after, wait_s))

    async def overview(self, request: Request) -> Response:
        await self._door.read(request)
        return _json(views.overview(self._service))

    async def healthz(self, request: Request) -> Response:
        return _json({"status": "ok"})

    async def readyz(self, request: Request) -> Response:
        """Ready even while the store does not answer: this planner then acts alone, which beats no planner."""
        service = self._service
        body = {"ready": service.running, "store": service.store.name, "store_answers": service.store.healthy}
        return _json(body, 200 if service.running else 503)

    async def show_metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), media_type="text/plain; version=0.0.4")


class _Door:
    """Where requests come in: bounded in size and time, authorised, parsed."""

    def __init__(self, guard: Guard | None) -> None:
        self._guard = guard
        self._decoders: dict[type, Any] = {kind: msgspec.json.Decoder(kind) for kind in (Heartbeat, Ask, Report)}

    async def read(self, request: Request) -> bytes:
        """The whole body, at most MAX_BODY_NBYTES. Raises TooLarge, Unauthorized, BadRequest."""
        if request.method not in ("GET", "HEAD") and "origin" in request.headers:
            raise BadRequest("requests that change state are not taken from web pages")
        try:
            async with asyncio.timeout(BODY_DEADLINE_S):
                body = await _bounded(request)
        except TimeoutError:
            raise BadRequest(f"the body did not arrive within {BODY_DEADLINE_S:g} s") from None
        except ClientDisconnect:
            raise BadRequest("the body broke off") from None
        if self._guard is not None:
            verdict = admit(self._guard, request.scope, request.headers, body)
            if verdict.why:
                raise Unauthorized(verdict.why)
        return body

    async def parse(self, request: Request, kind: type[T]) -> T:
        data = await self.read(request)
        try:
            body: T = self._decoders[kind].decode(data)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequest(str(error)) from None
        unknown = not_understood(tuple(body.requires))
        if unknown:
            raise NotUnderstood(f"this planner does not understand {', '.join(unknown)}")
        return body


async def _bounded(request: Request) -> bytes:
    chunks: list[bytes] = []
    nbytes = 0
    async for chunk in request.stream():
        nbytes += len(chunk)
        if nbytes > MAX_BODY_NBYTES:
            raise TooLarge(f"a body may have {MAX_BODY_NBYTES} bytes")
        chunks.append(chunk)
    return b"".join(chunks)


def _json(body: object, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(body), status, {**(headers or {}), **HEADERS}, JSON)


def _id(text: str) -> str:
    try:
        return msgspec.convert(text, Id)
    except msgspec.ValidationError as error:
        raise BadRequest(f"instance id: {error}") from None


def _limit(request: Request) -> int:
    return int(_number(request, "limit", views.MAX_LINES))


def _number(request: Request, name: str, default: float) -> float:
    text = request.query_params.get(name, "")
    try:
        value = float(text) if text else float(default)
    except ValueError:
        raise BadRequest(f"{name} must be a number") from None
    if not 0 <= value <= 1e15:
        raise BadRequest(f"{name} must be from 0 to 1e15")
    return value
