"""Two-member groups of torch.distributed: one rank of a seed broadcasts, the same rank of one client receives.

A group is made directly, apart from every group of the engine, on a store of its own that the seed's rank listens on;
so it can be torn down on any path, on either side, and nothing else notices. Nothing here waits without a deadline.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from rfork.errors import NotQuiet, SeedLost, TransportError
from rfork.transports.addresses import advertise_host
from rfork.transports.frames import PACES
from rfork.transports.mooncake_import import environment
from rfork.transports.peer_address import check_told

Device = torch.device
SEED, CLIENT = 0, 1
BACKENDS = {"cuda": "nccl", "cpu": "gloo", "npu": "hccl"}
POLL_S = 0.001

_NCCL_ENVIRONMENT = {
    # The watchdog may note that a peer died; it must not end this process for it, which serves others.
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_BLOCKING_WAIT": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_PROPAGATE_ERROR": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "250",  # its pause after an error is four times this
}
_ErrorType = torch._C._distributed_c10d.ErrorType
_NEVER = datetime.timedelta(days=7)  # NCCL's own time-out; ours come first, and abort


def backend_for(device: torch.device) -> str:
    """nccl, gloo or hccl. Raises TransportError for a device that torch has no collectives for here."""
    try:
        return BACKENDS[device.type]
    except KeyError:
        raise TransportError(
            f"no collective backend for a {device.type} device; known: {', '.join(BACKENDS)}"
        ) from None


def tensor_at(address: int, nbytes: int, device: torch.device) -> torch.Tensor:
    """Bytes of memory that somebody else owns and keeps alive, as a flat uint8 tensor."""
    storage = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


class Meeting(NamedTuple):
    """Where two members find each other. `name` keeps groups on one store apart; whoever does not know it finds none.

    `interface` is the local address that gloo's connections use.
    """

    host: str
    port: int
    name: str
    interface: str


def local_address_towards(host: str, port: int, timeout_s: float) -> str:
    """The address of this host that its calls of `host` come from. It is called once: of the addresses that a name has,
    the one that answers counts. Raises OSError.
    """
    with socket.create_connection((host, port), timeout_s) as probe:
        return str(probe.getsockname()[0])


def own_address(wanted: str) -> str:
    """`wanted` if it is an address of this host, else one that is: gloo binds to it, then tells the other member."""
    try:
        with socket.create_server((wanted, 0), family=socket.AF_INET6 if ":" in wanted else socket.AF_INET):
            return wanted
    except OSError:
        return advertise_host()


class _ToldAddresses(dist.Store):  # type: ignore[misc]
    """The store of a gloo group, for gloo alone: what the other member told is read only if `check_told` lets it pass.

    What this member told is answered from here, so that nobody can have replaced it. Methods that gloo does not call
    are left out: torch's own raise, or come down to these.
    """

    def __init__(self, inner: Any, peers: Sequence[str] | None) -> None:
        super().__init__()
        self._inner, self._peers = inner, peers
        self._own: dict[str, bytes] = {}

    def set(self, key: str, value: Any) -> None:
        self._own[key] = bytes(value)
        self._inner.set(key, value)

    def get(self, key: str) -> bytes:
        if key in self._own:
            return self._own[key]
        value = bytes(self._inner.get(key))
        check_told(value, next(iter(self._own.values()), b""), self._peers)
        return value

    def wait(self, keys: list[str], *timeout: datetime.timedelta) -> None:
        self._inner.wait(keys, *timeout)


class _Together:
    """Broadcasts started in one call, as one piece of work. Our stream is behind them, else the host."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return self._event is None or bool(self._event.query())

    def wait(self) -> None:
        """Nothing: what went wrong shows in the group's health."""


