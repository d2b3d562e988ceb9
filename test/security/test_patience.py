"""Connections that send half a request, take no answer or come in crowds: others are answered, and they are closed."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import logging
import os
import resource
import select
import socket
import ssl
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from support.seed_node import Seed, until

from rfork import patience
from rfork.clock import SystemClock
from rfork.patience import Patience, Server
from rfork.planner.app import create_app
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.tls import Certificate

from .conftest import Authority

SMALL = Patience(max_connections=40, head_s=1.2, body_s=1.4, unread_s=1.6)
SOON_S = 15.0
"""Far above the bounds, for a busy machine; far below `for ever`."""


class Service:
    """A service of ours at a port of this host, and who knocks there."""

    def __init__(self, port: int, health: str, post: str, ca_file: str | None) -> None:
        self.port, self.post, self.secure = port, post, ca_file is not None
        self.context = ssl.create_default_context(cafile=ca_file) if ca_file else None
        self.url = f"http{'s' if ca_file else ''}://127.0.0.1:{port}"
        self.http = httpx.Client(base_url=self.url, verify=self.context or False, timeout=SOON_S)
        self.health = f"GET {health} HTTP/1.1\r\nHost: me\r\n\r\n".encode()
        self._path = health

    def dial(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=SOON_S)

    def connect(self, sent: bytes = b"") -> socket.socket:
        sock = self.dial()
        if self.context is not None:
            sock = self.context.wrap_socket(sock, server_hostname="127.0.0.1")
        sock.sendall(sent)
        return sock

    def answers(self) -> bool:
        return self.http.get(self._path).status_code == 200


@pytest.fixture
def serve() -> Iterator[Callable[..., int]]:
    """Serve an app with bounds, in a thread; the port."""
    with ExitStack() as stack:

        def start(app: Any, bounds: Patience = SMALL, sock: socket.socket | None = None, **config: Any) -> int:
            sock = sock or socket.create_server(("127.0.0.1", 0))
            config = {"log_config": None, "log_level": "warning", "timeout_graceful_shutdown": 1, **config}
            server = Server(uvicorn.Config(app, **config), bounds)
            thread = threading.Thread(target=server.run, args=([sock],), daemon=True)

            def stop() -> None:
                server.should_exit = True
                thread.join(10)

            thread.start()
            stack.callback(stop)
            until(lambda: server.started)
            return 0 if sock.family == socket.AF_UNIX else int(sock.getsockname()[1])

        yield start


@pytest.fixture(params=["seed", "planner", "seed-tls", "planner-tls"])
def service(
    request: pytest.FixtureRequest,
    make_seed: Callable[..., Seed],
    serve: Callable[..., int],
    authority: Authority,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Service]:
    certificate: Certificate | None = None
    if request.param.endswith("-tls"):
        certificate = authority.issue("patience", "IP:127.0.0.1")
    ca_file = authority.ca_file if certificate else None
    if request.param.startswith("seed"):
        monkeypatch.setattr(patience, "LISTENER", SMALL)
        files = {"tls_cert_file": certificate.cert_file, "tls_key_file": certificate.key_file} if certificate else {}
        url = make_seed(key=None, **files).node.listener_url or ""
        found = Service(int(url.rpartition(":")[2]), "/rfork/v1/status", "/rfork/v1/leases", ca_file)
    else:
        files = {"ssl_certfile": certificate.cert_file, "ssl_keyfile": certificate.key_file} if certificate else {}
        port = serve(create_app(PlannerService(Policy(settle_s=0.0), SystemClock())), **files)
        found = Service(port, "/healthz", "/rfork/v1/asks", ca_file)
    with found.http:
        yield found


def closed(sock: socket.socket) -> bool:
    """Whether the other side has closed; what it sent before is skipped."""
    while select.select([sock], [], [], 0)[0]:
        try:
            if not sock.recv(65536):
                return True
        except ssl.SSLWantReadError:
            return False
        except OSError:
            return True
    return False


def status(sock: socket.socket) -> int:
    """Of one answer, which is read to its end."""
    answer = http.client.HTTPResponse(sock)
    answer.begin()
    answer.read()
    return answer.status


def trickle(sock: socket.socket) -> None:
    try:
        sock.sendall(b"x")
    except OSError:
        return


def test_a_request_that_never_ends_is_closed_while_others_are_answered(service: Service) -> None:
    """Nothing, half a head, half of a later head, half a body; silent or trickling. Each is given its bound."""
    body = f"POST {service.post} HTTP/1.1\r\nHost: me\r\nContent-Length: 60000\r\n\r\n{{".encode()
    began = time.monotonic()
    head = {
        "nothing": service.connect(),
        "half a head": service.connect(b"GET / HTTP/1.1\r\nHost: "),
        "a head that trickles": service.connect(b"GET / HTTP/1.1\r\nHost: "),
    }
    late = service.connect(service.health)
    assert status(late) == 200
    late.sendall(b"GET / HTTP/1.1\r\n")
    head["a later head"] = late
    bodies = {"half a body": service.connect(body), "a body that trickles": service.connect(body)}
    left = {**head, **bodies}
    gone: dict[str, float] = {}
    while left and time.monotonic() - began < SOON_S:
        assert service.answers()
        for name in [name for name, sock in left.items() if closed(sock)]:
            gone[name] = time.monotonic() - began
            left.pop(name).close()
        for name in left:
            if "trickles" in name:
                trickle(left[name])
        time.sleep(0.02)
    assert not left
    assert min(gone[name] for name in head) >= SMALL.head_s
    assert min(gone[name] for name in bodies) >= SMALL.body_s


def test_who_waits_for_an_answer_or_between_requests_is_left_alone(service: Service) -> None:
    idle, poll = service.connect(service.health), service.connect()
    assert status(idle) == 200
    began, polls = time.monotonic(), service.post.endswith("asks")
    if polls:
        poll.sendall(b"GET /rfork/v1/events?wait_s=2 HTTP/1.1\r\nHost: me\r\n\r\n")
        assert status(poll) == 200
    time.sleep(max(0.0, began + 2.0 - time.monotonic()))  # real sockets: all three bounds pass
    if polls:
        assert not closed(poll)
    else:
        until(lambda: closed(poll), SOON_S)
    idle.sendall(service.health)
    assert status(idle) == 200


def test_a_crowd_is_kept_out_and_told_of_once(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    """What comes beyond the bound is closed at once; when the crowd's time is over, all is as before."""
    caplog.set_level(logging.WARNING, "rfork.http")
    service.http.close()
    crowd = [service.dial() for _ in range(3 * SMALL.max_connections)]
    until(lambda: sum(map(closed, crowd)) >= 2 * SMALL.max_connections)
    with httpx.Client(base_url=service.url, verify=service.context or False, timeout=SOON_S) as http:
        service.http = http
        until(lambda: all(map(closed, crowd)), SOON_S)
        assert service.answers()
    for sock in crowd:
        sock.close()
    told = [record.getMessage() for record in caplog.records if record.name == "rfork.http"]
    assert told == [f"no room for a connection: {SMALL.max_connections} are open (1 closed)"]


