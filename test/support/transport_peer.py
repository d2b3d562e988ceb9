"""A process that serves a filled buffer over Mooncake until it is ended: `python transport_peer.py PROTOCOL HOST
NBYTES`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]


class Peer:
    """The other process, seen from the test."""

    def __init__(self, process: subprocess.Popen[str], session_id: str, address: int, nbytes: int) -> None:
        self._process = process
        self.session_id = session_id
        self.address = address
        self.nbytes = nbytes

    def freeze(self) -> None:
        """On return every thread of it has stopped."""
        self._process.send_signal(signal.SIGSTOP)
        tasks = Path(f"/proc/{self._process.pid}/task")
        deadline = time.monotonic() + 10
        while any(_state_of(task) != "T" for task in tasks.iterdir()):
            assert time.monotonic() < deadline, "a stopped process stops"
            time.sleep(0.001)

    def wake(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def _state_of(task: Path) -> str:
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "T"  # it ended since the folder was listed: it won't run again


def python_environment() -> dict[str, str]:
    """The environment for a child that imports this tree, installed or not."""
    paths = [str(ROOT / "python"), str(ROOT / "test"), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in paths if p)}


@contextlib.contextmanager
def serving(nbytes: int, *, protocol: str = "tcp", host: str = "127.0.0.1") -> Iterator[Peer]:
    """A peer process with `nbytes` bytes of `Buffer.fill()`; ended on the way out."""
    command = [sys.executable, __file__, protocol, host, str(nbytes)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=python_environment()
    ) as process:
        try:
            assert process.stdout is not None
            session_id, address = process.stdout.readline().split()
            yield Peer(process, session_id, int(address), nbytes)
        finally:
            process.kill()


def main(protocol: str, host: str, nbytes: int) -> None:
    from rfork.transports.mooncake import MooncakeTransport
    from support.buffers import Buffer

    buffer = Buffer(nbytes).fill()
    engine = MooncakeTransport(protocol=protocol, host=host).open()
    engine.register([buffer.region])
    print(engine.session_id, buffer.address, flush=True)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
