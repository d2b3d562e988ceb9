"""Loop-back: two processes of each protocol that this host would serve on, and a real read of 1 KiB between them.

Two processes, as a seed and its client are: NVLink maps another process's memory, and can't map one's own.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from rfork.binding import Region, Slice
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.demo.processes import tied
from rfork.doctor.finding import Finding, fail, ok, warn
from rfork.errors import RForkError
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.read import Window, read_all
from rfork.transports.select import gather_facts, serving_transports

SUBJECT = "loop-back"
NBYTES = 1024
_START_S = 60.0
_PROGRESS_S = 10.0
_CLOSE_S = 15.0
_REMEDIES = {
    "tcp": "is the advertised address this host's own, and does a firewall let this host reach itself at any port?",
    "rdma": "check `ibv_devinfo`, `ulimit -l` (unlimited), and nvidia_peermem or dmabuf; `protocol: tcp` works without",
    "nvlink_intra": "check peer access and that no expandable segments are used; `protocol: tcp` works without",
}


def probe(config: Config) -> list[Finding]:
    device = _device()
    try:
        transports = serving_transports(config, gather_facts(device, 0, config))
    except RForkError as error:
        return [fail(SUBJECT, str(error), "choose another `protocol` in the configuration")]
    return [_read(config, transport, device, is_last=transport is transports[-1]) for transport in transports]


def _device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(config: Config, transport: MooncakeTransport, device: str, *, is_last: bool) -> Finding:
    where = f"{transport.protocol} at {transport.host}"
    try:
        took_s = _read_once(config, transport, device)
    except RForkError as error:
        found = fail if is_last else warn
        return found(SUBJECT, f"{where}: {error}", _REMEDIES[transport.protocol])
    return ok(SUBJECT, f"{where}: {NBYTES} bytes read and compared, {1e3 * took_s:.1f} ms with the handshake")


def _read_once(config: Config, transport: MooncakeTransport, device: str) -> float:
    """Seconds for connection and read. Raises RForkError, also where the bytes differ."""
    expected = secrets.token_bytes(NBYTES)
    here = _Memory(device, bytes(NBYTES))
    with _seed(config, transport.protocol, device, expected) as (session_id, base):
        client = transport.open()
        try:
            client.register([here.region])
            started_s = time.monotonic()
            part = Slice(here.region.base, base, NBYTES)
            window = Window(1, NBYTES)
            read_all(client, session_id, [part], window=window, progress_timeout_s=_PROGRESS_S, clock=SystemClock())
            took_s = time.monotonic() - started_s
        finally:
            client.close(_CLOSE_S)
    if here.content() != expected:
        raise RForkError("the bytes that arrived are not those that were there")
    return took_s


class _Order(msgspec.Struct, frozen=True):
    """What the other process shall serve."""

    config: Config
    protocol: str
    device: str
    content: bytes


class _Place(msgspec.Struct, frozen=True):
    """Where it does; `problem` says why not."""

    session_id: str = ""
    base: int = 0
    problem: str = ""


@contextlib.contextmanager
def _seed(config: Config, protocol: str, device: str, content: bytes) -> Iterator[tuple[str, int]]:
    """Session id and address of a process that serves `content` inside this block. Raises RForkError."""
    read_fd, write_fd = os.pipe()
    command = tied(["-m", "rfork.doctor.probes.loopback", str(write_fd)])
    with (
        open(read_fd, "rb", buffering=0) as answer,
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, pass_fds=[write_fd]) as process,
    ):
        os.close(write_fd)
        try:
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):  # then the answer ends, too
                process.stdin.write(msgspec.json.encode(_Order(config, protocol, device, content)) + b"\n")
                process.stdin.flush()
            if not select.select([answer], [], [], _START_S)[0]:
                raise RForkError(f"the process at the other end was not there after {_START_S:g} s")
            place = _place(answer.readline())
            if place.problem:
                raise RForkError(f"the other end: {place.problem}")
            yield place.session_id, place.base
        finally:
            process.kill()


def _place(line: bytes) -> _Place:
    try:
        return msgspec.json.decode(line, type=_Place)
    except msgspec.MsgspecError:
        raise RForkError("the process at the other end died while it opened its engine; its own log is above") from None


def serve(fd: int) -> None:
    """The other process: serve what standard input says, until that ends or somebody ends us."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=_Order)
    try:
        facts = gather_facts(order.device, 0, order.config)
        (transport,) = (t for t in serving_transports(order.config, facts) if t.protocol == order.protocol)
        memory, engine = _Memory(order.device, order.content), transport.open()
        engine.register([memory.region])
        place = _Place(engine.session_id, memory.region.base)
    except RForkError as error:
        place = _Place(problem=str(error))
    os.write(fd, msgspec.json.encode(place) + b"\n")
    sys.stdin.buffer.read()


class _Memory:
    """1 KiB on the device that weights would be on."""

    def __init__(self, device: str, content: bytes) -> None:
        self._tensor: Any = None
        if device == "cpu":
            self._buffer = ctypes.create_string_buffer(content, NBYTES)
            base = ctypes.addressof(self._buffer)
        else:
            import torch

            self._tensor = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
            torch.cuda.synchronize()
            base = self._tensor.data_ptr()
        self.region = Region(base, NBYTES)

    def content(self) -> bytes:
        return self._buffer.raw if self._tensor is None else bytes(self._tensor.cpu().tolist())


if __name__ == "__main__":
    serve(int(sys.argv[1]))