@pytest.mark.parametrize("service", ["seed-tls", "planner-tls"], indirect=True)
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00\x01"], ids=["silent", "half a hello"])
def test_a_handshake_that_never_ends_is_closed(service: Service, sent: bytes) -> None:
    began = time.monotonic()
    sock = service.dial()
    sock.sendall(sent)
    until(lambda: closed(sock), SOON_S)
    assert time.monotonic() - began >= SMALL.head_s * 0.9
    assert service.answers()


@pytest.mark.parametrize(
    "sent",
    [b"GET / HTTP/1.1\r\nX: ", b"POST / HTTP/1.1\r\nHost: me\r\nContent-Length: 99999999\r\n\r\n"],
    ids=["head", "body"],
)
def test_a_request_without_end_is_not_read_without_end(
    serve: Callable[..., int], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    """Fast senders are cut by bytes, long before their time is over."""
    monkeypatch.setattr(patience, "MAX_REQUEST_NBYTES", 1 << 20)
    port = serve(answer, SMALL._replace(head_s=60.0, body_s=60.0))
    sock = socket.create_connection(("127.0.0.1", port), timeout=SOON_S)
    sock.sendall(sent)
    nbytes = 0
    with contextlib.suppress(ConnectionError):
        while nbytes < 64 << 20:
            nbytes += sock.send(b"x" * 65536)
    assert nbytes < 32 << 20


async def answer(scope: Any, receive: Any, send: Any) -> None:
    """`/stream` takes 2.5 s, `/much` is 64 MiB, else nothing."""
    await send({"type": "http.response.start", "status": 200, "headers": []})
    if scope["path"] == "/much":
        await send({"type": "http.response.body", "body": bytes(64 << 20), "more_body": True})
    if scope["path"] == "/stream":
        for _ in range(10):
            await send({"type": "http.response.body", "body": b"x", "more_body": True})
            await asyncio.sleep(0.25)
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def test_an_answer_that_takes_its_time_is_not_cut(serve: Callable[..., int]) -> None:
    assert httpx.get(f"http://127.0.0.1:{serve(answer)}/stream", timeout=SOON_S).content == b"x" * 10


def test_an_answer_that_nobody_takes_is_given_up(serve: Callable[..., int]) -> None:
    """One that is taken slowly is not."""
    port = serve(answer, SMALL._replace(unread_s=2.4))
    request = b"GET /much HTTP/1.1\r\nHost: me\r\n\r\n"
    slow, never = (socket.create_connection(("127.0.0.1", port), timeout=SOON_S) for _ in range(2))
    slow.sendall(request)
    never.sendall(request)
    taken = 0
    while taken < 64 << 20:  # takes 5 s at least
        got = len(slow.recv(1 << 20))
        assert got, "the slow one was cut"
        taken += got
        time.sleep(5 * got / (64 << 20))
    rest = 0
    with contextlib.suppress(ConnectionError):
        while got := len(never.recv(1 << 20)):
            rest += got
    assert rest < 64 << 20


def test_a_socket_in_a_folder_is_served_too(serve: Callable[..., int], tmp_path: Path) -> None:
    """As SGLang's several workers have it."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.bind(str(tmp_path / "s"))
    serve(answer, sock=sock)
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(tmp_path / "s")), timeout=SOON_S) as http:
        assert http.get("http://me/").status_code == 200


OUT_OF_DESCRIPTORS = """
import asyncio, logging, os, resource, socket, sys, threading, time
import uvicorn
from rfork.patience import Patience, Server

async def answer(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

logging.basicConfig(level="WARNING", format="%(message)s", stream=sys.stdout)
sock = socket.create_server(("127.0.0.1", 0))
config = uvicorn.Config(answer, log_config=None, log_level="warning", loop=sys.argv[1], lifespan="off")
server = Server(config, Patience(100, reserve=0.0))
threading.Thread(target=server.run, args=([sock],), daemon=True).start()
while not server.started:
    time.sleep(0.01)
time.sleep(0.2)
resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))
taken = []
try:
    while True:
        taken.append(os.dup(0))
