"""What a one-sided transport is: engines that register memory and read a peer's.

One engine serves a shard for its whole life; another is made for each pull attempt and destroyed with it, since
destroying is the only proof that nothing writes into our memory any more.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from typing import Protocol

from rfork.binding import Region, Slice


class TransferState(enum.Enum):
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"


class Transfer(Protocol):
    """One read in flight. After DONE or FAILED it must not be polled again."""

    def poll(self) -> TransferState: ...


class Engine(Protocol):
    """One engine of one fabric in this process.

    `protocol` is the path that the bytes really take (tcp, rdma, nvlink_intra, memory); `session_id` is its address for
    peers. Not thread-safe: one thread drives an engine.
    """

    @property
    def protocol(self) -> str: ...

    @property
    def session_id(self) -> str: ...

    def register(self, regions: Sequence[Region]) -> None:
        """Make memory readable (and writable) by the engine. Raises TransportError naming the region."""

    def unregister(self, regions: Sequence[Region]) -> None: ...

    def submit(self, peer: str, part: Slice) -> Transfer:
        """Start one read from `peer` (a session id), never of zero bytes.

        The first read from a peer connects, in bounded time. Raises SeedLost if the peer can't be reached.
        """

    def close(self, timeout_s: float) -> None:
        """Destroy. On return nothing reads or writes our memory through it.

        Closing a closed engine does nothing; memory need not be unregistered first, and never is while a transfer runs.
        Raises NotQuiet if silence can't be proven in time.
        """


class Transport(Protocol):
    """A fabric: makes engines."""

    @property
    def protocol(self) -> str: ...

    @property
    def scope(self) -> str:
        """`any`, or `host:<boot id>`: who can use an endpoint of this fabric."""

    def open(self) -> Engine:
        """A fresh engine. Raises TransportError if the fabric can't be used here, with what to try."""
