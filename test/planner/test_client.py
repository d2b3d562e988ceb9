"""The client against a real planner behind a real socket."""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from rfork.client.planned import planner_of
from rfork.clock import ManualClock
from rfork.config import load_config
from rfork.errors import ConfigError
from rfork.planner.client import PlannerClient, PlannerRefused, PlannerUnavailable
from rfork.planner.heartbeat import Heartbeater
from rfork.planner.seek import seek, storage_jitter_s
from rfork.wire.planner import FallBack, ForkFrom, HeartbeatReply, ReadDisk, Wait

IDENTITY = {"dtype": "bfloat16"}


@pytest.fixture
def client(live_planner):
    client = PlannerClient(live_planner.url)
    yield client
    client.close()


def until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.01)


def test_one_round_of_a_client(client, build):
    client.heartbeat(build.seed(identity=IDENTITY))
    answer = client.ask(build.ask())
    assert isinstance(answer, ForkFrom)
    assert [i.num_leases for i in client.instances().instances] == [1]
    assert [line.client for line in client.leases().leases] == ["i-client"]
    client.report(build.report("loaded", nbytes=10))
    assert client.leases().total == 0
    assert client.story("i-seed").identity == IDENTITY
    client.drain("i-seed")
    client.withdraw("i-seed", "SIGTERM & done?")
    assert client.instances().total == 0
    assert client.events().events[-1].text == "SIGTERM & done?"


def test_a_refusal_is_not_an_outage(client):
    with pytest.raises(PlannerRefused, match="no instance i-nobody") as caught:
        client.story("i-nobody")
    assert (caught.value.status, caught.value.code) == (404, "unknown_instance")


def test_no_planner_is_said_with_every_address_tried(build):
    urls = [f"http://127.0.0.1:{build.free_port()}" for _ in range(2)]
    with pytest.raises(PlannerUnavailable) as caught:
        PlannerClient(urls).overview()
    assert all(url in str(caught.value) for url in urls)


def test_the_next_address_is_used_when_one_does_not_answer(live_planner, build):
    client = PlannerClient(f"http://127.0.0.1:{build.free_port()}, {live_planner.url}/")
    assert client.heartbeat(build.seed()).ttl_s == 30.0


def test_a_planner_that_takes_calls_and_answers_none_is_asked_once_while_another_answers(live_planner):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        client = PlannerClient(f"http://127.0.0.1:{silent.getsockname()[1]},{live_planner.url}", timeout_s=1.0)
        for _ in range(3):
            client.overview()
        client.close()
        silent.settimeout(0.1)
        silent.accept()[0].close()
        with pytest.raises(TimeoutError):
            silent.accept()


def test_of_several_planners_in_the_configuration_the_first_that_answers_is_used(live_planner, build):
    urls = [f"http://127.0.0.1:{build.free_port()}", live_planner.url]
    for text in (",".join(urls), json.dumps(urls)):
        client = planner_of(load_config(None, {"RFORK_PLANNER_URL": text}))
        assert client.urls == tuple(urls)
        assert client.heartbeat(build.seed()).planner == live_planner.service.name
        client.close()


def test_a_password_goes_to_the_planner_and_into_no_message(live_planner, build, caplog):
    caplog.set_level("DEBUG")
    peer = Scripted(b"HTTP/1.1 503 No\r\ncontent-length: 0\r\n\r\n")
    urls = [
        url.replace("http://", "http://me:s%3Acret@") for url in (f"http://127.0.0.1:{build.free_port()}", peer.url)
    ]
    client = PlannerClient(urls)
    with pytest.raises(PlannerUnavailable) as caught:
        client.overview()
    assert peer.url in str(caught.value)
    assert b"authorization: basic bwu6czpjcmv0" in peer.asked.lower()
    beater = Heartbeater(client, lambda: build.seed())
    beater.beat_once()
    told = [str(caught.value), *client.urls, *(r.getMessage() for r in caplog.records)]
    assert any("heartbeat failed" in line for line in told)
    assert not [line for line in told if "cret" in line]
    peer.socket.close()


@pytest.mark.parametrize(
    "url", ["http://me:se/cret@planner:7700", "me:secret@planner:7700", "http://a:1,http://u:secret"]
)
def test_a_refused_planner_url_is_shown_without_its_password(url):
    with pytest.raises(ConfigError, match="planner_url") as caught:
        PlannerClient(url)
    assert "cret@" not in str(caught.value)


