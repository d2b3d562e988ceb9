"""The client's end of the listener's protocol, against servers that answer what a test says, or misbehave."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

import msgspec
import pytest
from support.host_shard import CHUNK_NBYTES, HostSeed, manifest_of
from support.seed_node import until

from rfork.client.calls import Caller
from rfork.client.lease import Lease, take_lease
from rfork.clock import SystemClock
from rfork.errors import SeedRefused, SeedUnreachable
from rfork.identity import RankIdentity
from rfork.manifest import encode_manifest
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.wire.seed import LeaseRequest, Refusal

from .conftest import Stage

CLOCK = SystemClock()


def request(**changes: object) -> LeaseRequest:
    base = LeaseRequest(
        client="i-client",
        instance_key="k",
        identity={},
        engine="test",
        content="checkpoint:1",
        rank=RankIdentity(),
    )
    return msgspec.structs.replace(base, **changes)


@pytest.fixture
def seed() -> HostSeed:
    return HostSeed(manifest_of({"a": 100_000, "b": 1}), [MemoryTransport(MemoryFabric())])


def test_a_lease_opens_manifest_and_digests_and_is_given_back(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease().reply)
    stage.answers["GET", "/manifest"] = (200, encode_manifest(seed.shard.manifest))
    stage.answers["GET", "/digests"] = (200, msgspec.msgpack.encode(seed.table))
    with take_lease(stage.url, request(), timeout_s=5) as lease:
        assert lease.reply == seed.lease().reply
        assert lease.manifest() == seed.shard.manifest
        assert lease.digests().chunk_nbytes == CHUNK_NBYTES
        lease.check()
    assert stage.asked[-1] == ("DELETE", "/rfork/v1/leases/l-1")


def test_a_refusal_carries_the_seeds_reason_and_what_differs(stage: Stage) -> None:
    refusal = Refusal(
        reason="key_mismatch", message="other weights", differing=[("dtype", "bfloat16", "float16")], retry_after_s=2
    )
    stage.refuse("POST", "/rfork/v1/leases", 409, refusal)
    with pytest.raises(SeedRefused, match="other weights") as caught:
        take_lease(stage.url, request(), timeout_s=5)
    assert caught.value.reason == "key_mismatch"
    assert caught.value.differing == (("dtype", "bfloat16", "float16"),)
    assert caught.value.retry_after_s == 2


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"lease": 1}', b"[" * 100_000])
def test_an_answer_that_is_no_lease_is_not_our_protocol(stage: Stage, body: bytes) -> None:
    stage.answers["POST", "/rfork/v1/leases"] = (201, body)
    with pytest.raises(SeedUnreachable, match="not R-Fork's protocol"):
        take_lease(stage.url, request(), timeout_s=5)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"ttl_s": 0.0}, "a lease of 0"),
        ({"generation": 3}, "generation 3"),
        ({"manifest_digest": "x"}, "different manifests"),
        ({"content": "checkpoint:2"}, "checkpoint:2 was granted"),
        ({"manifest_path": "http://elsewhere/manifest"}, "same listener"),
    ],
)
def test_a_lease_that_contradicts_itself_is_refused(
    stage: Stage, seed: HostSeed, changes: dict[str, object], match: str
) -> None:
    stage.grant(seed.lease(**changes).reply)
    with pytest.raises(SeedUnreachable, match=match):
        take_lease(stage.url, request(), timeout_s=5)


def test_another_instance_at_the_address_is_refused(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease().reply)
    with pytest.raises(SeedUnreachable, match="i-asked was asked, i-seed answered"):
        take_lease(stage.url, request(seed="i-asked"), timeout_s=5)


def test_a_lease_is_renewed_while_it_is_held(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease(ttl_s=1.5).reply)
    with take_lease(stage.url, request(), timeout_s=5) as lease:
        assert stage.renewed.wait(5)
        lease.check()


def wait_until_lost(check: Callable[[], None]) -> Exception:
    deadline = CLOCK.now() + 10
    while CLOCK.now() < deadline:
        try:
            check()
        except (SeedRefused, SeedUnreachable) as error:
            return error
        CLOCK.sleep(0.01)
    raise AssertionError("the lease was never lost")


def test_a_refused_renewal_ends_the_lease_with_the_seeds_reason(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease(ttl_s=1.5).reply)
    path = "/rfork/v1/leases/l-1/renew"
    stage.refuse("POST", path, 410, Refusal(reason="stale_generation", message="new weights"))
    with take_lease(stage.url, request(), timeout_s=5) as lease:
        error = wait_until_lost(lease.check)
    assert isinstance(error, SeedRefused)
    assert error.reason == "stale_generation"


def test_renewals_that_do_not_get_through_end_the_lease_after_its_ttl(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease(ttl_s=0.3).reply)
    stage.answers["POST", "/rfork/v1/leases/l-1/renew"] = (502, b"<html>")
    before = CLOCK.now()
    with take_lease(stage.url, request(), timeout_s=5) as lease:
        error = wait_until_lost(lease.check)
        assert CLOCK.now() - before >= 0.3
    assert isinstance(error, SeedUnreachable)


def test_a_renewal_that_fails_once_is_never_told_as_the_end_of_the_lease(stage: Stage, seed: HostSeed) -> None:
    """Whoever reads looks at any moment, also at the one in which the answer is understood."""
    told: list[object] = []

    class Watched(Lease):
        def __setattr__(self, name: str, value: object) -> None:
            told.extend([value] if name == "_lost" else [])
            super().__setattr__(name, value)

    stage.grant(seed.lease(ttl_s=1.5).reply)
    stage.answers["POST", "/rfork/v1/leases/l-1/renew"] = (502, b"<html>")
    lease = take_lease(stage.url, request(), timeout_s=5)
    lease.__class__ = Watched
    with lease:
        assert stage.renewed.wait(5)
        stage.answers["POST", "/rfork/v1/leases/l-1/renew"] = (200, b"{}")
        until(lambda: stage.asked.count(("POST", "/rfork/v1/leases/l-1/renew")) >= 3)
    assert [error for error in told if "502" in str(error)] == []


def test_a_lease_is_given_back_once(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease().reply)
    with take_lease(stage.url, request(), timeout_s=5) as lease:
        lease.release()
        lease.keep()
    assert [asked for asked in stage.asked if asked[0] == "DELETE"] == [("DELETE", "/rfork/v1/leases/l-1")]


def test_a_release_that_fails_is_no_error(stage: Stage, seed: HostSeed) -> None:
    stage.grant(seed.lease().reply)
    lease = take_lease(stage.url, request(), timeout_s=5)
    stage.answers["DELETE", "/rfork/v1/leases/l-1"] = (500, b"")
    lease.release()


@contextlib.contextmanager
def raw_server(talk: Callable[[socket.socket, threading.Event], None]) -> Iterator[str]:
    """A TCP server that does what `talk` says with its one connection."""
    done = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                with connection:
                    talk(connection, done)

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        done.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)


def say_nothing(connection: socket.socket, done: threading.Event) -> None:
    done.wait(20)


def trickle_headers(connection: socket.socket, done: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nX: ")
    while not done.wait(0.05):
        connection.sendall(b"x")


def trickle_body(connection: socket.socket, done: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 1000000\r\n\r\n")
    while not done.wait(0.05):
        connection.sendall(b"x")


@pytest.mark.parametrize("talk", [say_nothing, trickle_headers, trickle_body])
def test_a_call_ends_by_its_deadline_however_the_answer_dawdles(
    talk: Callable[[socket.socket, threading.Event], None],
) -> None:
    """Time-outs of each receive would never fire on a trickle."""
    with raw_server(talk) as url:
        caller = Caller(url)
        before = CLOCK.now()
        with pytest.raises(SeedUnreachable, match=r"within 0\.4 s"):
            caller.call("GET", "/", timeout_s=0.4, limit=1 << 20)
        assert CLOCK.now() - before < 5
        caller.close()


def dawdle(connection: socket.socket, done: threading.Event) -> None:
    """A whole answer, in two seconds."""
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 40\r\n\r\n")
    for _ in range(40):
        done.wait(0.05)
        connection.sendall(b"x")


def test_a_call_whose_name_look_up_took_all_its_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The connection that comes of it late must not be waited for as if the deadline were still to come."""
    known = socket.getaddrinfo

    def look_up(*args: object, **how: object) -> object:
        CLOCK.sleep(0.5)
        return known(*args, **how)

    with raw_server(dawdle) as url:
        monkeypatch.setattr(socket, "getaddrinfo", look_up)
        caller = Caller(url)
        with pytest.raises(SeedUnreachable, match=r"within 0\.2 s"):
            caller.call("GET", "/", timeout_s=0.2, limit=1 << 20)
        caller.close()


