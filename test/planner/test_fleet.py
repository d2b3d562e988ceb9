"""Real planner processes on a real Redis, many clients at once, and kill -9: all get ready and nobody is stuck."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from rfork.planner.client import PlannerClient, PlannerUnavailable
from rfork.planner.heartbeat import Heartbeater
from rfork.planner.seek import seek
from rfork.seed.leases import Grant, Granted, LeaseBook, Release, ShardRef
from rfork.wire.planner import FallBack, ForkFrom, InstanceState, LeaseView, ReadDisk
from test.planner.processes import PlannerProcess

pytestmark = pytest.mark.timeout(120)

POLICY = {
    "interval_s": 0.5,
    "ttl_s": 6.0,
    "settle_s": 1.5,
    "claim_ttl_s": 2.0,
    "assignment_ttl_s": 2.0,
    "busy_s": 0.1,
    "patience_s": 2.0,
    "set_aside_s": 0.5,
}
LOAD_S = 0.2
CAPACITY = 2
SHARD = ShardRef("target.tp0of1", 0)


class Town:
    """Where instances find each other without a network."""

    def __init__(self, urls: list[str], build) -> None:
        self.urls, self.build = urls, build
        self.seeds: dict[str, Instance] = {}
        self.everybody: list[Instance] = []

    def start(self, *names: str) -> list[Instance]:
        fleet = [Instance(name, self) for name in names]
        self.everybody += fleet
        for instance in fleet:
            instance.thread.start()
        return fleet

    def sources(self, fleet: list[Instance]) -> list[str]:
        """Wait until all are ready; where each has its weights from."""
        deadline = time.monotonic() + 60
        for instance in fleet:
            instance.thread.join(max(deadline - time.monotonic(), 0.1))
        stuck = [i.name for i in fleet if i.thread.is_alive()]
        assert not stuck, f"still waiting after 60 s: {stuck}"
        return [i.source for i in fleet]


class Instance:
    """An instance as the plugin makes one: seeks, loads, reports, then admits others by the seed's own lease book."""

    def __init__(self, name: str, town: Town) -> None:
        self.name, self.town = name, town
        self.state = InstanceState.STARTING
        self.reads_disk = False
        self.book, self.lock = LeaseBook(CAPACITY, 2.0), threading.Lock()
        self.source = ""
        self.planner = PlannerClient(random.sample(town.urls, len(town.urls)), timeout_s=2.0)
        self.beater = Heartbeater(self.planner, self.describe)
        self.thread = threading.Thread(target=self.run, daemon=True)

    def describe(self):
        with self.lock:
            leases = [LeaseView(client=name, ttl_s=2.0) for name in self.book.readers]
        return self.town.build.seed(
            self.name, state=self.state, capacity=CAPACITY, leases=leases, reads_disk=self.reads_disk
        )

    def run(self) -> None:
        self.beater.start()
        while not self.source:
            try:
                answer = seek(self.planner, self.town.build.ask(self.name), bound_s=30.0, outage_s=5.0, poll_s=2.0)
            except PlannerUnavailable:
                answer = FallBack("planner_unavailable", 0.0)
            if isinstance(answer, ForkFrom):
                self.fork(answer)
            else:
                self.reads_disk = isinstance(answer, ReadDisk)
                time.sleep(LOAD_S)
                self.source = "disk"
        self.state, self.reads_disk = InstanceState.SERVING, False
        self.town.seeds[self.name] = self
        self.beater.poke()

    def fork(self, answer: ForkFrom) -> None:
        report = self.town.build.report
        for candidate in answer.candidates:
            seed = self.town.seeds.get(candidate.instance_id)
            lease = seed.grant(self.name) if seed is not None else None
            if lease is None:
                self.beater.report(report("refused", self.name, candidate.instance_id, reason="busy"))
                continue
            time.sleep(LOAD_S)
            seed.release(lease)
            self.source = candidate.instance_id
            self.beater.report(report("loaded", self.name, candidate.instance_id, nbytes=1))
            return

    def grant(self, client: str) -> str | None:
        with self.lock:
            effect = self.book.apply(Grant(client, SHARD, 2), time.monotonic())[-1]
        self.beater.poke()
        return effect.lease.id if isinstance(effect, Granted) else None

    def release(self, lease: str) -> None:
        with self.lock:
            self.book.apply(Release(lease), time.monotonic())
        self.beater.poke()


@contextmanager
def doomed(name: str, town: Town):
    """A client in a process of its own that has its answer; it is killed in the end."""
    command = [sys.executable, str(Path(__file__).with_name("doomed.py")), name, town.build.KEY, *town.urls]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.communicate()


@pytest.fixture
def planners(redis_server, build, tmp_path):
    running = []
    try:
        ports = [build.free_port() for _ in range(2)]
        running.extend(PlannerProcess(p, tmp_path / f"{p}.log", store=redis_server.url, **POLICY) for p in ports)
        yield running
    finally:
        for planner in running:
            planner.kill()


@pytest.fixture
def town(planners, build):
    town = Town([p.url for p in planners], build)
    yield town
    for instance in town.everybody:
        instance.beater.stop()


def until(what: str, condition) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, f"waited 20 s for {what}"
        time.sleep(0.05)


def until_known(planner: PlannerProcess, num_serving: int) -> None:
    """Wait until a planner lists so many seeds and nobody who reads."""
    client = PlannerClient(planner.url)
    until(
        f"{num_serving} seeds and no readers at {planner.url}",
        lambda: not client.leases().total and client.instances(state="serving").total == num_serving,
    )


def test_kill_9_of_clients_planner_and_redis_leaves_nobody_stuck(redis_server, planners, town):
    with doomed("i-doomed-holder", town) as answer:
        assert answer == "ReadDisk"
        first = town.start(*(f"i-a{n}" for n in range(8)))
        until("all to be heard of", lambda: PlannerClient(planners[0].url).instances().total == 9)
    sources = town.sources(first)
    assert 1 <= sources.count("disk") <= 2
    with doomed("i-doomed-reader", town) as answer:
        assert answer == "ForkFrom"

    second = town.start(*(f"i-b{n}" for n in range(8)))
    time.sleep(0.3)
    planners[0].kill()
    sources = town.sources(second)

    redis_server.kill()
    sources += town.sources(town.start(*(f"i-c{n}" for n in range(6))))
    until_known(planners[1], 22)

    redis_server.start()
    planners[0].start()
    until_known(planners[0], 22)
    sources += town.sources(town.start(*(f"i-d{n}" for n in range(6))))
    for planner in planners:
        until_known(planner, 28)
    assert sources.count("disk") <= 2, "a planner or Redis that dies, or comes back empty, sends no fleet to the disk"
