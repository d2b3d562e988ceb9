"""Loop-back: two engines of each protocol that this host would serve on, and a real read of 1 KiB between them."""

from __future__ import annotations

import ctypes
import secrets
import time
from typing import Any

from rfork.binding import Region, Slice
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.doctor.finding import Finding, fail, ok, warn
from rfork.errors import RForkError
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.read import Window, read_all
from rfork.transports.select import gather_facts, serving_transports

SUBJECT = "loop-back"
NBYTES = 1024
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
        transports = serving_transports(config, gather_facts(device, 0))
    except RForkError as error:
        return [fail(SUBJECT, str(error), "choose another `protocol` in the configuration")]
    return [_read(transport, device, is_last=transport is transports[-1]) for transport in transports]


def _device() -> str:
    try:
        import torch
    except ImportError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def _read(transport: MooncakeTransport, device: str, *, is_last: bool) -> Finding:
    where = f"{transport.protocol} at {transport.host}"
    try:
        took_s = _read_once(transport, device)
    except RForkError as error:
        found = fail if is_last else warn
        return found(SUBJECT, f"{where}: {error}", _REMEDIES[transport.protocol])
    return ok(SUBJECT, f"{where}: {NBYTES} bytes read and compared, {1e3 * took_s:.1f} ms with the handshake")


def _read_once(transport: MooncakeTransport, device: str) -> float:
    """Seconds for connection and read. Raises RForkError, also where the bytes differ."""
    expected = secrets.token_bytes(NBYTES)
    there, here = _Memory(device, expected), _Memory(device, bytes(NBYTES))
    seed = transport.open()
    try:
        client = transport.open()
        try:
            seed.register([there.region])
            client.register([here.region])
            started_s = time.monotonic()
            part = Slice(here.region.base, there.region.base, NBYTES)
            window = Window(1, NBYTES)
            read_all(
                client, seed.session_id, [part], window=window, progress_timeout_s=_PROGRESS_S, clock=SystemClock()
            )
            took_s = time.monotonic() - started_s
        finally:
            client.close(_CLOSE_S)
    finally:
        seed.close(_CLOSE_S)
    if here.content() != expected:
        raise RForkError("the bytes that arrived are not those that were there")
    return took_s


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
