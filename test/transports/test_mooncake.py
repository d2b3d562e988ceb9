"""Mooncake's own hazards, over TCP on this host, against peers in other processes."""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.buffers import Buffer, slices_of
from support.seed_node import until
from support.transport_peer import Peer, python_environment, serving

from rfork.binding import Region, Slice
from rfork.clock import SystemClock
from rfork.errors import NotQuiet, SeedLost, TransportError
from rfork.transports import mooncake_host
from rfork.transports.base import Engine
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.mooncake_import import environment, explain_import_error
from rfork.transports.read import ReadFailed, Window, read_all

from .conftest import Opener

CLOCK = SystemClock()
MIB = 1 << 20
NBYTES = 256 * MIB
SLICE = 4 * MIB


class Strike:
    """Does something to the peer once half of the bytes have landed."""

    def __init__(self, strike: Callable[[], None]) -> None:
        self._strike = strike
        self._nbytes = 0
        self.at_s = 0.0

    def __call__(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes >= NBYTES // 2 and not self.at_s:
            self._strike()
            self.at_s = CLOCK.now()


def read_while(
    client: Engine, peer: Peer, target: Buffer, strike: Callable[[int], None], *, progress_timeout_s: float
) -> ReadFailed:
    client.register([target.region])
    slices = slices_of(target, peer.address, SLICE)
    with pytest.raises(ReadFailed) as caught:
        read_all(
            client,
            peer.session_id,
            slices,
            window=Window(8, 8 * SLICE),
            progress_timeout_s=progress_timeout_s,
            clock=CLOCK,
            on_bytes=strike,
        )
    return caught.value


def test_a_peer_killed_in_the_middle_is_a_lost_seed(open_mooncake: Opener) -> None:
    with serving(NBYTES) as peer:
        strike = Strike(peer.kill)
        error = read_while(open_mooncake(), peer, Buffer(NBYTES), strike, progress_timeout_s=30)
        assert CLOCK.now() - strike.at_s < 10
    assert NBYTES // 2 <= error.done_nbytes < NBYTES
    assert sum(s.nbytes for s in error.missing) == NBYTES - error.done_nbytes


def test_no_byte_of_a_frozen_peer_lands_after_close(open_mooncake: Opener) -> None:
    """I8: the seed stops in the middle, the read times out, the engine is destroyed, the seed wakes."""
    with serving(NBYTES) as peer:
        client, target = open_mooncake(), Buffer(NBYTES)
        strike = Strike(peer.freeze)
        error = read_while(client, peer, target, strike, progress_timeout_s=2.0)
        assert "no progress" in str(error)
        assert 2 <= CLOCK.now() - strike.at_s < 12
        before = CLOCK.now()
        client.close(10)
        assert CLOCK.now() - before < 5
        for part in error.missing:
            at = part.local - target.address
            target.view[at : at + part.nbytes] = bytes(part.nbytes)
        peer.wake()
        time.sleep(1)  # what would land, lands now: 1.8 GB did without the close
        for part in error.missing:
            at = part.local - target.address
            assert target.view[at : at + part.nbytes] == bytes(part.nbytes)


def test_a_frozen_peer_bounds_the_first_read(open_mooncake: Opener) -> None:
    """Mooncake's handshake would wait for a minute; cutting its connection ends it, and the engine can be closed."""
    with serving(MIB) as peer:
        peer.freeze()
        client, target = open_mooncake(), Buffer(4096)
        client.register([target.region])
        before = CLOCK.now()
        with pytest.raises(SeedLost, match="did not shake hands over tcp within 2 s"):
            client.submit(peer.session_id, Slice(target.address, peer.address, 4096))
        client.close(5)
        assert CLOCK.now() - before < 10


def silent_listener(sock: socket.socket) -> None:
    sock.listen(16)


def full_listener(sock: socket.socket) -> None:
    """A backlog that is full drops whoever comes, as a black hole does."""
    sock.listen(0)
    for _ in range(4):
        filler = socket.socket()
        filler.setblocking(False)
        filler.connect_ex(sock.getsockname())
        HELD.append(filler)


HELD: list[socket.socket] = []


@pytest.mark.parametrize("listen", [silent_listener, full_listener])
def test_a_black_hole_is_bounded(open_mooncake: Opener, listen: Callable[[socket.socket], None]) -> None:
    client, target = open_mooncake(), Buffer(4096)
    client.register([target.region])
    with socket.socket() as hole:
        hole.bind(("127.0.0.1", 0))
        listen(hole)
        before = CLOCK.now()
        with pytest.raises(SeedLost):
            client.submit(f"127.0.0.1:{hole.getsockname()[1]}", Slice(target.address, 4096, 4096))
        client.close(8)
        assert CLOCK.now() - before < 20
    while HELD:
        HELD.pop().close()


def test_close_takes_milliseconds_and_frees_the_port(open_mooncake: Opener) -> None:
    """Mooncake alone takes up to a second, with the GIL held. The best of three, as others use the machine too."""
    took_s = []
    for _ in range(3):
        engine: Any = open_mooncake()
        assert mooncake_host.listens(engine.port)
        before = CLOCK.now()
        engine.close(10)
        took_s.append(CLOCK.now() - before)
        assert not mooncake_host.listens(engine.port)
    assert min(took_s) < 0.3


def test_an_engine_that_something_else_holds_is_not_quiet(open_mooncake: Opener) -> None:
    engine: Any = open_mooncake()
    held = [engine._raw]
    for _ in range(2):  # nor by asking again
        with pytest.raises(NotQuiet, match="something else holds the engine"):
            engine.close(0.2)
    held.clear()
    engine.close(2)


def test_an_engine_can_be_destroyed_while_its_own_error_is_handled(open_mooncake: Opener) -> None:
    """A traceback keeps the local variables of its frames alive: none of them may be the engine."""
    engine, buffer = open_mooncake(), Buffer(4096)
    engine.register([buffer.region])
    with pytest.raises(TransportError) as caught:
        engine.unregister([Region(buffer.address + 4096, 4096)])
    assert caught.tb is not None
    engine.close(2)


def test_engines_leave_no_threads_or_sockets_behind(open_mooncake: Opener) -> None:
    open_mooncake().close(10)  # the first engine of a process loads what stays
    gc.collect()  # what earlier tests left goes now, or ends by itself meanwhile
    threads, sockets = threading.active_count(), num_sockets()
    for _ in range(3):
        open_mooncake().close(10)
    until(lambda: threading.active_count() <= threads and num_sockets() <= sockets)


def num_sockets() -> int:
    return sum(1 for _ in mooncake_host.own_sockets())


def test_a_socket_whose_number_is_a_files_by_now_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    before = set(os.listdir("/proc/self/fd"))
    monkeypatch.setattr(mooncake_host.os, "readlink", lambda _path: "socket:[1]")
    assert all(sock.type == socket.SOCK_STREAM for sock in mooncake_host.own_sockets())
    assert set(os.listdir("/proc/self/fd")) <= before


def test_opening_an_engine_leaves_the_environment_alone(open_mooncake: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_INTRANODE_NVLINK", "as the user set it")
    before = dict(os.environ)
    open_mooncake()
    assert dict(os.environ) == before


def test_variables_are_put_back_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MC_A", "1")
    monkeypatch.delenv("MC_B", raising=False)

    def body() -> None:
        with environment({"MC_A": None, "MC_B": "2"}):
            assert ("MC_A" in os.environ, os.environ["MC_B"]) == (False, "2")
            raise KeyError("stop")

    with pytest.raises(KeyError):
        body()
    assert (os.environ["MC_A"], "MC_B" in os.environ) == ("1", False)


def test_nvlink_is_asked_for_by_a_variable_only_while_it_opens() -> None:
    transport = MooncakeTransport(protocol="nvlink_intra", host="127.0.0.1")
    assert transport._variables() == {"MC_INTRANODE_NVLINK": "true", "MC_FORCE_TCP": None}


def in_fresh_process(program: str, **environ: str) -> str:
    """Mooncake reads some settings when it is loaded, so their tests need a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**python_environment(), **environ},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


OPEN = """
from rfork.transports.mooncake import MooncakeTransport
from rfork.errors import TransportError
def attempt(**settings):
    try:
        engine = MooncakeTransport(protocol="tcp", **settings).open()
    except TransportError as error:
        print(error)
    else:
        print(engine.session_id)
        return engine
"""


def free_range(num_ports: int) -> tuple[int, int]:
    """Consecutive ports that are free now, below the kernel's own range."""
    for first in range(24_000, 30_000, num_ports):
        try:
            mooncake_host.require_free_ports((first, first + num_ports - 1))
        except TransportError:
            continue
        return first, first + num_ports - 1
    raise AssertionError("no free ports")


def test_ports_come_from_the_range_and_an_exhausted_one_is_refused() -> None:
    """Mooncake itself crashes when its range is used up."""
    first, last = free_range(4)
    out = in_fresh_process(
        OPEN + f"a = attempt(host='127.0.0.1', port_range=({first}, {last}))\n"
        f"b = attempt(host='127.0.0.1', port_range=({first}, {last}))\n"
        f"c = attempt(host='127.0.0.1', port_range=({first}, {last}))\n"
    ).splitlines()
    assert all(first <= int(line.rpartition(":")[2]) <= last for line in out[:2])
    assert out[2].startswith(f"port_range {first}-{last} has 0 free ports left")


def test_looking_at_the_host_first_does_not_spoil_the_range() -> None:
    """Gathering facts loads the library, which reads the range then and never again."""
    first, last = free_range(4)
    program = f"""
from rfork.config import Config
from rfork.transports.select import gather_facts, serving_transports
config = Config(port_range=({first}, {last}), advertise_host="127.0.0.1")
(transport,) = serving_transports(config, gather_facts("cpu", None, config))
print(transport.open().session_id)
"""
    assert first <= int(in_fresh_process(program).rpartition(":")[2]) <= last


def test_a_range_that_comes_too_late_is_refused() -> None:
    first, last = free_range(4)
    program = f"a = attempt(host='127.0.0.1')\nb = attempt(host='127.0.0.1', port_range=({first}, {last}))"
    out = in_fresh_process(OPEN + program).splitlines()
    assert f"set MC_MIN_RPC_PORT={first} and MC_MAX_RPC_PORT={last}" in out[1]


def test_a_range_that_mooncake_does_not_take_is_refused_with_the_one_that_it_does() -> None:
    out = in_fresh_process(OPEN + "a = attempt(host='127.0.0.1', port_range=(41310, 41330))")
    assert "Mooncake takes ports from 1024 to 32767 only: it passed over port_range 41310-41330" in out


def has_ipv6() -> bool:
    """Python may know it, and the host have no such address."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as sock:
        sock.bind(("::1", 0))
        return True
    return False


@pytest.mark.skipif(not has_ipv6(), reason="no IPv6 here")
def test_ipv6_reads_over_a_bracketed_session_id() -> None:
    program = """
from support.buffers import Buffer, slices_of
from rfork.transports.read import read_all, Window
from rfork.clock import SystemClock
seed, client = attempt(host="[::1]"), attempt(host="::1")
source, target = Buffer(1 << 20).fill(), Buffer(1 << 20)
seed.register([source.region]); client.register([target.region])
slices = slices_of(target, source.address, 1 << 18)
read_all(client, seed.session_id, slices, window=Window(2, 1 << 20), progress_timeout_s=5, clock=SystemClock())
print(target == source)
seed.close(5); client.close(5)
"""
    out = in_fresh_process(OPEN + program).splitlines()
    assert out[0].startswith("[::1]:")
    assert out[1].startswith("[::1]:")
    assert out[2] == "True"


def test_ipv6_after_an_ipv4_engine_is_refused_with_the_remedy() -> None:
    out = in_fresh_process(OPEN + "a = attempt(host='127.0.0.1')\nb = attempt(host='::1')").splitlines()
    assert "set MC_USE_IPV6=1" in out[1]


@pytest.mark.parametrize(
    ("text", "wheels", "expected"),
    [
        (
            "libibverbs.so.1: cannot open shared object file: No such file or directory",
            {"mooncake-transfer-engine": "0.3.13"},
            "apt-get install libibverbs1",
        ),
        (
            "librdmacm.so.1: cannot open shared object file: No such file or directory",
            {"mooncake-transfer-engine": "0.3.13"},
            "apt-get install librdmacm1",
        ),
        (
            "libnuma.so.1: cannot open shared object file: No such file or directory",
            {"mooncake-transfer-engine": "0.3.13"},
            "apt-get install libnuma1",
        ),
        (
            "libcurl.so.4: cannot open shared object file: No such file or directory",
            {"mooncake-transfer-engine": "0.3.13"},
            "apt-get install libcurl4",
        ),
        (
            "libcudart.so.12: cannot open shared object file: No such file or directory",
            {"mooncake-transfer-engine": "0.3.13"},
            "this Mooncake wheel is for CUDA",
        ),
        ("No module named 'mooncake'", {}, "Mooncake is not installed: pip install"),
        (
            "undefined symbol: x",
            {"mooncake-transfer-engine": "0.3.13", "mooncake-transfer-engine-non-cuda": "0.3.12"},
            "two Mooncake wheels overwrite each other (mooncake-transfer-engine 0.3.13 and",
        ),
    ],
)
def test_an_import_error_is_explained(text: str, wheels: dict[str, str], expected: str) -> None:
    assert expected in explain_import_error(text, wheels)


def test_the_watchdog_ends_a_process_whose_gil_is_held() -> None:
    """Destroying an engine holds the GIL; if it never ended, nothing inside the interpreter could say so."""
    program = """
import ctypes
from rfork.transports.mooncake_host import exit_unless_quiet_after
with exit_unless_quiet_after(0.2):
    ctypes.PyDLL(None).sleep(30)
print("still here")
"""
    before = CLOCK.now()
    done = subprocess.run(
        [sys.executable, "-c", program], env=python_environment(), capture_output=True, text=True, check=False
    )
    assert CLOCK.now() - before < 15
    assert done.returncode == 1
    assert "exit_unless_quiet_after" in done.stderr or "Timeout" in done.stderr
    assert "still here" not in done.stdout