@pytest.mark.parametrize("url", ["", "planner:1234", "file:///etc/passwd", "http://a:1,b:1"])
def test_a_planner_url_that_is_none_is_refused_at_once(url):
    with pytest.raises(ConfigError, match="planner_url"):
        PlannerClient(url)


def test_seek_returns_the_claim_then_a_seed(client, build):
    assert isinstance(seek(client, build.ask("i-1")), ReadDisk)
    found = []
    second = threading.Thread(target=lambda: found.append(seek(client, build.ask("i-2"))))
    second.start()
    client.heartbeat(build.seed("i-1"))
    second.join(5)
    assert [c.instance_id for c in found[0].candidates] == ["i-1"]


def test_seek_says_for_whom_how_long_and_until_when(client, build, caplog):
    client.ask(build.ask("i-1"))
    caplog.set_level("INFO", "rfork.planner.seek")
    answer = seek(client, build.ask("i-2"), bound_s=1.5, poll_s=0.4)
    assert isinstance(answer, FallBack)
    assert answer.reason == "bound"
    logged = [r.getMessage() for r in caplog.records if r.name == "rfork.planner.seek"]
    assert re.match(r"rfork: waiting for i-1 \(claim_held\): [01] s of at most 1 s, 0 ahead", logged[0])


def test_seek_gives_up_on_planners_that_are_gone(build):
    clock = ManualClock()
    client = PlannerClient(f"http://127.0.0.1:{build.free_port()}")
    with pytest.raises(PlannerUnavailable):
        seek(client, build.ask(), outage_s=20.0, clock=clock)
    assert 20.0 <= clock.now() - 1000.0 < 23.0


def test_seek_can_be_cancelled(client, build):
    cancelled = threading.Event()
    cancelled.set()
    assert seek(client, build.ask(), cancelled=cancelled).reason == "cancelled"


def test_storage_jitter_spreads_a_fleet_over_the_window():
    jitters = [storage_jitter_s(f"i-{n}", 60.0) for n in range(1000)]
    assert min(jitters) < 2
    assert max(jitters) > 58
    assert 25 < sum(jitters) / 1000 < 35


def test_a_heartbeater_registers_at_once_sends_its_identity_once_and_withdraws(live_planner, client, build):
    state = {"beat": build.seed(state="starting", identity=IDENTITY)}
    beater = Heartbeater(client, lambda: state["beat"])
    beater.start()
    until(lambda: client.instances().total == 1)
    state["beat"] = build.seed(state="serving", identity=IDENTITY, generation=2)
    beater.poke()
    until(lambda: client.instances().instances[0].state == "serving", 2)
    assert live_planner.service.state.instances["i-seed"].beat.identity is None
    assert live_planner.service.state.identity_known(build.KEY)
    beater.stop("SIGTERM")
    assert client.instances().total == 0


def test_a_heartbeater_calls_on_drain_once(client, build):
    drained = []
    beater = Heartbeater(client, lambda: build.seed(identity=IDENTITY), on_drain=lambda: drained.append(1))
    beater.beat_once()
    client.drain("i-seed")
    beater.beat_once()
    beater.beat_once()
    assert drained == [1]


def test_an_unhealthy_instance_sends_nothing(client, build):
    Heartbeater(client, lambda: None).beat_once()
    assert client.instances().total == 0


def test_a_describe_that_fails_ends_nothing(client, build):
    answers = iter([RuntimeError("rank 3 is silent"), build.seed()])

    def describe():
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return answer

    beater = Heartbeater(client, describe)
    beater.beat_once()
    beater.beat_once()
    assert client.instances().total == 1


def test_heartbeats_back_off_while_no_planner_answers_and_registration_comes_by_itself(build):
    from test.planner.conftest import LivePlanner

    planner = LivePlanner()
    beater = Heartbeater(PlannerClient(planner.url), lambda: build.seed(identity=IDENTITY))
    beater.last_reply = HeartbeatReply(ttl_s=30.0, interval_s=10.0, planner="p-before")
    pauses = [beater.beat_once() for _ in range(6)]
    grown = [2.0, 4.0, 8.0, 10.0, 10.0, 10.0]
    assert all(0.9 * most <= pause <= most for pause, most in zip(pauses, grown, strict=True)), pauses
    beater.report(build.report("failed", reason="unreachable"))
    planner.start()
    beater.beat_once()
    assert "i-seed" in planner.service.state.instances
    assert [e.kind for e in planner.service.lines(prefix="report")] == ["report_failed"]
    planner.stop()