class Group:
    """One member's end. Any thread may `close`; all else is for the one thread that works."""

    def __init__(
        self,
        meeting: Meeting,
        member: int,
        device: torch.device,
        *,
        join_timeout_s: float,
        operation_timeout_s: float,
        listening: socket.socket | None = None,
        greet: bool = True,
        peers: Sequence[str] | None = None,
    ) -> None:
        """Join, within `join_timeout_s`. The seed brings the `listening` socket of its store, which is taken over.

        `operation_timeout_s` is what gloo gives one operation: closing may have to wait for it. Both members greet each
        other first, which SGLang's own client does not. `peers`: the networks that gloo may dial the other in, if not
        all. Raises SeedLost if the other member does not come, or tells another address.
        """
        self.device, self.backend, self.member = device, backend_for(device), member
        self._join_timeout_s, self._operation_timeout_s = join_timeout_s, operation_timeout_s
        self._greet, self._peers = greet, peers
        self._works: deque[Any] = deque()
        self._stream: Any = None
        self._told: Any = None  # torch keeps its store, but not the part of it that is Python
        self._group: Any = None
        self._wrapper: Any = None
        self._ended = threading.Event()
        try:
            with self.on_device():
                self._store = self._open_store(meeting, listening)
                self._group = self._make(dist.PrefixStore(meeting.name, self._store), meeting.interface)
        except (dist.DistError, RuntimeError) as error:
            self._group = self._store = None
            raise SeedLost(f"no {self.backend} group at {meeting.host}:{meeting.port}: {_first_line(error)}") from None

    def _open_store(self, meeting: Meeting, listening: socket.socket | None) -> Any:
        given = {} if listening is None else {"master_listen_fd": listening.detach()}
        return dist.TCPStore(
            meeting.host,
            meeting.port,
            2,
            listening is not None,
            datetime.timedelta(seconds=self._join_timeout_s),
            wait_for_workers=False,
            **given,
        )

    def _make(self, store: Any, interface: str) -> Any:
        if self._greet:  # both are here before anything is made that can't be given up half-way
            store.set(f"here/{self.member}", b"1")
            store.wait([f"here/{1 - self.member}"], datetime.timedelta(seconds=self._join_timeout_s))
        return self._process_group(store, interface)

    def _process_group(self, store: Any, interface: str) -> Any:
        """A process group of two that torch's registry of groups knows nothing of."""
        if self.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = _NEVER
            options.config.blocking = 0  # so that connecting can time out
            # Members connect in their first operation; torch waits inside it, half an hour by default. It reads this
            # once in the life of the process, for communicators that don't block: ours alone, unless the user wants it.
            os.environ.setdefault("TORCH_NCCL_NONBLOCKING_TIMEOUT", str(max(1, round(self._join_timeout_s))))
            with environment(_NCCL_ENVIRONMENT):
                return dist.ProcessGroupNCCL(store, self.member, 2, options)
        if self.backend == "hccl":
            from torch_npu._C._distributed_c10d import ProcessGroupHCCL  # type: ignore[import-not-found]

            options = ProcessGroupHCCL.Options()
            options._timeout = _NEVER
            return ProcessGroupHCCL(store, self.member, 2, options)
        self._told = _ToldAddresses(store, self._peers)
        options = dist.ProcessGroupGloo._Options()
        # Not lazily, whatever TORCH_GLOO_LAZY_INIT says: both members have to connect in the same way, and now.
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=interface, lazy_init=False)]
        options._timeout = datetime.timedelta(seconds=self._operation_timeout_s)
        options._threads = PACES[self.backend].flying_frames
        return dist.ProcessGroupGloo(self._told, self.member, 2, options)

    @contextlib.contextmanager
    def on_device(self) -> Iterator[None]:
        """This device and a stream of our own for it; no autograd, whatever the thread came with."""
        with torch.inference_mode(False), torch.no_grad():
            if self.device.type == "cpu":
                yield
                return
            module = torch.get_device_module(self.device)
            with module.device(self.device):
                self._stream = self._stream or module.Stream(device=self.device)
                with module.stream(self._stream):
                    yield

    def tell(self, word: str) -> None:
        """Leave a word for the other member."""
        self._store.set(f"{word}/{self.member}", b"1")

    def has_heard(self, word: str) -> bool:
        """Whether the other member left this word. Raises SeedLost where the store is gone."""
        try:
            return bool(self._store.check([f"{word}/{1 - self.member}"]))
        except (dist.DistError, RuntimeError) as error:
            raise SeedLost(f"the store is gone: {_first_line(error)}") from None

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Start to send (the seed) or fill (the client) a tensor; the next `finish` ends the oldest."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = SEED, 0, True
        try:
            self._works.append(self._group.broadcast([tensor], options))
        except RuntimeError as error:
            raise SeedLost(f"the {self.backend} group broke: {_first_line(error)}") from None

    def broadcast_together(self, tensors: Sequence[torch.Tensor]) -> None:
        """Start one broadcast for each tensor in a single call, for NCCL: one turn of the interpreter for all of them.

        On the wire they are what as many calls of `broadcast` are; one `finish` ends all of them.
        """
        try:
            dist._broadcast_coalesced(self._wrapped(), list(tensors), 1, SEED)
        except RuntimeError as error:
            raise SeedLost(f"the {self.backend} group broke: {_first_line(error)}") from None
        self._works.append(_Together(self._stream and self._stream.record_event()))

    def _wrapped(self) -> Any:
        """The group as the kind that torch's functions for several tensors take; no registry knows of it either."""
        if self._wrapper is None:
            kind = getattr(dist.ProcessGroup.BackendType, self.backend.upper())
            self._wrapper = dist.ProcessGroup(self._store, self.member, 2)
            self._wrapper._set_default_backend(kind)
            self._wrapper._register_backend(torch.device(self.device.type), kind, self._group)
        return self._wrapper

    def finish(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Wait for the oldest broadcast. `check` is called meanwhile, and raises to give up.

        Raises SeedLost if it failed, or is not over after `timeout_s`.
        """
        work = self._works[0]
        deadline = time.monotonic() + timeout_s
        while not work.is_completed():
            check()
            self._check_health()
            if time.monotonic() > deadline:
                raise SeedLost(f"no progress over {self.backend} in {timeout_s:g} s")
            time.sleep(POLL_S)
        try:
            work.wait()  # raises what went wrong; on a device it also orders our stream behind the transfer
        except RuntimeError as error:
            self._works.popleft()
            raise SeedLost(f"the {self.backend} group broke: {_first_line(error)}") from None
        self._works.popleft()
        self._check_health()

    def _check_health(self) -> None:
        """NCCL reports an operation that its peer's death cut off as over, and the error apart from it."""
        if self.backend == "nccl" and (error := self._group.get_error()) != _ErrorType.SUCCESS:
            raise SeedLost(f"the nccl group broke: {error}")

    def barrier(self, timeout_s: float, check: Callable[[], None]) -> None:
        """Meet the other member once, as SGLang's own client does after joining."""
        options = dist.BarrierOptions()
        if self.device.index is not None:
            options.device_ids = [self.device.index]  # else NCCL takes the device that has the member's number
        try:
            with self.on_device():
                self._works.append(self._group.barrier(options))
        except RuntimeError as error:
            raise SeedLost(f"the {self.backend} group broke: {_first_line(error)}") from None
        self.finish(timeout_s, check)

    @property
    def num_flying(self) -> int:
        return len(self._works)

    def close(self, timeout_s: float) -> None:
        """End the group. On return nothing reads or writes through it, so memory may be freed. Idempotent.

        Raises NotQuiet if that can't be proven within `timeout_s`; another call waits for the same end.
        """
        group, self._group = self._group, None
        self._wrapper = None
        if group is not None:
            ending = deque([group])
            del group
            threading.Thread(target=self._end, args=(ending,), name="rfork-group-end", daemon=True).start()
        if not self._ended.wait(timeout_s):
            raise NotQuiet(
                f"a {self.backend} group did not end within {timeout_s:g} s: its memory may still be written to"
            )

    def _end(self, ending: deque[Any]) -> None:
        """Take the group out of `ending` and end it. Of gloo nothing is left to free afterwards: torch does that
        without the interpreter's lock, and a thread that wants it back while the process exits ends in an abort.

        Freeing NCCL's group waits for torch's watchdog, which pauses for a minute when it has seen an error (on a GPU a
        killed client held its group for so long); it touches no memory of ours, so nobody waits for it.
        """
        with contextlib.suppress(RuntimeError):
            ending[0].abort()
        works, self._works = self._works, deque()
        while works:
            while not works[0].is_completed():  # gloo ends an operation when its peer or its own time-out does
                time.sleep(POLL_S)
            works.popleft()
        if self._stream is not None:
            with contextlib.suppress(RuntimeError):
                self._stream.synchronize()
        if self.backend == "gloo":
            ending.clear()
        self._store = self._told = None
        self._ended.set()
        ending.clear()

    def __repr__(self) -> str:
        return f"<Group {self.backend} member {self.member} {'open' if self._group else 'closed'}>"


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
