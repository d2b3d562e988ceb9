"""Serves the dashboard: three static files under a content policy that runs nothing else and fetches from here only."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib import resources

from fastapi import Request, Response

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
FILES = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
}


Route = tuple[str, str, Callable[[Request], Awaitable[Response]]]


def routes() -> list[Route]:
    """The dashboard's routes. The files are read once, here."""
    folder = resources.files("rfork.planner.dashboard")
    return [
        ("GET", path, _page((folder / name).read_bytes(), media_type)) for path, (name, media_type) in FILES.items()
    ]


def _page(body: bytes, media_type: str) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        return Response(body, headers=HEADERS, media_type=media_type)

    return page