def test_an_instance_that_was_replaced_stops_talking(client, build):
    old = Heartbeater(client, lambda: build.seed("i-old", listener="http://h:1"))
    new = Heartbeater(client, lambda: build.seed("i-new", listener="http://h:1"))
    old.beat_once()
    new.beat_once()
    old.beat_once()
    old.beat_once()
    assert [i.instance_id for i in client.instances().instances] == ["i-new"]


class Scripted:
    """A server of a few lines that answers every request with given bytes, slowly if asked to."""

    def __init__(self, answer: bytes, pause_s: float = 0.0) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.answer, self.pause_s = answer, pause_s
        self.asked = b""
        threading.Thread(target=self.run, daemon=True).start()

    def run(self) -> None:
        try:
            while True:
                peer, _ = self.socket.accept()
                self.asked += peer.recv(65536)
                step = len(self.answer) if not self.pause_s else 1
                for start in range(0, len(self.answer), step):
                    peer.sendall(self.answer[start : start + step])
                    time.sleep(self.pause_s)
                peer.close()
        except OSError:
            return


def answer_of(body: bytes) -> bytes:
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(body) + body


HOSTILE = {
    "not HTTP": b"SSH-2.0-OpenSSH_9.2\r\n",
    "not JSON": answer_of(b"<html>hello</html>"),
    "another answer": answer_of(b'{"answer":"format_disk"}'),
    "no candidates": answer_of(b'{"answer":"fork","candidates":[]}'),
    "a file as listener": answer_of(
        b'{"answer":"fork","candidates":[{"instance_id":"i","listener":"file:///etc/passwd","generation":1}]}'
    ),
    "a redirect": b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n",
    "broken off": b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_a_planners_answer_is_no_answer(name, build):
    server = Scripted(HOSTILE[name])
    with pytest.raises((PlannerUnavailable, PlannerRefused)):
        PlannerClient(server.url, timeout_s=1.0).ask(build.ask(wait_s=0))
    server.socket.close()


def test_an_answer_that_drips_is_given_up_at_the_deadline(build):
    server = Scripted(answer_of(b" " * 1000), pause_s=0.05)
    began = time.monotonic()
    with pytest.raises(PlannerUnavailable):
        PlannerClient(server.url, timeout_s=0.5).ask(build.ask(wait_s=0))
    assert time.monotonic() - began < 10.0
    server.socket.close()


@pytest.mark.parametrize("kept", [False, True], ids=["of a new connection", "of a kept connection"])
def test_headers_that_drip_are_given_up_at_the_deadline(kept):
    def serve():
        peer, _ = listener.accept()
        if kept:
            peer.recv(65536)
            peer.sendall(answer_of(b""))
        peer.recv(65536)
        peer.sendall(b"HTTP/1.1 200 OK\r\nx-drip: ")
        with contextlib.suppress(OSError):
            for _ in range(600):
                peer.sendall(b"x")
                time.sleep(0.05)
        peer.close()

    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, daemon=True).start()
    client = PlannerClient(f"http://127.0.0.1:{listener.getsockname()[1]}")
    if kept:
        client.withdraw("i-1")
    began = time.monotonic()
    with pytest.raises(PlannerUnavailable, match="no complete answer within"):
        client.withdraw("i-1", timeout_s=0.5)
    assert time.monotonic() - began < 15.0, "it drips for 30 s"
    listener.close()


def test_calls_from_many_threads_share_no_connection(live_planner, build):
    """Asks are held open for long; heartbeats go out meanwhile."""
    client = PlannerClient(live_planner.url)
    client.ask(build.ask("i-disk"))
    with ThreadPoolExecutor(4) as pool:
        held = [pool.submit(client.ask, build.ask(f"i-{n}", wait_s=20.0)) for n in range(4)]
        until(lambda: len(live_planner.service.state.pools[build.KEY].queue) == 4)
        for n in range(4):
            client.heartbeat(build.seed(f"i-seed{n}"))
        assert all(isinstance(answer.result(), ForkFrom) for answer in held)
    client.close()


def test_a_client_that_hangs_up_is_granted_nothing(live_planner, build):
    impatient = PlannerClient(live_planner.url, timeout_s=-19.7)
    PlannerClient(live_planner.url).ask(build.ask("i-disk"))
    with pytest.raises(PlannerUnavailable):
        impatient.ask(build.ask("i-impatient"))
    until(lambda: not live_planner.service.state.pools[build.KEY].queue)


def test_a_wait_answer_is_decoded_with_its_details(client, build):
    client.heartbeat(build.seed(leases=["i-x"]))
    answer = client.ask(build.ask(wait_s=0))
    assert isinstance(answer, Wait)
    assert answer.waiting_for == ["i-seed"]
