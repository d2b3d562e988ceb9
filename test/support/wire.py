"""A TCP proxy that stands for a bad network, or for a peer that freezes or ends at a chosen byte."""

from __future__ import annotations

import contextlib
import enum
import random
import socket
import threading
from collections.abc import Iterator

HOST = "127.0.0.1"


class Trouble(enum.Enum):
    """What happens to the answers, once `after_nbytes` of them have passed; requests pass unharmed."""

    NONE = "none"
    REFUSE = "refuse"  # connections end at once
    HOLE = "hole"  # bytes vanish, and nobody is told
    CUT = "cut"  # the connection ends
    RESET = "reset"  # the connection ends with a reset
    FLIP = "flip"  # one bit is wrong
    NOISE = "noise"  # all that follows is random


class Wire:
    """Forwards to (`host`, `port`) of this host. `trouble()` changes what it does, from now on."""

    def __init__(self, port: int, host: str = HOST) -> None:
        self._target = (host, port)
        self._kind, self._after, self._passed, self._random = Trouble.NONE, 0, 0, random.Random(0)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._server = socket.create_server((HOST, 0), backlog=64)
        self.port: int = self._server.getsockname()[1]
        self.url = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self._accept, name="wire", daemon=True)
        self._thread.start()

    def trouble(self, kind: Trouble, after_nbytes: int = 0, seed: int = 0) -> None:
        """`after_nbytes` more bytes of answers pass first, of all connections together."""
        with self._lock:
            self._kind, self._after, self._passed, self._random = kind, after_nbytes, 0, random.Random(seed)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        self.drop()
        self._thread.join(timeout=5)

    def drop(self) -> None:
        """End every connection."""
        with self._lock:
            doomed, self._open = self._open, set()
        for sock in doomed:
            _end(sock)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            if self._kind is Trouble.REFUSE:
                client.close()
                continue
            try:
                server = socket.create_connection(self._target, timeout=5)
            except OSError:
                client.close()
                continue
            server.settimeout(None)
            with self._lock:
                self._open |= {client, server}
            for source, sink, answers in ((client, server, False), (server, client, True)):
                args = (source, sink, answers)
                threading.Thread(target=self._forward, args=args, name="wire-forward", daemon=True).start()

    def _forward(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        try:
            while data := source.recv(1 << 16):
                for part in self._treated(data, sink) if answers else (data,):
                    sink.sendall(part)
        except OSError:
            pass  # one end is gone: so is the other
        finally:
            with self._lock:
                self._open -= {source, sink}
            _end(source)
            _end(sink)

    def _treated(self, data: bytes, sink: socket.socket) -> Iterator[bytes]:
        with self._lock:
            kind, left = self._kind, self._after - self._passed
            self._passed += len(data)
        if kind is Trouble.NONE or left >= len(data):
            yield data
            return
        good, bad = data[: max(left, 0)], data[max(left, 0) :]
        if good:
            yield good
        match kind:
            case Trouble.FLIP:
                if left >= 0:
                    bad = bytes([bad[0] ^ 1 << self._random.randrange(8)]) + bad[1:]
                yield bad
            case Trouble.NOISE:
                yield self._random.randbytes(len(bad))
            case Trouble.CUT | Trouble.REFUSE:
                raise ConnectionError
            case Trouble.RESET:
                sink.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                sink.close()
                raise ConnectionError


def _end(sock: socket.socket) -> None:
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
    sock.close()
