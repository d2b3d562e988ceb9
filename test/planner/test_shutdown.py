"""A planner process that is told to end: nobody who waits for its answer gets anything but an answer."""

from __future__ import annotations

import socket
import time
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest

from rfork.planner.client import PlannerClient
from test.planner.processes import PlannerProcess

pytestmark = pytest.mark.timeout(60)

NUM_HELD = 12


@pytest.fixture
def planner(build, tmp_path):
    planner = PlannerProcess(build.free_port(), tmp_path / "planner.log", settle_s=0)
    yield planner
    planner.kill()


def test_every_ask_that_is_held_is_answered_when_the_planner_is_told_to_end(planner, build):
    """Also those who watch for news. uvicorn waits for its answers before it tells the app that it ends."""
    client = PlannerClient(planner.url)
    client.ask(build.ask("i-disk"))

    def hold(n: int) -> httpx.Response:
        body = {"client": f"i-{n}", "instance_key": build.KEY, "wait_s": 30, "waited_s": 7}
        return httpx.post(planner.url + "/rfork/v1/asks", json=body, timeout=60)

    with ThreadPoolExecutor(NUM_HELD) as pool, socket.create_connection(planner.address, timeout=60) as watcher:
        watcher.sendall(b"GET /rfork/v1/events?after=1000&wait_s=30 HTTP/1.1\r\nhost: planner\r\n\r\n")
        held = [pool.submit(hold, n) for n in range(NUM_HELD)]
        deadline = time.monotonic() + 20
        while len(client.overview().waiting) < NUM_HELD:
            assert time.monotonic() < deadline, "not all asks are held"
            time.sleep(0.02)
        began = time.monotonic()
        planner.end()
        planner.process.wait(30)
        took_s = time.monotonic() - began
        answers = [answer.result() for answer in held]
        news = watcher.makefile("rb").read()
    assert [a.status_code for a in answers] == [200] * NUM_HELD
    assert {a.json()["answer"] for a in answers} == {"wait"}
    assert {a.json()["reason"] for a in answers} == {"planner_stops"}
    assert all(a.json()["waited_s"] == 7 < a.json()["bound_s"] for a in answers)
    assert news.startswith(b"HTTP/1.1 200 ")
    assert news.endswith(b'"events":[]}')
    assert took_s < 4.0, "it did not wait for anybody"
    assert planner.log.read_text() == ""
