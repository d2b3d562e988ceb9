"""vLLM-Ascend RFork's header protocol, for its unmodified instances. A namespace of its own: never matched with v1.

Values travel in request and response headers, bodies are empty. One worker (rank) is one seed, keyed by an opaque
string, with one lease at a time by default. Here, unlike in v1, the planner admits: leases expire, and a seed with a
live lease can't be removed. It wants one planner: two hear of each other's leases a moment late, and may lease one
seed to two clients meanwhile.

Written from vLLM-Ascend's documentation and the behaviour of its example planner (May and September 2026).

    POST /add_seed          SEED_KEY SEED_IP SEED_PORT SEED_RANK SEED_REFCNT          200 | 400
    GET  /get_seed          SEED_KEY          200 + SEED_IP SEED_PORT SEED_RANK USER_ID LEASE_TTL_SEC | 404 | 400
    POST /renew_seed_lease  SEED_IP SEED_PORT SEED_RANK USER_ID                       200 | 404 | 400
    POST /put_seed          SEED_IP SEED_PORT SEED_RANK USER_ID                       200 | 404 | 400
    POST /remove_seed       SEED_KEY SEED_IP SEED_PORT SEED_RANK                      200 | 404 | 409 | 400
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from fastapi import Request, Response

from rfork.planner.events import (
    LegacyAdded,
    LegacyLeased,
    LegacyReleased,
    LegacyRemoved,
    LegacyRenewed,
    Shared,
)
from rfork.planner.service import PlannerService

MAX_SEEDS = 50_000
MAX_TEXT = 1024


class HeaderError(ValueError):
    """A header is missing or malformed. Consequence: 400, nothing changed."""


class Place(NamedTuple):
    """What names a worker: address, port, rank."""

    ip: str
    port: int
    rank: int


@dataclass(slots=True)
class LegacySeed:
    """A worker that offers its shard; `leases` maps a user to when its lease ends."""

    key: str
    seen_at: float
    leases: dict[str, float] = field(default_factory=dict)


class LegacyBook:
    """The legacy protocol's state: pure, time is an argument. Ends what is over whenever it is asked."""

    def __init__(self, *, ttl_s: float = 60.0, lease_ttl_s: float = 60.0, points: int = 1) -> None:
        if min(ttl_s, lease_ttl_s) <= 0 or points < 1:
            raise ValueError("legacy time to live and points must be positive")
        self.ttl_s, self.lease_ttl_s, self.points = ttl_s, lease_ttl_s, points
        self.seeds: dict[Place, LegacySeed] = {}
        self._by_key: dict[str, dict[Place, LegacySeed]] = {}
        self._swept_at = 0.0

    def add(self, place: Place, key: str, now: float) -> bool:
        """A heartbeat. False if the book is full. A seed that comes with another key is another seed."""
        seed = self.seeds.get(place)
        if seed is not None and seed.key != key:
            self._forget(place)
            seed = None
        if seed is None:
            self._sweep(now, force=len(self.seeds) >= MAX_SEEDS)
            if len(self.seeds) >= MAX_SEEDS:
                return False
            seed = self.seeds[place] = LegacySeed(key, now)
            self._by_key.setdefault(key, {})[place] = seed
        seed.seen_at = max(seed.seen_at, now)
        return True

    def get(self, key: str, now: float) -> Place | None:
        """The live seed of this key with fewest leases and a free point, longest unheard of last."""
        self._sweep(now)
        free = [
            (len(self._live_leases(seed, now)), -seed.seen_at, place)
            for place, seed in self._by_key.get(key, {}).items()
            if now - seed.seen_at <= self.ttl_s and len(self._live_leases(seed, now)) < self.points
        ]
        return min(free)[2] if free else None

    def lease(self, place: Place, user: str, now: float) -> None:
        seed = self.seeds.get(place)
        if seed is not None:
            seed.leases[user] = max(seed.leases.get(user, 0.0), now + self.lease_ttl_s)

    def renew(self, place: Place, user: str, now: float) -> bool:
        """False if there is no such lease, or it has expired."""
        seed = self.seeds.get(place)
        if seed is None or user not in self._live_leases(seed, now):
            return False
        self.lease(place, user, now)
        return True

    def release(self, place: Place, user: str, now: float) -> bool:
        seed = self.seeds.get(place)
        if seed is None or user not in self._live_leases(seed, now):
            return False
        del seed.leases[user]
        return True

    def remove(self, place: Place, key: str, now: float) -> int:
        """The HTTP status: 200, 404 for an unknown seed, 409 while it is leased."""
        seed = self.seeds.get(place)
        if seed is None or seed.key != key or now - seed.seen_at > self.ttl_s:
            return 404
        if self._live_leases(seed, now):
            return 409
        self._forget(place)
        return 200

    def take(self, event: Shared, now: float, age_s: float) -> bool:
        """Take what another planner did `age_s` ago, in its order; False if it is not of this protocol."""
        if not isinstance(event, LegacyAdded | LegacyLeased | LegacyRenewed | LegacyReleased | LegacyRemoved):
            return False
        place, then = Place(event.ip, event.port, event.rank), now - age_s
        if isinstance(event, LegacyAdded):
            self.add(place, event.key, then)
        elif isinstance(event, LegacyLeased | LegacyRenewed):  # the lease itself may be from before this planner's time
            self.lease(place, event.user, then)
        elif isinstance(event, LegacyReleased):
            self.release(place, event.user, then)
        elif place in self.seeds and self.seeds[place].seen_at <= then:
            self._forget(place)
        return True

    def _live_leases(self, seed: LegacySeed, now: float) -> dict[str, float]:
        for user in [u for u, until in seed.leases.items() if until <= now]:
            del seed.leases[user]
        return seed.leases

    def _sweep(self, now: float, *, force: bool = False) -> None:
        if force or now - self._swept_at >= 5.0:
            self._swept_at = now
            for place in [p for p, seed in self.seeds.items() if now - seed.seen_at > self.ttl_s]:
                self._forget(place)

    def _forget(self, place: Place) -> None:
        seed = self.seeds.pop(place, None)
        if seed is not None:
            places = self._by_key[seed.key]
            del places[place]
            if not places:
                del self._by_key[seed.key]


