"""Builders that show only what differs, and a planner whose invariants are checked after every step."""

from __future__ import annotations

import itertools
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import uvicorn

from rfork.clock import ManualClock, SystemClock
from rfork.planner.app import create_app
from rfork.planner.events import Deliver, Effect, Event, Note, Parked, Tick
from rfork.planner.invariants import check
from rfork.planner.legacy import LegacyBook
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.state import PlannerState
from rfork.wire.planner import Answer, Ask, Heartbeat, InstanceState, LeaseView, Outcome, Report

KEY = "a" * 64
OTHER_KEY = "b" * 64


def seed(name: str = "i-seed", **fields: Any) -> Heartbeat:
    """A healthy serving instance of KEY."""
    fields = {"state": InstanceState.SERVING, "instance_key": KEY, "listener": f"http://{name}.test:7000", **fields}
    if isinstance(fields["state"], str):
        fields["state"] = InstanceState(fields["state"])
    if fields.get("leases") and isinstance(fields["leases"][0], str):
        fields["leases"] = [LeaseView(client=c) for c in fields["leases"]]
    return Heartbeat(instance_id=name, **fields)


def ask(client: str = "i-client", **fields: Any) -> Ask:
    """A client that wants KEY and is ready to wait 20 s for an answer."""
    return Ask(client=client, **{"instance_key": KEY, "wait_s": 20.0, **fields})


def report(outcome: str, client: str = "i-client", seed: str = "i-seed", **fields: Any) -> Report:
    return Report(outcome=Outcome(outcome), client=client, seed=seed, **{"instance_key": KEY, **fields})


class Driver:
    """A PlannerState with a clock in its hand. `answers` has what each client was told, in order."""

    def __init__(self, **knobs: Any) -> None:
        settle_s = knobs.pop("settle_s", 0.0)
        self.policy = Policy(settle_s=settle_s, **knobs)
        self.clock = ManualClock()
        self.state = PlannerState(self.policy, self.clock.now())
        self.answers: dict[str, list[Answer]] = {}
        self.notes: list[Note] = []
        self._polls = itertools.count()

    def handle(self, event: Event) -> list[Effect]:
        effects = self.state.handle(event, self.clock.now())
        for effect in effects:
            if isinstance(effect, Deliver):
                self.answers.setdefault(effect.client, []).append(effect.answer)
            elif isinstance(effect, Note):
                self.notes.append(effect)
        check(self.state, self.clock.now())
        return effects

    def beat(self, name: str = "i-seed", **fields: Any) -> list[Effect]:
        return self.handle(seed(name, **fields))

    def ask(self, client: str = "i-client", **fields: Any) -> Answer | None:
        """Ask, and return the answer if there is one at once."""
        before = len(self.answers.get(client, []))
        self.handle(Parked(ask(client, **fields), next(self._polls)))
        told = self.answers.get(client, [])[before:]
        return told[-1] if told else None

    def report(self, outcome: str, client: str = "i-client", seed: str = "i-seed", **fields: Any) -> list[Effect]:
        return self.handle(report(outcome, client, seed, **fields))

    def advance(self, duration_s: float, *alive: str) -> None:
        """Let time pass in steps of a second; the instances named keep sending their last heartbeat."""
        left = duration_s
        while left > 0:
            self.clock.advance(min(1.0, left))
            left -= 1.0
            for name in alive:
                self.handle(self.state.instances[name].beat)
            self.handle(Tick())

    def last(self, client: str = "i-client") -> Answer | None:
        return self.answers.get(client, [None])[-1]


class Build:
    """The builders, for tests that need no driver."""

    KEY = KEY
    OTHER_KEY = OTHER_KEY
    seed = staticmethod(seed)
    ask = staticmethod(ask)
    report = staticmethod(report)
    Driver = Driver
    free_port = staticmethod(lambda: free_port())


@pytest.fixture
def build() -> type[Build]:
    return Build


@pytest.fixture
def planner() -> Driver:
    return Driver()


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class RedisServer:
    """A real redis-server of our own on a loopback port, with nothing saved to disk."""

    def __init__(self) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self.folder = tempfile.mkdtemp(prefix="rfork-redis-")
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self.process = subprocess.Popen(
            ["redis-server", "--port", str(self.port), "--bind", "127.0.0.1", "--save", "", "--appendonly", "no"],
            cwd=self.folder,
            stdout=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            try:
                socket.create_connection(("127.0.0.1", self.port), timeout=1).close()
                return
            except OSError:
                time.sleep(0.02)
        raise TimeoutError("redis-server did not listen within 10 s")

    def kill(self) -> None:
        if self.process is not None:
            os.kill(self.process.pid, signal.SIGKILL)
            self.process.wait(10)
            self.process = None


@pytest.fixture
def redis_server() -> Iterator[RedisServer]:
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed (apt-get install redis-server)")
    server = RedisServer()
    server.start()
    yield server
    server.kill()
    shutil.rmtree(server.folder, ignore_errors=True)


class LivePlanner:
    """A planner behind a real socket, in a thread of this process."""

    def __init__(self, *, legacy: bool = False, **knobs: Any) -> None:
        self.service = PlannerService(Policy(**{"settle_s": 0.0, **knobs}), SystemClock())
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        app = create_app(self.service, legacy=LegacyBook() if legacy else None)
        self._server = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning"))
        self._thread = threading.Thread(target=self._server.run, daemon=True)

    def start(self) -> LivePlanner:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the planner did not start within 10 s"
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)


@pytest.fixture
def live_planner() -> Iterator[LivePlanner]:
    planner = LivePlanner().start()
    yield planner
    planner.stop()
