"""The rank's side of collective transfers: one group, one port and one thread for each client, beside the scheduler.

A broadcast waits for its client, sends what it was opened for, and ends; whatever happens to it, the rank serves on and
the next client gets one of its own. A change of weights cancels all of them.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from rfork.errors import FenceBroken, NotQuiet, RForkError, SeedLost, TransportError
from rfork.seed.serving import Fence, Resolved
from rfork.seed.turns import quick_turns
from rfork.transports.collective import POLL_S, SEED, Device, Group, Meeting, backend_for, own_address
from rfork.transports.courier import Courier
from rfork.transports.frames import PACES, Frame, Piece, cut, frame_nbytes_for
from rfork.transports.preamble import Header
from rfork.wire.collective import GroupEnded, GroupOrder

logger = logging.getLogger(__name__)

FLOOR_NBYTES_PER_S = 10_000_000
"""A client that takes less than this on the whole is given up, however steady its progress."""

_BACKLOG = 16
_GOODBYE_S = 0.5
Parameters = dict[str, tuple[int, int, int]]


class Source(NamedTuple):
    """What a broadcast reads. Holding it keeps the memory alive. `parameters` is SGLang's own table, or why not."""

    resolved: Resolved
    fence: Fence
    parameters: Parameters | str


class Limits(NamedTuple):
    """Seconds for a client to come, for one frame, for a group to end; how many groups a rank holds at a time."""

    connect_timeout_s: float = 10.0
    progress_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
    max_groups: int = 8


