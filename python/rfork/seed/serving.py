"""Serving engines of one rank: one for each fabric, opened at the first publication, memory registered once."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from rfork.binding import Endpoint, Region
from rfork.errors import TransportError
from rfork.manifest import Manifest
from rfork.transports.base import Engine, Transport
from rfork.wire.seed import DigestTable

logger = logging.getLogger(__name__)


class Resolved(Protocol):
    """A shard's memory at this moment; `rfork.inventory.ResolvedShard` is one."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def regions_for(self, extra_tensors: Sequence[Any] = ...) -> tuple[Region, ...]: ...

    def digests(self, chunk_nbytes: int = ...) -> DigestTable: ...

    def synchronize(self) -> None: ...


class Fence(Protocol):
    """The writer's side of I5; `rfork.fence.FencePage` is one. Born closed, and odd whenever it is closed."""

    @property
    def tensor(self) -> Any: ...

    @property
    def address(self) -> int: ...

    @property
    def nbytes(self) -> int: ...

    @property
    def generation(self) -> int: ...

    def open(self, generation: int | None = None) -> int: ...

    def close(self) -> None: ...

    def snapshot(self) -> bytes: ...


def union(regions: Iterable[Region]) -> tuple[Region, ...]:
    """Regions of several shards as one list. Only those that overlap are joined: overlap proves that they share an
    allocation, touching does not.
    """
    out: list[Region] = []
    for region in sorted(regions):
        if out and region.base < out[-1].end:
            out[-1] = Region(out[-1].base, max(out[-1].end, region.end) - out[-1].base)
        else:
            out.append(region)
    return tuple(out)


class ServingEngines:
    """Not thread-safe: the agent holds a lock. `may_be_none`: a rank without any engine has another way to send."""

    def __init__(
        self, transports: Callable[[], Sequence[Transport]], close_timeout_s: float, *, may_be_none: bool = False
    ) -> None:
        self._may_be_none = may_be_none
        self._transports = transports
        self._close_timeout_s = close_timeout_s
        self._engines: list[tuple[Engine, str]] = []
        self._regions: tuple[Region, ...] = ()

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return tuple(Endpoint(engine.protocol, engine.session_id, scope) for engine, scope in self._engines)

    @property
    def regions(self) -> tuple[Region, ...]:
        return self._regions

    def serve(self, regions: tuple[Region, ...]) -> bool:
        """Make exactly these regions readable; True if engines were opened. Raises TransportError if no fabric can."""
        if self._engines:
            self._move_to(regions)
            return False
        problems: list[str] = []
        for transport in self._transports():
            try:
                self._engines.append((self._open(transport, regions), transport.scope))
            except TransportError as error:
                problems.append(f"{transport.protocol}: {error}")
        if not self._engines and (problems or not self._may_be_none):
            raise TransportError("no fabric can serve: " + ("; ".join(problems) or "none is configured"))
        for problem in problems:
            logger.warning("rfork: not served over %s", problem)
        self._regions = regions
        return bool(self._engines)

    def _open(self, transport: Transport, regions: tuple[Region, ...]) -> Engine:
        engine = transport.open()
        try:
            engine.register(regions)
        except BaseException:
            engine.close(self._close_timeout_s)
            raise
        return engine

    def _move_to(self, regions: tuple[Region, ...]) -> None:
        stale = sorted(set(self._regions) - set(regions))
        fresh = sorted(set(regions) - set(self._regions))
        for engine, _ in self._engines:
            # Stale ones first: engines refuse regions that overlap.
            if stale:
                engine.unregister(stale)
            if fresh:
                engine.register(fresh)
        self._regions = regions

    def close(self) -> None:
        """Destroy every engine: the only proof that no peer touches this memory. Raises NotQuiet if one can't be, now
        and each time until it is.
        """
        engines, self._engines, self._regions = self._engines, [], ()
        problem: BaseException | None = None
        for engine, scope in engines:
            try:
                engine.close(self._close_timeout_s)
            except Exception as error:
                self._engines.append((engine, scope))
                problem = problem or error
        if problem is not None:
            raise problem
