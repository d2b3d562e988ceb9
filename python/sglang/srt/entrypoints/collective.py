"""SGLang's two end-points of a collective transfer on SGLang's own port, answered by this node's desk.

The stock ones would queue behind the scheduler's requests, wait there without a deadline, and answer data parallel
ranks with an assertion; they are replaced in place, with the same paths, fields and access rules.
"""

from __future__ import annotations

from typing import Any

from fastapi import Request, Response

from rfork.seed.app import collective_response, refused
from rfork.seed.bodies import BadRequest, body_of
from rfork.seed.door import refusal_of
from rfork.seed.node import NodeService
from rfork.wire.collective import INIT_PATH, SEND_PATH

MAX_BODY_NBYTES = 64 << 10


def install_collective_routes(app: Any, node: NodeService) -> None:
    """Put ours where the stock ones were; nothing else of `app` changes."""
    from sglang.srt.utils.auth import AuthLevel, auth_level

    app.router.routes[:] = [r for r in app.router.routes if getattr(r, "path", None) not in (INIT_PATH, SEND_PATH)]

    @auth_level(AuthLevel.ADMIN_OPTIONAL)
    async def collective(request: Request) -> Response:
        try:
            body = await body_of(request, MAX_BODY_NBYTES)
        except BadRequest as error:
            return refused(error.refusal)
        refusal = refusal_of(node.guard, request.scope, request.headers, body)
        return refused(refusal) if refusal else await collective_response(node, request.url.path, request, body)

    for path in (INIT_PATH, SEND_PATH):
        app.add_api_route(path, collective, methods=["POST"], include_in_schema=False)