class NoGroup(RForkError):
    """No group was opened. `reason` is the word that the client is told."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Broadcasts:
    """All broadcasts of one rank. Thread-safe."""

    def __init__(
        self, device: Device, limits: Limits | None = None, *, port_range: tuple[int, int] | None = None
    ) -> None:
        self._device, self._limits, self._port_range = device, limits or Limits(), port_range
        self._groups: dict[str, Broadcast] = {}
        self._lock = threading.Lock()

    @property
    def num_groups(self) -> int:
        with self._lock:
            return len(self._groups)

    def open(self, order: GroupOrder, source: Source, ended: Callable[[GroupEnded], None]) -> int:
        """Listen for the client of `order`; returns the port, at once. `ended` hears of the end. Raises NoGroup."""
        self._check(order, source)
        self._forget_ended()
        with self._lock:
            if len(self._groups) >= self._limits.max_groups:
                raise NoGroup("busy", f"this rank holds {len(self._groups)} groups, which is all that it may")
            listening = self._listen(order.bind_host, order.port)

            def told(report: GroupEnded) -> None:
                if broadcast.quiet.is_set():
                    self._forget(order.group)
                ended(report)

            broadcast = Broadcast(order, source, self._device, listening, self._limits, told)
            self._groups[order.group] = broadcast
        broadcast.start()
        return broadcast.port

    def _forget_ended(self) -> None:
        """Those whose end came after its deadline, so that it was not seen then."""
        with self._lock:
            late = [(name, broadcast) for name, broadcast in self._groups.items() if broadcast.is_stuck]
        for name, broadcast in late:
            if broadcast.wait_quiet(0.0):
                self._forget(name)

    def _forget(self, group: str) -> None:
        with self._lock:
            self._groups.pop(group, None)

    def _check(self, order: GroupOrder, source: Source) -> None:
        try:
            backend = backend_for(self._device)
        except TransportError as error:
            raise NoGroup("not_understood", str(error)) from None
        if order.backend != backend:
            raise NoGroup("not_understood", f"these weights are on {self._device}: {backend}, not {order.backend}")
        if order.parameters_only and (problem := uncovered(source)):
            raise NoGroup("not_for_stock_clients", f"a client without R-Fork would misread this rank: {problem}")

    def _listen(self, host: str, port: int) -> socket.socket:
        low, high = self._port_range if not port and self._port_range else (port, port)
        problem: OSError | None = None
        for candidate in range(low, high + 1):
            try:
                family = socket.AF_INET6 if ":" in host else socket.AF_INET
                both = host == "::"  # as the seed's listener
                return socket.create_server((host, candidate), family=family, backlog=_BACKLOG, dualstack_ipv6=both)
            except OSError as error:
                problem = error
        raise NoGroup("busy", f"can't listen on {host} port {low if low == high else f'{low}-{high}'}: {problem}")

    def send(self, group: str) -> bool:
        """Let a broadcast begin once its client is there. False if there is none of that name any more."""
        with self._lock:
            found = self._groups.get(group)
        if found is not None:
            found.go.set()
        return found is not None

    def cancel(self, why: str) -> None:
        """Have every broadcast give up; returns at once."""
        with self._lock:
            broadcasts = list(self._groups.values())
        for broadcast in broadcasts:
            broadcast.cancel(why)

    def close(self, why: str) -> None:
        """Cancel, and return once none of them touches memory. Raises NotQuiet if that takes too long."""
        self.cancel(why)
        with self._lock:
            broadcasts = dict(self._groups)
        deadline = time.monotonic() + self._limits.close_timeout_s
        for name, broadcast in broadcasts.items():
            if broadcast.wait_quiet(max(0.0, deadline - time.monotonic())):
                self._forget(name)
            else:
                raise NotQuiet(
                    f"a group still reads this rank's weights {self._limits.close_timeout_s:g} s after {why}"
                )


class Broadcast:
    """One client's group. `quiet` is set whenever it touches no weights; not where its end could not be seen."""

    def __init__(
        self,
        order: GroupOrder,
        source: Source,
        device: Device,
        listening: socket.socket,
        limits: Limits,
        ended: Callable[[GroupEnded], None],
    ) -> None:
        self.port = int(listening.getsockname()[1])
        self.go, self.quiet = threading.Event(), threading.Event()
        self.quiet.set()
        self._order, self._device, self._limits, self._ended = order, device, limits, ended
        self._source: Source | None = source
        self._listening = listening
        self._cancelled: str | None = None
        self._lock = threading.Lock()
        self._nbytes = 0
        self._group: Group | None = None
        self._deadline_s = float("inf")
        self._thread = threading.Thread(target=self._run, name=f"rfork-group-{self.port}", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def cancel(self, why: str) -> None:
        with self._lock:
            self._cancelled = self._cancelled or why
            self.go.set()

    @property
    def is_stuck(self) -> bool:
        """Whether it has given up on a group that had not ended then."""
        return self._group is not None and not self._thread.is_alive()

    def wait_quiet(self, timeout_s: float) -> bool:
        """Whether it touches no weights, after `timeout_s` at most."""
        group = self._group
        if self._thread.is_alive() or group is None:
            return self.quiet.wait(timeout_s)
        try:
            group.close(timeout_s)
        except NotQuiet:
            return False
        self._let_go()
        return True

    def _let_go(self) -> None:
        self._source = self._group = None
        self.quiet.set()

    def _run(self) -> None:
        started_s = time.monotonic()
        why, has_ended = "", True
        try:
            self._meet_and_send()
        except NotQuiet as error:
            why, has_ended = str(error), False
        except RForkError as error:
            why = str(error)
        except Exception as error:
            logger.exception("rfork: the group at port %d failed", self.port)
            why = f"{type(error).__name__}: {error}"
        finally:
            if has_ended:
                self._let_go()
        seconds = time.monotonic() - started_s
        logger.info(
            "rfork: group of %s at port %d ended after %d bytes in %.3f s: %s",
            *(self._order.shard.key, self.port, self._nbytes, seconds, why or "its client has everything"),
        )
        self._ended(GroupEnded(group=self._order.group, why=why, nbytes=self._nbytes, seconds=seconds))

    def _meet_and_send(self) -> None:
        order, limits = self._order, self._limits
        stock = order.parameters_only
        # The store talks to itself first, so its own address must be one that can be dialled.
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(order.bind_host, order.bind_host)  # noqa: S104
        group = self._group = Group(
            Meeting(host, self.port, order.store_name, own_address(order.interface)),
            SEED,
            self._device,
            join_timeout_s=limits.connect_timeout_s,
            operation_timeout_s=min(limits.progress_timeout_s, limits.close_timeout_s / 2),
            listening=self._listening,
            greet=not stock,
            peers=order.peers,
        )
        try:
            if stock:
                group.barrier(limits.connect_timeout_s, self._check)
            if not self.go.wait(limits.connect_timeout_s):
                raise SeedLost(f"nobody asked to send within {limits.connect_timeout_s:g} s")
            self._begin()
            if stock:
                self._send_parameters(group)
            else:
                self._send_all(group)
        finally:
            group.close(limits.close_timeout_s)

    def _begin(self) -> None:
        with self._lock:
            if self._cancelled is None:
                self.quiet.clear()
        self._check()
        source = self._the_source
        nbytes = source.resolved.manifest.nbytes
        self._deadline_s = time.monotonic() + self._limits.progress_timeout_s + nbytes / FLOOR_NBYTES_PER_S
        if source.fence.generation != self._order.generation:
            raise FenceBroken(f"the fence is at {source.fence.generation}, the lease at {self._order.generation}")

    @property
    def _the_source(self) -> Source:
        assert self._source is not None
        return self._source

    def _send_all(self, group: Group) -> None:
        """Header, every byte of the manifest, trailer; then wait until the client says that it has them."""
        manifest, fence = self._the_source.resolved.manifest, self._the_source.fence
        pace = PACES[group.backend]
        frame_nbytes = frame_nbytes_for(manifest.nbytes, pace.frame_nbytes)
        courier = self._courier(group, self._the_source.resolved.addresses)
        head = Header(fence.snapshot(), manifest.digest, manifest.nbytes, frame_nbytes, pace.lone_nbytes)
        with quick_turns():
            courier.word(head.encode())
            courier.carry(cut(manifest.group_nbytes, frame_nbytes, pace.lone_nbytes), self._order.limit_gbps)
            courier.word(fence.snapshot())
        deadline = time.monotonic() + self._limits.progress_timeout_s
        while not group.has_heard("done"):
            self._check()
            if time.monotonic() > deadline:
                raise SeedLost("its client did not say that it has everything")
            time.sleep(POLL_S)

    def _send_parameters(self, group: Group) -> None:
        """What SGLang's own client waits for: each named parameter by itself, in the order of its model."""
        table, fence = self._the_source.parameters, self._the_source.fence
        assert isinstance(table, dict)
        sizes = [(address, count * width) for address, count, width in table.values()]
        frames: list[Frame] = [(Piece(i, 0, nbytes),) for i, (_, nbytes) in enumerate(sizes)]
        with quick_turns():
            self._courier(group, [address for address, _ in sizes]).carry(frames)
        if fence.generation != self._order.generation:
            raise FenceBroken("the weights changed while a client without R-Fork, which can't know, received them")
        self.go.clear()
        self.go.wait(_GOODBYE_S)  # its last bytes may still be on their way

    def _courier(self, group: Group, addresses: tuple[int, ...] | list[int]) -> Courier:
        timeout_s = self._limits.progress_timeout_s
        return Courier(group, addresses, progress_timeout_s=timeout_s, check=self._check, on_bytes=self._count)

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes

    def _check(self) -> None:
        if self._cancelled is not None:
            raise FenceBroken(f"given up: {self._cancelled}")
        if time.monotonic() > self._deadline_s:
            raise SeedLost(f"slower than {FLOOR_NBYTES_PER_S / 1e6:g} MB/s on the whole: given up")


def uncovered(source: Source) -> str | None:
    """Why the named parameters alone, in order, would not make a client's model whole; None where they do."""
    manifest, table = source.resolved.manifest, source.parameters
    if isinstance(table, str):
        return table
    # Plain values need no carrying here: a table is there only for a layout that the constructor alone makes.
    if manifest.inline:
        return f"{manifest.inline[0].name} is not on this rank's device, and inference reads it"
    if empty := [t.name for t in manifest.tensors if t.group < 0 and t.kind == "parameter"]:
        return f"{empty[0]} is empty, and its place in the order is not certain"
    whole = {(address, count * width) for address, count, width in table.values()}
    groups = zip(source.resolved.addresses, manifest.group_nbytes, strict=True)
    missing = {g for g, extent in enumerate(groups) if extent not in whole}
    names = [t.name for t in manifest.tensors if t.group in missing]
    return f"{names[0]} is no named parameter of its own" if names else None
