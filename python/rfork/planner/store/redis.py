"""Planners that share what they see through one Redis stream, and settle claims with redis-py's locks.

Each planner keeps the whole state in memory and answers from there; the stream carries what others saw, a few
milliseconds late, and the last time to live of it refills a planner that starts. Nothing else is kept in Redis, so it
needs no persistence, and while it does not answer each planner goes on alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

import msgspec
import redis.asyncio as redis
from redis.asyncio.lock import Lock
from redis.backoff import NoBackoff
from redis.exceptions import LockError, RedisError
from redis.retry import Retry

from rfork.planner.events import Shared
from rfork.planner.store.base import Deliver, end_tasks

log = logging.getLogger("rfork.planner.store")

STREAM = "rfork:v1:events"
CLAIM = "rfork:v1:claim:"
DEADLINE_S = 0.5
BLOCK_S = 1.0
FLUSH_S = 0.004
RETRY_S = 1.0
MAX_BUFFERED = 100_000
BATCH = 500
TROUBLE = (RedisError, OSError, TimeoutError)


class RedisStore:
    """One stream, one connection for reading it, a pool for the rest."""

    name = "redis"

    def __init__(self, url: str, *, horizon_s: float, num_claims: int) -> None:
        options: dict[str, Any] = {
            "socket_timeout": BLOCK_S + DEADLINE_S,
            "socket_connect_timeout": DEADLINE_S,
            "retry": Retry(NoBackoff(), 0),  # our own loops retry
        }
        self._redis = redis.Redis.from_url(url, **options)
        self._horizon_s = horizon_s
        self._num_claims = num_claims
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(Shared)
        self._buffer: list[Shared] = []
        self._wake = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._last_id = "0-0"
        self._planner = b""
        self._up = False
        self._stopping = False

    @property
    def healthy(self) -> bool:
        return self._up

    async def start(self, planner: str, deliver: Deliver) -> None:
        """Read what the others saw within the horizon; trouble only delays that."""
        self._planner = planner.encode()
        try:
            async with asyncio.timeout(10 * DEADLINE_S):
                await self._catch_up(deliver)
            self._set_up(True)
        except TROUBLE as error:
            log.warning("redis does not answer, this planner acts alone until it does: %s", error)
        self._tasks = [
            asyncio.ensure_future(self._read_for_ever(deliver)),
            asyncio.ensure_future(self._write_for_ever()),
        ]

    async def stop(self) -> None:
        with contextlib.suppress(*TROUBLE):
            async with asyncio.timeout(DEADLINE_S):
                await self._flush()
        self._stopping = True
        await end_tasks(self._tasks)
        with contextlib.suppress(*TROUBLE):
            await self._redis.aclose()

    def share(self, event: Shared) -> None:
        if len(self._buffer) < MAX_BUFFERED:
            self._buffer.append(event)
            self._wake.set()

    async def claim(self, key: str, client: str, ttl_s: float) -> dict[str, float]:
        try:
            async with asyncio.timeout(DEADLINE_S):
                if await self._renewed(key, client, ttl_s):
                    return {client: ttl_s}
                for name in self._names(key):
                    if await self._lock(name, ttl_s).acquire(blocking=False, token=client):
                        return {client: ttl_s}
                return await self._holders(key)
        except TROUBLE as error:
            log.warning("redis does not answer, the claim of %.12s goes to %s unshared: %s", key, client, error)
            return {client: ttl_s}

    async def renew(self, key: str, client: str, ttl_s: float) -> None:
        with contextlib.suppress(*TROUBLE):
            async with asyncio.timeout(DEADLINE_S):
                await self._renewed(key, client, max(ttl_s, 0.1))

    async def release(self, key: str, client: str) -> None:
        with contextlib.suppress(*TROUBLE):
            async with asyncio.timeout(DEADLINE_S):
                for name in await self._held(key, client):
                    with contextlib.suppress(LockError):  # it has just run out
                        await self._lock(name, 1.0).do_release(client.encode())

    async def _renewed(self, key: str, client: str, ttl_s: float) -> bool:
        """Whether `client` held a claim, and holds it anew."""
        num_renewed = 0
        for name in await self._held(key, client):
            lock = self._lock(name, ttl_s)
            lock.local.token = client.encode()
            with contextlib.suppress(LockError):  # it has just run out
                num_renewed += await lock.reacquire()
        return num_renewed > 0

    async def _held(self, key: str, client: str) -> list[str]:
        names = self._names(key)
        return [n for n, holder in zip(names, await self._redis.mget(names), strict=True) if holder == client.encode()]

    async def _holders(self, key: str) -> dict[str, float]:
        found: dict[str, float] = {}
        for name in self._names(key):
            holder, left_ms = await self._redis.get(name), await self._redis.pttl(name)
            if holder and left_ms > 0:
                found[holder.decode()] = left_ms / 1000
        return found

    def _names(self, key: str) -> list[str]:
        """One lock for each claim of a key that may be held at a time."""
        return [f"{CLAIM}{key}:{n}" if n else CLAIM + key for n in range(self._num_claims)]

    def _lock(self, name: str, ttl_s: float) -> Lock:
        return Lock(self._redis, name, timeout=ttl_s, thread_local=False)

    async def _catch_up(self, deliver: Deliver) -> None:
        seconds, micros = await self._redis.time()
        now_ms = seconds * 1000 + micros // 1000
        self._last_id = f"{max(now_ms - int(self._horizon_s * 1000), 0)}-0"
        while True:
            entries = await self._redis.xrange(STREAM, min=f"({self._last_id}", count=BATCH)
            if not entries:
                return
            self._deliver(entries, deliver, now_ms)

    async def _read_for_ever(self, deliver: Deliver) -> None:
        while not self._stopping:
            try:
                if not self._up:
                    await self._catch_up_again(deliver)
                found = await self._redis.xread({STREAM: self._last_id}, count=BATCH, block=int(BLOCK_S * 1000))
                self._set_up(True)
                for entries in _per_stream(found):
                    self._deliver(entries, deliver, None)
            except TROUBLE as error:
                self._set_up(False, error)
                await asyncio.sleep(RETRY_S)

    async def _catch_up_again(self, deliver: Deliver) -> None:
        """After an outage: a Redis that lost its memory may count its stream anew, so begin at the horizon again."""
        async with asyncio.timeout(10 * DEADLINE_S):
            await self._catch_up(deliver)

    def _deliver(self, entries: list[tuple[bytes, dict[bytes, bytes]]], deliver: Deliver, now_ms: int | None) -> None:
        for entry_id, fields in entries:
            self._last_id = entry_id.decode()
            if fields.get(b"p") == self._planner:
                continue
            age_s = max(now_ms - int(self._last_id.partition("-")[0]), 0) / 1000 if now_ms is not None else 0.0
            try:
                event = self._decoder.decode(fields.get(b"e", b""))
            except msgspec.MsgspecError as error:
                log.warning("left out an entry of the stream that is none of ours: %s", error)
                continue
            deliver(event, age_s)

    async def _write_for_ever(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            await asyncio.sleep(FLUSH_S)
            self._wake.clear()
            try:
                async with asyncio.timeout(4 * DEADLINE_S):
                    await self._flush()
            except TROUBLE as error:
                self._set_up(False, error)
                await asyncio.sleep(RETRY_S)
                self._wake.set()

    async def _flush(self) -> None:
        """Write what is buffered; what can't be written is dropped, for heartbeats repeat and seeds admit."""
        events, self._buffer = self._buffer, []
        if not events:
            return
        seconds, _ = await self._redis.time()
        oldest = f"{int((seconds - self._horizon_s) * 1000)}-0"
        async with self._redis.pipeline(transaction=False) as pipe:
            for number, event in enumerate(events):
                trim: dict[str, Any] = {"minid": oldest, "approximate": True} if number == 0 else {}
                pipe.xadd(STREAM, {"p": self._planner, "e": self._encoder.encode(event)}, **trim)
            await pipe.execute()

    def _set_up(self, up: bool, error: BaseException | None = None) -> None:
        if up != self._up:
            self._up = up
            if up:
                log.info("redis answers")
            else:
                log.warning("redis does not answer, this planner acts alone until it does: %s", error)


def _per_stream(found: Any) -> list[list[tuple[bytes, dict[bytes, bytes]]]]:
    """XREAD's reply differs by protocol version: pairs (RESP2) or a mapping (RESP3, entries nested once more)."""
    if not found:
        return []
    if isinstance(found, dict):
        return [batch for batches in found.values() for batch in batches]
    return [entries for _, entries in found]
