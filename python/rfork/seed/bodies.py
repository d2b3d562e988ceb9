"""Bodies of requests to a seed: read once, within a size and a time, on its own listener and on SGLang's port."""

from __future__ import annotations

import asyncio

from starlette.requests import ClientDisconnect, Request

from rfork.seed.admission import refuse

BODY_DEADLINE_S = 10.0
_BODY = "rfork.body"


class BadRequest(Exception):
    """A request that can't be answered with what it asks for; `refusal` is the answer."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.refusal = refuse(reason, message)


async def body_of(request: Request, limit: int) -> bytes:
    """The body, read once and kept. Raises BadRequest for one that is longer than `limit`, late or cut short."""
    kept: bytes | None = request.scope.get(_BODY)
    if kept is not None:
        return kept
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise BadRequest("too_large", f"body of {declared[:20]} bytes exceeds {limit}")
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_DEADLINE_S):
            async for part in request.stream():
                data += part
                if len(data) > limit:
                    raise BadRequest("too_large", f"body exceeds {limit} bytes")
    except TimeoutError:
        raise BadRequest("bad_request", f"the body did not arrive within {BODY_DEADLINE_S:g} s") from None
    except ClientDisconnect:
        raise BadRequest("bad_request", "the body broke off") from None
    request.scope[_BODY] = bytes(data)
    return bytes(data)
