"""One SGLang server as a user would start it: `python -m sglang.launch_server`, then HTTP."""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from rfork.demo.processes import Group
from rfork.errors import RForkError
from rfork.wire import decode
from rfork.wire.seed import STATUS_PATH, StatusReply

HOST = "127.0.0.1"
PORT_GAP = 40
"""SGLang uses ports near its own; two servers that are closer get into each other's way."""

_SHOWN_LINES = 25


class DemoFailed(RForkError):
    """The demo can't go on. `server`, where there is one, is the server whose log tells more."""

    reason = "demo"

    def __init__(self, message: str, server: Server | None = None) -> None:
        super().__init__(message)
        self.server = server


class Server:
    """One instance from its start on. `ready_s` counts from there to the first answer."""

    def __init__(
        self,
        name: str,
        port: int,
        flags: Sequence[str],
        *,
        env: Mapping[str, str],
        log: Path,
        cwd: Path,
        gpu: int | None,
    ) -> None:
        self.name = name
        self.port = port
        self.log = log
        self.gpu = gpu
        self.ready_s: float | None = None
        self.status: StatusReply | None = None
        self.argv = ["-m", "sglang.launch_server", "--host", HOST, "--port", str(port), *flags]
        self._http = httpx.Client(base_url=f"http://{HOST}:{port}", trust_env=False, timeout=10)
        self._started_s = time.monotonic()
        self._group = Group(self.argv, env, log, cwd)

    @property
    def age_s(self) -> float:
        return time.monotonic() - self._started_s

    def is_up(self) -> bool:
        """Whether it answers requests and its weights are offered. Raises DemoFailed once that can't come any more."""
        ended = self._group.ended
        if ended is not None:
            raise DemoFailed(f"{self.name} ended {ended} before it was ready", self)
        if self.ready_s is None:
            if self._get("/model_info") is None:
                return False
            self.ready_s = self.age_s
        self.status = self._read_status()
        return self.status is not None and self.status.state == "serving"

    def _read_status(self) -> StatusReply | None:
        response = self._get(STATUS_PATH)
        if response is None:
            return None
        if response.status_code == 404:
            raise DemoFailed(f"{self.name} runs without R-Fork (no {STATUS_PATH}); `rfork doctor` finds out why", self)
        try:
            return decode(response.content, StatusReply)
        except ValueError as error:
            raise DemoFailed(f"{self.name} answers {STATUS_PATH} with something else ({error})", self) from error

    def _get(self, path: str) -> httpx.Response | None:
        """The answer; None while it is not there, or not 200 (404 is an answer too)."""
        try:
            response = self._http.get(path)
        except httpx.TransportError:
            return None
        return response if response.status_code in (200, 404) else None

    def generate(self, prompt: str, num_tokens: int, timeout_s: float) -> tuple[int, ...]:
        """Decode greedily, past any end token."""
        sampling = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
        answer = self._post("/generate", {"text": prompt, "sampling_params": sampling}, timeout_s)
        return tuple(answer["output_ids"])

    def checksums(self, timeout_s: float) -> dict[str, str]:
        """Digest of every parameter and buffer in every rank's live memory, taken by SGLang itself."""
        answer = self._post("/weights_checker", {"action": "checksum"}, timeout_s)
        found = {}
        for number, rank in enumerate(answer.get("ranks") or ()):
            for name, digest in rank["checksums"].items():
                found[name if number == 0 else f"{name}@{number}"] = digest
        return found

    def _post(self, path: str, body: Any, timeout_s: float) -> Any:
        try:
            response = self._http.post(path, json=body, timeout=timeout_s)
            if response.status_code == 200:
                return response.json()
            problem = f"{response.status_code}: {response.text[:300]}"
        except (httpx.TransportError, ValueError) as error:
            problem = f"{type(error).__name__} {error}".strip()
        if self._group.ended:
            problem += f"; it ended {self._group.ended}"
        raise DemoFailed(f"{self.name} did not answer {path} ({problem})", self)

    def kill(self) -> None:
        """End all its processes at once and see them gone."""
        self._http.close()
        self._group.kill()

    @property
    def pids(self) -> list[int]:
        return self._group.members()

    def last_lines(self, num_lines: int = _SHOWN_LINES) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-num_lines:])


def free_ports(count: int) -> list[int]:
    """Ports with free neighbours, none nearer than PORT_GAP to another."""
    bases = list(range(15_000, 21_000, PORT_GAP))
    random.shuffle(bases)
    found: list[int] = []
    for base in bases:
        if all(_is_free(base + i) for i in range(4)):
            found.append(base)
            if len(found) == count:
                return found
    raise DemoFailed(f"no {count} free ports between {bases[0]} and {bases[-1]}")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True