Route = tuple[str, str, Callable[[Request], Awaitable[Response]]]


def routes(book: LegacyBook, service: PlannerService) -> list[Route]:
    """The end-points for a planner's app, which has `/healthz` already."""
    service.on_shared = lambda event, age_s: book.take(event, service.clock.now(), age_s)
    api = _LegacyApi(book, service)
    return [
        ("POST", "/add_seed", api.add_seed),
        ("GET", "/get_seed", api.get_seed),
        ("POST", "/renew_seed_lease", api.renew_seed_lease),
        ("POST", "/put_seed", api.put_seed),
        ("POST", "/remove_seed", api.remove_seed),
    ]


class _LegacyApi:
    """One method per end-point; a missing or malformed header is answered by 400."""

    def __init__(self, book: LegacyBook, service: PlannerService) -> None:
        self._book = book
        self._service = service

    async def add_seed(self, request: Request) -> Response:
        try:
            key, place = _text(request.headers, "SEED_KEY"), _place(request.headers)
            _number(request.headers, "SEED_REFCNT", 0)
        except HeaderError as error:
            return Response(str(error), 400)
        if not self._book.add(place, key, self._service.clock.now()):
            return Response("planner is full", 503)
        self._service.store.share(LegacyAdded(*place, key))
        return Response()

    async def get_seed(self, request: Request) -> Response:
        try:
            key = _text(request.headers, "SEED_KEY")
        except HeaderError as error:
            return Response(str(error), 400)
        now = self._service.clock.now()
        place = self._book.get(key, now)
        if place is None:
            return Response("no available seed", 404)
        user = secrets.token_hex(16)
        self._book.lease(place, user, now)
        self._service.store.share(LegacyLeased(*place, user))
        return Response(
            headers={
                "SEED_IP": place.ip,
                "SEED_PORT": str(place.port),
                "SEED_RANK": str(place.rank),
                "USER_ID": user,
                "LEASE_TTL_SEC": f"{self._book.lease_ttl_s:g}",
            }
        )

    async def renew_seed_lease(self, request: Request) -> Response:
        return self._with_lease(request, self._book.renew, LegacyRenewed)

    async def put_seed(self, request: Request) -> Response:
        return self._with_lease(request, self._book.release, LegacyReleased)

    def _with_lease(
        self,
        request: Request,
        change: Callable[[Place, str, float], bool],
        event: type[LegacyRenewed] | type[LegacyReleased],
    ) -> Response:
        try:
            place, user = _place(request.headers), _text(request.headers, "USER_ID")
        except HeaderError as error:
            return Response(str(error), 400)
        if not change(place, user, self._service.clock.now()):
            return Response("lease not found", 404)
        self._service.store.share(event(*place, user))
        return Response()

    async def remove_seed(self, request: Request) -> Response:
        try:
            key, place = _text(request.headers, "SEED_KEY"), _place(request.headers)
        except HeaderError as error:
            return Response(str(error), 400)
        status = self._book.remove(place, key, self._service.clock.now())
        if status == 200:
            self._service.store.share(LegacyRemoved(*place))
        return Response({200: b"", 404: b"seed not found", 409: b"seed has active leases"}[status], status)


def _text(headers: Mapping[str, str], name: str) -> str:
    value = headers.get(name.lower(), "")
    if not value:
        raise HeaderError(f"header {name} is missing")
    if len(value) > MAX_TEXT or not value.isprintable():
        raise HeaderError(f"header {name} is malformed")
    return value


def _number(headers: Mapping[str, str], name: str, lowest: int, highest: int = 1 << 31) -> int:
    value = _text(headers, name)
    if not (value.isascii() and value.isdigit() and len(value) <= 10 and lowest <= int(value) <= highest):
        raise HeaderError(f"header {name} must be a whole number from {lowest}")
    return int(value)


def _place(headers: Mapping[str, str]) -> Place:
    ip = _text(headers, "SEED_IP")
    return Place(ip, _number(headers, "SEED_PORT", 1, 65535), _number(headers, "SEED_RANK", 0))
