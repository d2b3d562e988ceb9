"""Planners as processes of their own, started from the command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

COMMAND = "import typer; from rfork.cli.planner import command; a = typer.Typer(); a.command()(command); a()"


class PlannerProcess:
    """`rfork planner` on a port, until it is killed or told to end. What it logs goes to `log`."""

    def __init__(self, port: int, log: Path, *, store: str = "memory", **policy: Any) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.address = ("127.0.0.1", port)
        self.log = log
        self._command = [sys.executable, "-c", COMMAND, "--port", str(port), "--store", store]
        self._command += ["--policy", json.dumps(policy), "--log-level", "warning"]
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(self.url + "/readyz", timeout=1).close()
                return
            except OSError:
                assert self.process.poll() is None, self.log.read_text()
                assert time.monotonic() < deadline, "the planner did not start within 20 s"
                time.sleep(0.05)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
