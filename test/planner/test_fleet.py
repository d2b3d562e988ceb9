"""Real planner processes on a real Redis, many clients at once, and kill -9: all get ready and nobody is stuck."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request

import msgspec
import pytest

from rfork.planner.client import PlannerClient, PlannerUnavailable
from rfork.planner.heartbeat import Heartbeater
from rfork.planner.seek import seek
from rfork.wire.planner import FallBack, ForkFrom, InstanceState, LeaseView, ReadDisk

pytestmark = pytest.mark.timeout(120)

POLICY = {
    "interval_s": 0.5,
    "ttl_s": 6.0,
    "settle_s": 0.7,
    "claim_ttl_s": 2.0,
    "assignment_ttl_s": 2.0,
    "busy_s": 0.1,
    "patience_s": 2.0,
    "set_aside_s": 0.5,
}
LOAD_S = 0.2
CAPACITY = 2


class PlannerProcess:
    """`rfork planner` as a process of its own."""

    def __init__(self, port: int, store: str) -> None:
        self.url = f"http://127.0.0.1:{port}"
        code = "import typer; from rfork.cli.planner import command; a = typer.Typer(); a.command()(command); a()"
        options = ["--port", str(port), "--store", store, "--policy", json.dumps(POLICY), "--log-level", "error"]
        self.process = subprocess.Popen([sys.executable, "-c", code, *options])
        deadline = time.monotonic() + 20
        while True:
            try:
                urllib.request.urlopen(self.url + "/readyz", timeout=1).close()
                return
            except OSError:
                assert time.monotonic() < deadline, "the planner did not start within 20 s"
                time.sleep(0.05)

    def kill(self) -> None:
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait(10)


class Town:
    """Where instances find each other without a network: the admitting side of every seed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.seeds: dict[str, Instance] = {}
        self.disk_reads = 0
        self.refusals = 0
        self.most_readers = 0


class Instance:
    """An instance as the plugin makes one: seeks, loads, reports, then admits others."""

    def __init__(self, name: str, town: Town, urls: list[str], build, *, dies: bool = False) -> None:
        self.name, self.town, self.dies = name, town, dies
        self.state = InstanceState.STARTING
        self.readers: set[str] = set()
        self.excluded: list[str] = []
        self.source = ""
        self.build = build
        self.planner = PlannerClient(random.sample(urls, len(urls)), timeout_s=2.0)
        self.beater = Heartbeater(self.planner, self.describe)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def describe(self):
        with self.town.lock:
            readers = [LeaseView(client=name, ttl_s=2.0) for name in self.readers]
        return self.build.seed(self.name, state=self.state, capacity=CAPACITY, leases=readers)

    def run(self) -> None:
        self.beater.start()
        while not self.source:
            ask = self.build.ask(self.name, exclude=self.excluded[-4:])
            try:
                answer = seek(self.planner, ask, bound_s=30.0, outage_s=5.0, poll_s=2.0)
            except PlannerUnavailable:
                answer = FallBack("planner_unavailable", 0.0)
            if self.dies and isinstance(answer, ForkFrom | ReadDisk):
                self.beater.stop()
                return
            if isinstance(answer, ForkFrom):
                self.fork(answer)
            else:
                with self.town.lock:
                    self.town.disk_reads += 1
                time.sleep(LOAD_S)
                self.source = "disk"
        self.state = InstanceState.SERVING
        with self.town.lock:
            self.town.seeds[self.name] = self
        self.beater.poke()

    def fork(self, answer: ForkFrom) -> None:
        for candidate in answer.candidates:
            seed = self.town.seeds.get(candidate.instance_id)
            with self.town.lock:
                admitted = seed is not None and len(seed.readers) < CAPACITY
                if admitted:
                    seed.readers.add(self.name)
                    self.town.most_readers = max(self.town.most_readers, len(seed.readers))
                else:
                    self.town.refusals += 1
            if not admitted:
                self.beater.report(self.build.report("refused", self.name, candidate.instance_id, reason="busy"))
                continue
            seed.beater.poke()
            time.sleep(LOAD_S)
            with self.town.lock:
                seed.readers.discard(self.name)
            seed.beater.poke()
            self.source = candidate.instance_id
            self.beater.report(self.build.report("loaded", self.name, candidate.instance_id, nbytes=1))
            return


@pytest.fixture
def planners(redis_server, build):
    running = [PlannerProcess(build.free_port(), redis_server.url) for _ in range(2)]
    yield running
    for planner in running:
        if planner.process.poll() is None:
            planner.kill()


def start(town, urls, build, names, **kwargs):
    fleet = [Instance(name, town, urls, build, **kwargs) for name in names]
    for instance in fleet:
        instance.thread.start()
    return fleet


def finish(fleet, timeout_s=60.0):
    deadline = time.monotonic() + timeout_s
    for instance in fleet:
        instance.thread.join(max(deadline - time.monotonic(), 0.1))
    stuck = [i.name for i in fleet if i.thread.is_alive()]
    assert not stuck, f"still waiting after {timeout_s:g} s: {stuck}"


def test_kill_9_of_clients_planner_and_redis_leaves_nobody_stuck(redis_server, planners, build):
    town, urls = Town(), [p.url for p in planners]
    doomed = start(town, urls, build, [f"i-doomed-{n}" for n in range(3)], dies=True)
    finish(doomed)
    first = start(town, urls, build, [f"i-a{n}" for n in range(8)])
    finish(first)
    assert town.disk_reads <= 2
    assert sum(i.source != "disk" for i in first) >= 6

    second = start(town, urls, build, [f"i-b{n}" for n in range(8)])
    time.sleep(0.3)
    planners[0].kill()
    finish(second)

    redis_server.kill()
    third = start(town, urls, build, [f"i-c{n}" for n in range(6)])
    finish(third)

    assert town.most_readers <= CAPACITY
    assert sum(i.source == "disk" for i in second + third) <= 2, "a dead planner or Redis sends no fleet to the disk"
    alive = PlannerClient(planners[1].url)
    deadline = time.monotonic() + 15
    while alive.leases().total or alive.instances(state="serving").total != 22:
        assert time.monotonic() < deadline, msgspec.json.encode(alive.overview())
        time.sleep(0.1)
    for instance in first + second + third:
        instance.beater.stop()
