"""Mooncake's TransferEngine as a one-sided transport: tcp, rdma, and NVLink inside one host.

What this file relies on, seen with 0.3.13.post1 over TCP and 0.3.14 over NVLink:

- A batch of one entry is the only kind whose status is a true poll, and whose failure means that all of it has ended.
- The first read from a peer does the handshake inside the call, and blocks for a minute if the peer is frozen.
- Only destroying an engine stops late writes; unregistering does not.
- The destructor holds the GIL, and waits for an accept() that wakes once a second.
- Memory is registered, and a peer's handles are opened, in the calling thread's CUDA context; streams belong to the
  thread that submits and end with it, so a read must be submitted by a thread that stays.
- Address family and port range are read once, when the library is loaded, not at `initialize`.
- A port range with no free port left ends the process with a segmentation fault.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

from rfork.binding import ANYWHERE, Region, RegionIndex, Slice
from rfork.errors import NotQuiet, SeedLost, TransportError
from rfork.transports import mooncake_host as host_side
from rfork.transports.base import Engine, TransferState
from rfork.transports.cuda_context import device_context
from rfork.transports.mooncake_import import environment, load_mooncake, load_time_variables

PROTOCOLS = ("nvlink_intra", "rdma", "tcp")
CONNECT_TIMEOUT_S = 10.0
_CLOSE_GRACE_S = 5.0
_CUT_AGAIN_S = 0.2


class MooncakeTransport:
    """One fabric of this process: opens engines that peers reach at `host`.

    `device` is a comma-separated list of NICs (rdma only; empty means: discover). `port_range` bounds both ports of
    every engine, first and last included. `scope` is `host:<boot id>` where only this host can use the fabric.
    """

    def __init__(
        self,
        *,
        protocol: str,
        host: str,
        device: str = "",
        port_range: tuple[int, int] | None = None,
        device_index: int | None = None,
        connect_timeout_s: float = CONNECT_TIMEOUT_S,
        scope: str = ANYWHERE,
    ) -> None:
        if protocol not in PROTOCOLS:
            raise TransportError(f"Mooncake has no protocol {protocol!r} here, choose from {', '.join(PROTOCOLS)}")
        self.protocol = protocol
        self.scope = scope
        self.host = host_side.bare_host(host)
        self._device = device
        self._port_range = port_range
        self._device_index = device_index
        self._connect_timeout_s = connect_timeout_s

    def open(self) -> Engine:
        """A fresh engine, listening. Raises TransportError with what to try."""
        context = device_context(self._device_index)
        with environment(self._variables()), context:
            if self._port_range is not None:
                host_side.require_free_ports(self._port_range)
            raw = load_mooncake().TransferEngine()
            wire_protocol = "tcp" if self.protocol == "tcp" else "rdma"
            status = raw.initialize(host_side.bracketed(self.host), "P2PHANDSHAKE", wire_protocol, self._device)
        if status != 0:
            raise TransportError(
                f"Mooncake could not start a {self.protocol} engine at {self.host} (status {status}). "
                f"Its own log, just above, says why; `rfork doctor` checks the parts."
            )
        engine = MooncakeEngine(raw, self.protocol, self.host, context, self._connect_timeout_s)
        del raw
        problem = host_side.listener_problem(engine.port, self.host, self._port_range)
        if problem is not None:
            engine.close(_CLOSE_GRACE_S)
            raise TransportError(problem)
        return engine

    def _variables(self) -> dict[str, str | None]:
        """Process environment that decides what `initialize` installs; None takes a variable away."""
        return {
            "MC_INTRANODE_NVLINK": "true" if self.protocol == "nvlink_intra" else None,
            "MC_FORCE_TCP": "true" if self.protocol == "tcp" else None,
            **load_time_variables(self.host, self._port_range),
        }

    def __repr__(self) -> str:
        return f"<MooncakeTransport {self.protocol} at {self.host} device={self._device or 'any'} scope={self.scope}>"


class MooncakeEngine:
    """One TransferEngine object, and its only holder, so that dropping it destroys it.

    No method keeps the object in a local variable: the traceback of an error would hold it while the engine is closed.
    """

    def __init__(
        self, raw: Any, protocol: str, host: str, context: AbstractContextManager[object], connect_timeout_s: float
    ) -> None:
        self._raw: Any = raw
        self._destroying: threading.Thread | None = None
        self._is_quiet = False
        self._context = context
        self._connect_timeout_s = connect_timeout_s
        self._regions: list[Region] = []
        self._peers: set[str] = set()
        self.protocol = protocol
        self.port = int(raw.get_rpc_port())
        self.session_id = f"{host_side.bracketed(host)}:{self.port}"

    def register(self, regions: Sequence[Region]) -> None:
        self._must_be_open()
        if not regions:
            return
        try:
            RegionIndex([*self._regions, *regions])
        except ValueError as error:
            raise TransportError(f"can't register: {error}") from error
        with self._context:
            status = self._raw.batch_register_memory([r.base for r in regions], [r.nbytes for r in regions])
        if status != 0:
            total = sum(r.nbytes for r in regions)
            first = regions[0]
            raise TransportError(
                f"Mooncake refused to register {len(regions)} regions of {total} bytes over {self.protocol} "
                f"(status {status}; the first is {first.base:#x}+{first.nbytes}). "
                f"{_REGISTRATION_HINTS.get(self.protocol, '')}"
            )
        self._regions += regions

    def unregister(self, regions: Sequence[Region]) -> None:
        self._must_be_open()
        if not regions:
            return
        with self._context:
            status = self._raw.batch_unregister_memory([r.base for r in regions])
        if status != 0:
            raise TransportError(f"Mooncake could not unregister {len(regions)} regions (status {status})")
        gone = set(regions)
        self._regions = [r for r in self._regions if r not in gone]

    def submit(self, peer: str, part: Slice) -> MooncakeTransfer:
        self._must_be_open()
        if part.nbytes <= 0:
            raise ValueError(f"a read of {part.nbytes} bytes is never submitted")
        batch = self._read(peer, part) if peer in self._peers else self._first_read(peer, part)
        if batch == 0:
            raise SeedLost(f"nobody answers at {peer} over {self.protocol}")
        self._peers.add(peer)
        return MooncakeTransfer(self, batch)

    def _read(self, peer: str, part: Slice) -> int:
        with self._context:
            return int(self._raw.batch_transfer_async_read(peer, [part.local], [part.remote], [part.nbytes]))

    def _first_read(self, peer: str, part: Slice) -> int:
        """The handshake in it has time-outs of its own, up to a minute: past ours its connection is cut under it.

        It runs on the calling thread, since Mooncake keeps CUDA streams by thread and they end with it.
        """
        returned, late = threading.Event(), threading.Event()

        def cut() -> None:
            if returned.wait(self._connect_timeout_s):
                return
            late.set()
            host_side.cut_connections(peer)
            while not returned.wait(_CUT_AGAIN_S):
                host_side.cut_connections(peer)

        thread = threading.Thread(target=cut, name="rfork-handshake", daemon=True)
        thread.start()
        try:
            batch = self._read(peer, part)
        finally:
            returned.set()
            thread.join()
        if batch == 0 and late.is_set():
            raise SeedLost(f"{peer} did not shake hands over {self.protocol} within {self._connect_timeout_s:g} s")
        return batch

    def status_of(self, batch: int) -> int:
        """Mooncake's status of a batch: 1 done, 0 running, negative failed. Frees the batch unless it is 0."""
        self._must_be_open()
        return int(self._raw.transfer_check_status(batch))

    def close(self, timeout_s: float) -> None:
        """Destroy the engine and see its listening port gone, from a helper thread. A call after NotQuiet looks again.

        The destructor holds the GIL for as long as it takes, so no Python thread could bound one that hangs: a watchdog
        outside the interpreter ends the process then, a little after `timeout_s`.
        """
        if self._is_quiet:
            return
        with host_side.exit_unless_quiet_after(timeout_s + _CLOSE_GRACE_S):
            if self._destroying is None:
                self._destroying = self._destroy()
            self._destroying.join(timeout_s)
        if self._destroying.is_alive():
            raise NotQuiet(f"destroying {self!r} took longer than {timeout_s:g} s")
        if host_side.listens(self.port):
            raise NotQuiet(f"{self!r} was dropped but still listens: something else holds the engine")
        self._is_quiet = True

    def _destroy(self) -> threading.Thread:
        host_side.hasten_listener(self.port)
        holder, self._raw = [self._raw], None

        def drop() -> None:
            with self._context:
                holder.clear()

        thread = threading.Thread(target=drop, name="rfork-destroy", daemon=True)
        thread.start()
        return thread

    def _must_be_open(self) -> None:
        if self._raw is None:
            raise TransportError(f"{self!r} is closed")

    def __repr__(self) -> str:
        state = "closed" if self._raw is None else "open"
        return f"<MooncakeEngine {self.protocol} {self.session_id} {state} {len(self._regions)} regions>"


class MooncakeTransfer:
    """One batch of one entry."""

    def __init__(self, engine: MooncakeEngine, batch: int) -> None:
        self._engine = engine
        self._batch: int | None = batch

    def poll(self) -> TransferState:
        if self._batch is None:
            raise RuntimeError("a transfer that has ended must not be polled again")
        status = self._engine.status_of(self._batch)
        if status == 0:
            return TransferState.RUNNING
        self._batch = None
        return TransferState.DONE if status == 1 else TransferState.FAILED


_REGISTRATION_HINTS: Mapping[str, str] = {
    "rdma": "GPU memory needs nvidia_peermem or dmabuf, and no expandable segments (PYTORCH_CUDA_ALLOC_CONF); "
    "host memory needs an unlimited memlock (ulimit -l).",
    "nvlink_intra": "NVLink takes GPU memory only, and from cudaMalloc: expandable segments (PYTORCH_CUDA_ALLOC_CONF) "
    "and the memory saver use another kind.",
}
