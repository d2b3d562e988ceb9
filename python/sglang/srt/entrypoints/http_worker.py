"""SGLang's application as one of several HTTP workers imports it: R-Fork's end-points ask the main process."""

from __future__ import annotations

import os

import httpx
from fastapi import FastAPI, Request, Response
from sglang.srt.entrypoints.http_server import app
from sglang.srt.utils.auth import AuthLevel, auth_level

from rfork.seed.app import refused
from rfork.seed.bodies import BadRequest, body_of
from rfork.seed.door import caller_of
from rfork.wire.seed import STATUS_PATH
from sglang_rfork.srt.compat import STOCK_ROUTES
from sglang_rfork.srt.entrypoints.collective import MAX_BODY_NBYTES
from sglang_rfork.srt.entrypoints.several_workers import CALLER_HEADER, SOCKET_ENV

__all__ = ["app"]

PATHS = (STATUS_PATH, *STOCK_ROUTES)
PASSED_ON = ("accept-encoding", "authorization", "content-type", "rfork-ticket")
TIMEOUT_S = 60.0


def hand_on(app: FastAPI, socket_path: str) -> None:
    """Replace the stock routes by ones that ask the main process, with the same rules of access."""
    main = httpx.AsyncClient(
        transport=httpx.AsyncHTTPTransport(uds=socket_path), base_url="http://main", timeout=TIMEOUT_S
    )
    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) not in PATHS]

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def handed_on(request: Request) -> Response:
        try:
            body = await body_of(request, MAX_BODY_NBYTES)
        except BadRequest as error:
            return refused(error.refusal)
        headers = {name: value for name, value in request.headers.items() if name in PASSED_ON}
        if caller := caller_of(request.scope, request.headers):
            headers[CALLER_HEADER] = caller
        asked = main.build_request(
            request.method,
            request.url.path,
            params=request.query_params,
            headers={"accept-encoding": "identity", **headers},
            content=body,
        )
        answer = await main.send(asked, stream=True)
        try:
            raw = b"".join([part async for part in answer.aiter_raw()])
        finally:
            await answer.aclose()
        kept = {k: v for k, v in answer.headers.items() if k not in ("content-length", "date", "server", "connection")}
        return Response(raw, status_code=answer.status_code, headers=kept)

    for path in PATHS:
        app.add_api_route(path, handed_on, methods=["GET", "POST"], include_in_schema=False)


hand_on(app, os.environ[SOCKET_ENV])