except OSError:
    pass
print(sock.getsockname()[1], flush=True)
sys.stdin.readline()
print("busy", time.process_time(), flush=True)
sys.stdin.readline()
print("busy", time.process_time(), flush=True)
for number in taken:
    os.close(number)
sys.stdin.readline()
"""


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_a_process_without_descriptors_says_so_once_and_does_not_spin(loop: str) -> None:
    """Whoever knocked meanwhile is answered when there are some again."""
    program = [sys.executable, "-c", textwrap.dedent(OUT_OF_DESCRIPTORS), loop]
    with subprocess.Popen(program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def ask() -> None:
            process.stdin.write("\n")
            process.stdin.flush()

        port = int(process.stdout.readline())
        knocking = [socket.create_connection(("127.0.0.1", port), timeout=SOON_S) for _ in range(3)]
        assert process.stdout.readline() == "can't accept connections: Too many open files (1 times)\n"
        ask()
        before = float(process.stdout.readline().split()[1])
        time.sleep(2.5)  # two or three attempts
        ask()
        words = process.stdout.readline().split()
        assert words[0] == "busy", "said more than once"
        assert float(words[1]) - before < 0.5
        for sock in knocking:
            sock.sendall(b"GET / HTTP/1.1\r\nHost: me\r\n\r\n")
            assert sock.recv(65536).startswith(b"HTTP/1.1 200")
            sock.close()
        ask()
        process.wait(10)


def test_a_planner_of_few_descriptors_outlives_a_crowd(tmp_path: Path) -> None:
    """`rfork planner` as it is: 400 half requests and `ulimit -n 256`. It answers who has a connection, and all again
    after the bound; it says so once.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log = tmp_path / "log"
    with log.open("wb") as output:
        planner = subprocess.Popen(
            [sys.executable, "-m", "rfork.cli", "planner", "--port", str(port)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={name: value for name, value in os.environ.items() if not name.startswith("RFORK_")},
            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256)),
        )
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=SOON_S) as http:

            def answers() -> bool:
                try:
                    return http.get("/healthz").status_code == 200
                except httpx.TransportError:
                    return False

            until(answers, 60)
            crowd = []
            for _ in range(400):
                crowd.append(socket.create_connection(("127.0.0.1", port), timeout=SOON_S))
                crowd[-1].sendall(b"GET /healthz HTTP/1.1\r\nHost: ")
            assert answers(), "who was connected before is served"
            assert 250 >= sum(not closed(sock) for sock in crowd) >= 100
            until(lambda: all(map(closed, crowd)), 30)
        assert httpx.get(f"http://127.0.0.1:{port}/healthz", timeout=SOON_S).status_code == 200
    finally:
        planner.terminate()
        planner.wait(20)
    said = [line for line in log.read_text().splitlines() if "no room for a connection" in line]
    assert len(said) == 1
    assert "of its 256 descriptors (ulimit -n)" in said[0]
