"""Ports that no other test, and no other test run on this machine, hands out at the same time.

An SGLang instance uses the ports it is told, a few after its own, and with attention-DP a few from its own + 233. So
ports are lent in blocks of 20, of which the first 13 may be used: 233 = 11 * 20 + 13, and a block's derived ports fall
into the unused end of another block. A lock file per block, held until the process ends, keeps test runs apart; and a
port is lent only while nothing listens on it. All blocks lie below the range that the kernel gives out by itself.
"""

import fcntl
import os
import random
import socket
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

FIRST = 11000
LAST = 21000  # SGLang itself looks for free ports from 22000 on
BLOCK = 20
USABLE = 13
DERIVED = 233


@dataclass
class PortBlock:
    """Consecutive ports of one instance: `port` is its HTTP port, and `take()` gives the others."""

    port: int
    _lock: TextIO = field(repr=False)
    _taken: int = 0

    def take(self) -> int:
        """Return a port of this block that has not been taken yet."""
        self._taken += 1
        if self._taken >= USABLE:
            raise RuntimeError(f"block {self.port} has no port left: an instance that needs more needs two blocks")
        return self.port + self._taken

    def release(self) -> None:
        self._lock.close()


def lend() -> PortBlock:
    """Lend a block of free ports to the caller until it releases it or ends."""
    folder = Path(tempfile.gettempdir()) / "rfork-test-ports"
    folder.mkdir(exist_ok=True)
    bases = list(range(FIRST, LAST, BLOCK))
    random.shuffle(bases)
    for base in bases:
        lock = (folder / str(base)).open("w")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.close()
            continue
        used = [*range(base, base + USABLE), *range(base + DERIVED, base + DERIVED + BLOCK - USABLE)]
        if all(_is_free(port) for port in used):
            os.set_inheritable(lock.fileno(), False)
            return PortBlock(base, lock)
        lock.close()
    raise RuntimeError(f"no block of {BLOCK} free ports between {FIRST} and {LAST}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
