"""The control connection: whole frames in order, a dead end noticed at either end, strangers kept out."""

import contextlib
import os
import secrets
import signal
import socket
import struct
import subprocess
import sys
import threading

import msgspec
import pytest
from support.leaks import open_sockets
from support.seed_node import until

from rfork.errors import TransportError
from rfork.seed import control
from rfork.seed.control import ControlClient, ControlServer
from rfork.wire.control import Answer, Changing, Hello

HELLO = Hello(pid=1, rank=3, num_ranks=4, replica=0, num_replicas=1)


class Node:
    def __init__(self):
        self.messages, self.peers, self.gone = [], [], []
        self.server = ControlServer(self.take, self.gone.append)

    def take(self, peer, message):
        self.messages.append(message)
        if peer not in self.peers:
            self.peers.append(peer)


@pytest.fixture
def node():
    node = Node()
    yield node
    node.server.close()


def address(name):
    return "\0" + name.removeprefix("@")


def connect(node, on_ask=lambda ask: Answer(ask.id, True), on_lost=lambda: None):
    client = ControlClient(node.server.name, HELLO, on_ask, on_lost)
    until(lambda: node.peers)
    return client


def test_messages_arrive_whole_and_in_order(node):
    client = connect(node)
    sent = [Changing(3, "x" * (i * 1000)) for i in range(200)]
    assert all(client.send(m) for m in sent)
    until(lambda: len(node.messages) == 201)
    assert node.messages == [HELLO, *sent]
    client.close()


def test_what_was_sent_before_close_still_arrives(node):
    client = connect(node)
    client.send(Changing(3, "last words"))
    client.close()
    until(lambda: node.gone)
    assert node.messages[-1] == Changing(3, "last words")


def test_ask_brings_the_answer_of_the_same_id(node):
    client = connect(node, lambda ask: Answer(ask.id, True, error=ask.verb))
    assert [node.peers[0].ask(verb, 5).error for verb in ("ping", "recheck")] == ["ping", "recheck"]
    client.close()


def test_silent_rank_costs_the_deadline_and_a_late_answer_is_dropped(node):
    release = threading.Event()

    def slow(ask):
        if ask.verb == "digests":
            release.wait(10)
        return Answer(ask.id, True)

    client = connect(node, slow)
    assert node.peers[0].ask("digests", 0.05).error == "no answer to digests within 0.05 s"
    release.set()
    assert node.peers[0].ask("ping", 5).ok
    client.close()


def test_answer_that_raises_is_a_no_and_not_the_end(node):
    client = connect(node, lambda ask: 1 / 0 if ask.verb == "digests" else Answer(ask.id, True))
    assert node.peers[0].ask("digests", 5).error == "ZeroDivisionError: division by zero"
    assert node.peers[0].ask("ping", 5).ok
    client.close()


def test_dead_rank_is_noticed_and_answers_for_it_come_at_once(node):
    block = threading.Event()
    client = connect(node, lambda ask: block.wait(10))
    asking = threading.Thread(target=lambda: results.append(node.peers[0].ask("digests", 30)))
    results = []
    asking.start()
    client._channel.close()
    asking.join(timeout=5)
    assert results[0].error == "the rank is gone"
    assert node.peers[0].ask("ping", 30).error == "the rank is gone"
    until(lambda: node.gone)
    block.set()


def test_dead_main_process_is_noticed_by_the_rank(node):
    lost = threading.Event()
    client = connect(node, on_lost=lost.set)
    node.server.close()
    assert lost.wait(5)
    assert client.send(Changing(3, "to nobody")) is False
    with pytest.raises(TransportError):
        connect(node)  # the name is given up as well


@pytest.mark.parametrize(
    "junk",
    [
        b"\xff\xff\xff\xff",  # longer than any frame may be
        struct.pack("!I", 3) + b"\xc1\xc1\xc1",  # no MessagePack
        struct.pack("!I", 1000) + b"cut short",
        struct.pack("!I", 1) + b"\x80",  # an object, but no message
        b"GET / HTTP/1.1\r\n\r\n",
    ],
)
def test_junk_ends_its_own_connection_only(node, junk):
    client = connect(node)
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address(node.server.name))
        stranger.sendall(junk)
        stranger.shutdown(socket.SHUT_WR)
        stranger.settimeout(5)
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(1) == b""
    assert node.peers[0].ask("ping", 5).ok
    client.close()


def test_rank_must_say_hello_first(node):
    with socket.socket(socket.AF_UNIX) as stranger:
        stranger.connect(address(node.server.name))
        body = msgspec.msgpack.encode(Changing(0, "rude"))
        stranger.sendall(struct.pack("!I", len(body)) + body)
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
    assert node.messages == []


