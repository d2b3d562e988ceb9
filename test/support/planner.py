"""A planner as an operator runs it, for real servers to find."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rfork.planner.client import PlannerClient
from rfork.wire.planner import InstanceView
from support.forking import ENV
from support.ports import lend
from support.server import HOST, Server

INTERVAL_S = 1.0


class Planner:
    """`rfork planner` in a process of its own, on a port that stays the same when it is started again."""

    def __init__(self, folder: Path) -> None:
        self._log = (folder / "planner.log").open("ab")
        self._block = lend()
        self.port = self._block.port
        self.url = f"http://{HOST}:{self.port}"
        self.client = PlannerClient(self.url)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, **policy: Any) -> Planner:
        """`policy` are knobs other than the defaults of a planner with heartbeats every second, of which a starved
        server may miss a few.
        """
        knobs = ("--interval-s", str(INTERVAL_S), "--policy", json.dumps({"ttl_s": 10.0, **policy}))
        self.process = subprocess.Popen(
            [*RFORK, "planner", "--port", str(self.port), *knobs],
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
        )
        until("the planner to listen", self._listens, 30)
        return self

    def _listens(self) -> bool:
        try:
            socket.create_connection((HOST, self.port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait()
            self.process = None

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stopped for a while: connections are made, and nobody answers."""
        assert self.process is not None
        self.process.send_signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self.process.send_signal(signal.SIGCONT)

    def close(self) -> None:
        self.kill()
        self.client.close()
        self._log.close()
        self._block.release()

    def env(self, **more: str) -> dict[str, str]:
        """What the servers that use it have in their environment."""
        return {**ENV, "RFORK_PLANNER_URL": self.url, **more}

    def instances(self) -> dict[str, InstanceView]:
        return {view.instance_id: view for view in self.client.instances().instances}

    def run(self, verb: str, *args: str) -> str:
        """One of the command line's verbs, as typed; what it printed."""
        command = [*RFORK, verb, *args]
        done = subprocess.run(
            command, env={**os.environ, "RFORK_PLANNER_URL": self.url}, capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout


RFORK = (sys.executable, "-m", "rfork.cli")


def until(what: str, condition: Any, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {timeout_s:g} s for {what}"
        time.sleep(0.05)


def instance_id(server: Server) -> str:
    return str(server.get("/rfork/v1/status").json()["instance_id"])
