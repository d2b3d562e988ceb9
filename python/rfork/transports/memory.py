"""The reference transport: peers are engines of the same process, and real bytes move.

It is as strict as the strictest fabric, so that what works here works there: both ends must be registered, one slice
lies in one region on each side, nothing is empty, a closed peer fails. A read moves when it is polled, not when it is
submitted; one that nobody polls never lands, as on a fabric whose engine was destroyed.
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence

from rfork.binding import ANYWHERE, Region, RegionIndex, Slice
from rfork.errors import SeedLost, TransportError
from rfork.transports.base import Engine, TransferState


class MemoryFabric:
    """The wire between engines: who is open under which session id."""

    def __init__(self, name: str = "memory") -> None:
        self._name = name
        self._numbers = itertools.count(1)
        self._open: dict[str, MemoryEngine] = {}

    def attach(self, engine: MemoryEngine) -> str:
        session_id = f"{self._name}:{next(self._numbers)}"
        self._open[session_id] = engine
        return session_id

    def detach(self, session_id: str) -> None:
        self._open.pop(session_id, None)

    def find(self, session_id: str) -> MemoryEngine | None:
        return self._open.get(session_id)

    @property
    def num_open(self) -> int:
        """Engines not closed yet: what a leak test looks at."""
        return len(self._open)

    @property
    def num_regions(self) -> int:
        """What they have registered."""
        return sum(engine.num_regions for engine in self._open.values())


class MemoryTransport:
    """Makes engines on one fabric."""

    protocol = "memory"
    scope = ANYWHERE

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric

    def open(self) -> Engine:
        return MemoryEngine(self._fabric)


class MemoryEngine:
    protocol = "memory"

    def __init__(self, fabric: MemoryFabric) -> None:
        self._fabric = fabric
        self._regions: set[Region] = set()
        self._index = RegionIndex(())
        self._is_open = True
        self.session_id = fabric.attach(self)

    def register(self, regions: Sequence[Region]) -> None:
        self._must_be_open()
        try:
            self._index = RegionIndex([*self._regions, *regions])
        except ValueError as error:
            raise TransportError(f"can't register: {error}") from error
        self._regions.update(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        unknown = [r for r in regions if r not in self._regions]
        if unknown:
            raise TransportError(f"{unknown[0].base:#x}+{unknown[0].nbytes} was never registered")
        self._regions.difference_update(regions)
        self._index = RegionIndex(list(self._regions))

    @property
    def num_regions(self) -> int:
        return len(self._regions)

    def holds(self, address: int, nbytes: int) -> bool:
        """Whether [address, address + nbytes) lies in one registered region of an open engine."""
        try:
            self._index.find(address, nbytes)
        except ValueError:
            return False
        return self._is_open

    def submit(self, peer: str, part: Slice) -> MemoryTransfer:
        self._must_be_open()
        if part.nbytes <= 0:
            raise ValueError(f"a read of {part.nbytes} bytes is never submitted")
        if self._fabric.find(peer) is None:
            raise SeedLost(f"nobody answers at {peer}")
        return MemoryTransfer(self, peer, part)

    def move(self, peer: str, part: Slice) -> bool:
        """Copy one slice now; False where either end refuses."""
        remote = self._fabric.find(peer)
        if remote is None or not remote.holds(part.remote, part.nbytes) or not self.holds(part.local, part.nbytes):
            return False
        ctypes.memmove(part.local, part.remote, part.nbytes)
        return True

    def close(self, timeout_s: float) -> None:
        self._is_open = False
        self._fabric.detach(self.session_id)

    def _must_be_open(self) -> None:
        if not self._is_open:
            raise TransportError(f"engine {self.session_id} is closed")

    def __repr__(self) -> str:
        return f"<MemoryEngine {self.session_id} {'open' if self._is_open else 'closed'} {len(self._regions)} regions>"


class MemoryTransfer:
    def __init__(self, engine: MemoryEngine, peer: str, part: Slice) -> None:
        self._engine = engine
        self._peer = peer
        self._part = part
        self._ended = False

    def poll(self) -> TransferState:
        if self._ended:
            raise RuntimeError("a transfer that has ended must not be polled again")
        self._ended = True
        return TransferState.DONE if self._engine.move(self._peer, self._part) else TransferState.FAILED