def test_a_server_that_is_killed_leaves_nothing_in_the_file_system(tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    main = subprocess.Popen([sys.executable, "-c", MAIN_THAT_FORKS], stdout=subprocess.PIPE, text=True)
    assert main.stdout.readline().startswith("@rfork-")
    main.kill()
    main.wait()
    main.stdout.close()
    assert list(tmp_path.iterdir()) == []


def test_rank_that_takes_nothing_any_more_counts_as_gone(node, monkeypatch):
    """Its process is stopped, say: whoever asks it must not wait for ever once its socket is full."""
    monkeypatch.setattr(control, "SEND_TIMEOUT_S", 1)
    with socket.socket(socket.AF_UNIX) as rank:
        rank.connect(address(node.server.name))
        hello = msgspec.msgpack.encode(HELLO)
        rank.sendall(struct.pack("!I", len(hello)) + hello)
        until(lambda: node.peers)
        asking = threading.Thread(target=lambda: answers.append(node.peers[0].ask("x" * (8 << 20), 30)), daemon=True)
        answers = []
        asking.start()
        asking.join(timeout=20)
        assert [answer.error for answer in answers] == ["the rank is gone"]
        until(lambda: node.gone)


def test_rank_that_can_not_say_hello_leaves_no_socket():
    before = open_sockets()
    with socket.socket(socket.AF_UNIX) as main:
        name = "@rfork-" + secrets.token_hex(16)
        main.bind(address(name))
        main.listen()
        silent = threading.Thread(target=lambda: main.accept()[0].close())
        silent.start()
        hello = Hello(pid=1, rank=0, num_ranks=1, replica=0, num_replicas=1, instance_id="i" * (8 << 20))
        with pytest.raises(TransportError, match="lost while sending"):
            ControlClient(name, hello, lambda ask: Answer(ask.id, True), lambda: None)
        silent.join()
    until(lambda: open_sockets() <= before)


MAIN_WITHOUT_DESCRIPTORS = """
import logging, os, resource, sys, threading
from rfork.seed.control import ControlServer
said_hello, warned = threading.Event(), threading.Event()
class Kept(logging.Handler):
    def emit(self, record):
        if "can't be heard yet: [Errno 24]" in record.getMessage():
            warned.set()
logging.root.addHandler(Kept())
server = ControlServer(lambda peer, message: said_hello.set(), lambda peer: None)
soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
next_one = os.dup(0)
os.close(next_one)
resource.setrlimit(resource.RLIMIT_NOFILE, (next_one, hard))
print(server.name, flush=True)
sys.stdin.readline()
has_warned = warned.wait(20)
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
print(has_warned, said_hello.wait(20), flush=True)
"""


def test_main_process_without_descriptors_hears_its_ranks_once_it_has_some():
    run = [sys.executable, "-c", MAIN_WITHOUT_DESCRIPTORS]
    with subprocess.Popen(run, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as main:
        client = ControlClient(main.stdout.readline().strip(), HELLO, lambda ask: Answer(ask.id, True), lambda: None)
        main.stdin.write("\n")
        main.stdin.flush()
        assert main.stdout.readline() == "True True\n"
        client.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_other_user_is_refused(node):
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as stranger:
            stranger.settimeout(5)
            try:
                stranger.connect(address(node.server.name))
                os._exit(0 if stranger.recv(1) == b"" else 1)
            except OSError:
                os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert node.messages == []


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")
def test_a_rank_does_not_talk_to_another_users_process():
    name = "@rfork-" + secrets.token_hex(16)
    ready, done = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        os.setuid(65534)
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind(address(name))
            impostor.listen()
            os.write(ready[1], b"1")
            os.read(done[0], 1)
        os._exit(0)
    os.read(ready[0], 1)
    with pytest.raises(TransportError, match="another user listens there"):
        ControlClient(name, HELLO, lambda ask: Answer(ask.id, True), lambda: None)
    os.write(done[1], b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_nobody_listens_is_an_error_with_the_name():
    with pytest.raises(TransportError, match="can't reach this node's main process at @rfork-none"):
        ControlClient("@rfork-none", HELLO, lambda ask: Answer(ask.id, True), lambda: None)


MAIN_THAT_FORKS = """
import os, threading, time
from rfork.seed.control import ControlServer
said_hello = threading.Event()
server = ControlServer(lambda peer, message: said_hello.set(), lambda peer: None)
print(server.name, flush=True)
said_hello.wait(30)
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(60)
"""


def test_forked_child_does_not_hide_the_death_of_its_parent():
    main = subprocess.Popen([sys.executable, "-c", MAIN_THAT_FORKS], stdout=subprocess.PIPE, text=True)
    lost = threading.Event()
    client = ControlClient(main.stdout.readline().strip(), HELLO, lambda ask: Answer(ask.id, True), lost.set)
    child = int(main.stdout.readline())
    try:
        main.kill()
        main.wait()
        assert lost.wait(5)
    finally:
        os.kill(child, signal.SIGKILL)
        client.close()
        main.stdout.close()