def test_the_deadline_of_a_call_that_has_ended_does_not_cut_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timer that fires while it is cancelled runs a moment later: here, while the next call waits for its answer."""
    timers: list[threading.Timer] = []

    class Stopped(threading.Timer):
        def start(self) -> None:
            timers.append(self)

    def talk(connection: socket.socket, done: threading.Event) -> None:
        for _ in range(2):
            connection.recv(1 << 16)
            if len(timers) == 2:
                timers[0].function(*timers[0].args)
            connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok")

    monkeypatch.setattr(threading, "Timer", Stopped)
    with raw_server(talk) as url:
        caller = Caller(url)
        assert [caller.call("GET", "/", timeout_s=5, limit=100).body for _ in range(2)] == [b"ok", b"ok"]
        caller.close()


def test_an_answer_is_bounded_once_unpacked(stage: Stage) -> None:
    """A small body that unpacks to a large one (P67)."""
    stage.answers["GET", "/bomb"] = (200, bytes(50 << 20))
    caller = Caller(stage.url)
    with pytest.raises(SeedUnreachable, match="exceeds 1048576 bytes"):
        caller.call("GET", "/bomb", timeout_s=10, limit=1 << 20)
    caller.close()


def test_nobody_at_the_address_is_unreachable() -> None:
    caller = Caller("http://127.0.0.1:1")
    with pytest.raises(SeedUnreachable, match=r"http://127\.0\.0\.1:1"):
        caller.call("GET", "/", timeout_s=2, limit=100)
    caller.close()


def test_a_proxy_of_the_environment_is_not_followed(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    stage.answers["GET", "/here"] = (200, b"yes")
    caller = Caller(stage.url)
    assert caller.call("GET", "/here", timeout_s=5, limit=100).body == b"yes"
    caller.close()
