"""From a lease's endpoints to an engine that reads: the fastest first, and reading the seed's fence proves the path."""

from __future__ import annotations

import contextlib
import logging
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from rfork.binding import Region, Slice
from rfork.clock import Clock
from rfork.errors import SeedLost, SeedRefused, SeedUnreachable, TransportError
from rfork.transports.base import Engine
from rfork.transports.read import Window, read_all
from rfork.transports.select import PACES, Attempt, Fabrics
from rfork.wire.seed import LeaseReply

logger = logging.getLogger(__name__)

FenceCheck = Callable[[bytes, str, int], None]
"""(page, instance id, generation) → None, or FenceBroken: `rfork.fence.check_fence`, handed in because it needs
torch.
"""

_TOUCH_NBYTES = 8
_TOUCHES_AT_ONCE = 32

Phase = Callable[[str], contextlib.AbstractContextManager[None]]


class Page(Protocol):
    """A page of registered memory to read fences into, on the device of the weights."""

    def scratch_page(self) -> tuple[int, int]:
        """Address and size of the page, zeroed by this call, so that a read which brings nothing is seen."""

    def read_scratch(self) -> bytes:
        """What the page holds now."""


class Link:
    """An engine that has read the seed's fence, through `page`. `regions` is what it has registered."""

    def __init__(self, engine: Engine, peer: str, regions: Sequence[Region]) -> None:
        self.engine = engine
        self.peer = peer
        self._regions = frozenset(regions)

    def register(self, regions: Sequence[Region]) -> None:
        """Register exactly these. Raises TransportError."""
        wanted = frozenset(regions)
        if stale := sorted(self._regions - wanted):
            self.engine.unregister(stale)
        if fresh := sorted(wanted - self._regions):
            self.engine.register(fresh)
        self._regions = wanted


def refuse_own(session_id: str, own: Collection[str]) -> None:
    """Raise SeedRefused if an endpoint is this process."""
    if session_id in own:
        raise SeedRefused(f"{session_id} is this process itself: it would read its own memory", reason="self")


class Connector:
    """Tries the endpoints of one lease, each at most once. Every engine that it does not hand out is destroyed."""

    def __init__(
        self,
        reply: LeaseReply,
        fabrics: Fabrics,
        check_fence: FenceCheck,
        clock: Clock,
        *,
        connect_timeout_s: float,
        close_timeout_s: float,
        own_sessions: Collection[str] = (),
    ) -> None:
        self._reply = reply
        self._check_fence = check_fence
        self._clock = clock
        self._connect_timeout_s = connect_timeout_s
        self._close_timeout_s = close_timeout_s
        self._own_sessions = frozenset(own_sessions)
        self._fabrics = fabrics
        self._todo: deque[Attempt] | None = None
        self._failures: list[str] = []

    def connect(self, page: Page, regions: Sequence[Region], phase: Phase) -> Link:
        """The next endpoint that works, with `regions` registered, the page's among them.

        Raises SeedUnreachable once none is left, FenceBroken, and SeedRefused where the seed is this process.
        """
        if self._todo is None:
            self._todo = deque(self._fabrics.attempts(self._reply.binding.endpoints))
        while self._todo:
            attempt = self._todo.popleft()
            try:
                return self._try(attempt, page, regions, phase)
            except (TransportError, SeedLost) as error:
                self.failed(attempt.endpoint.protocol, attempt.endpoint.session_id, error)
        offered = ", ".join(f"{e.protocol} ({e.scope})" for e in self._reply.binding.endpoints) or "nothing"
        tried = "; ".join(self._failures) or "none of it can be used here"
        raise SeedUnreachable(f"no way to read {self._reply.instance_id}, which offers {offered}: {tried}")

    def failed(self, protocol: str, session_id: str, error: Exception) -> None:
        """Remember why an endpoint was no use."""
        self._failures.append(f"{protocol} {session_id}: {error}")
        logger.warning("rfork: %s", self._failures[-1])

    def _try(self, attempt: Attempt, page: Page, regions: Sequence[Region], phase: Phase) -> Link:
        with phase("register"):
            engine = attempt.transport.open()
        try:
            refuse_own(attempt.endpoint.session_id, {engine.session_id, *self._own_sessions})
            with phase("register"):
                engine.register(regions)
            with phase("connect"):
                self.fence(engine, attempt.endpoint.session_id, page)
        except BaseException:
            engine.close(self._close_timeout_s)
            raise
        return Link(engine, attempt.endpoint.session_id, regions)

    def fence(self, engine: Engine, peer: str, page: Page) -> None:
        """Read the fence page and compare it with the lease; a transfer of its own, waited for. Raises FenceBroken."""
        binding = self._reply.binding
        address, nbytes = page.scratch_page()
        part = Slice(address, binding.fence_address, min(nbytes, binding.fence_nbytes))
        read_all(
            engine,
            peer,
            [part],
            window=Window(1, part.nbytes),
            progress_timeout_s=self._connect_timeout_s,
            clock=self._clock,
        )
        self._check_fence(page.read_scratch(), self._reply.instance_id, self._reply.generation)

    def touch(self, link: Link, page: Page) -> None:
        """Read a few bytes of each of the seed's regions, where the fabric maps a region at its first use.

        Raises SeedLost.
        """
        if not PACES[link.engine.protocol].maps_regions:
            return
        address, _ = page.scratch_page()
        parts = [Slice(address, r.base, min(_TOUCH_NBYTES, r.nbytes)) for r in self._reply.binding.regions]
        read_all(
            link.engine,
            link.peer,
            parts,
            window=Window(_TOUCHES_AT_ONCE, _TOUCHES_AT_ONCE * _TOUCH_NBYTES),
            progress_timeout_s=self._connect_timeout_s,
            clock=self._clock,
        )
