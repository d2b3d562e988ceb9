"""The demo's planner: `rfork planner` in a process that ends with the demo."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from pathlib import Path

from rfork.demo.processes import Group
from rfork.demo.server import HOST, DemoFailed

_LISTEN_S = 60.0
_POLICY = '{"settle_s": 0.5}'
"""A planner that has just started waits for seeds to be heard of again; here it knows that there are none."""


class DemoPlanner:
    """One planner on a port of this host."""

    def __init__(self, port: int, env: Mapping[str, str], log: Path, cwd: Path) -> None:
        self.url = f"http://{HOST}:{port}"
        self._port, self._log = port, log
        self._group = Group(
            ["-m", "rfork.cli", "planner", "--host", HOST, "--port", str(port), "--policy", _POLICY], env, log, cwd
        )

    def wait(self) -> None:
        """Return once it listens. Raises DemoFailed where it does not."""
        deadline_s = time.monotonic() + _LISTEN_S
        while not self._listens():
            if self._group.ended or time.monotonic() > deadline_s:
                said = self._log.read_text(errors="replace").splitlines()[-3:]
                how = f"ended {self._group.ended}" if self._group.ended else f"does not listen after {_LISTEN_S:g} s"
                raise DemoFailed(f"the planner {how}: {' / '.join(said)}")
            time.sleep(0.05)

    def _listens(self) -> bool:
        try:
            socket.create_connection((HOST, self._port), timeout=1).close()
        except OSError:
            return False
        return True

    def kill(self) -> None:
        self._group.kill()
