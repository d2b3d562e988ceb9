"""From what a user types to a seed's listener."""

from __future__ import annotations

import pytest

from rfork import wire
from rfork.client.resolve import reachable_listener, resolve, seed_url
from rfork.errors import SeedRefused, SeedUnreachable
from rfork.wire.seed import StatusReply

from .conftest import Stage


@pytest.mark.parametrize(
    ("seed", "port", "url"),
    [
        ("192.0.2.1:30000", None, "http://192.0.2.1:30000"),
        ("seed-0.seeds.svc:30000", None, "http://seed-0.seeds.svc:30000"),
        ("192.0.2.1", 30000, "http://192.0.2.1:30000"),
        ("fd00::1", 30000, "http://[fd00::1]:30000"),
        ("[fd00::1]", 30000, "http://[fd00::1]:30000"),
        ("[fd00::1]:30000", None, "http://[fd00::1]:30000"),
        ("fe80::1%eth0", 30000, "http://[fe80::1%eth0]:30000"),
        ("https://seed:30000/", None, "https://seed:30000"),
        ("http://[fd00::1]:1", None, "http://[fd00::1]:1"),
    ],
)
def test_every_way_to_write_an_address_is_understood(seed: str, port: int | None, url: str) -> None:
    assert seed_url(seed, port) == url


@pytest.mark.parametrize(
    "seed",
    [
        "",
        "192.0.2.1",
        "host:x",
        "host:0",
        "host:70000",
        "[fd00::1",
        "ftp://h:1",
        "http://h:1/x",
        "http://u:p@h:1",
        "a b:1",
    ],
)
def test_what_is_no_address_is_refused(seed: str) -> None:
    with pytest.raises(ValueError, match=r"^an (instance|IPv6 address) .*, got "):
        seed_url(seed)


@pytest.mark.parametrize(
    ("listener", "asked", "seen"),
    [
        ("http://192.0.2.1:40000", "http://192.0.2.1:30000", "http://192.0.2.1:40000"),
        ("http://0.0.0.0:40000", "http://192.0.2.1:30000", "http://192.0.2.1:40000"),
        ("http://[::]:40000", "http://[fd00::1]:30000", "http://[fd00::1]:40000"),
        ("http://127.0.0.1:40000", "http://127.0.0.1:30000", "http://127.0.0.1:40000"),
        ("https://192.0.2.2:40000", "http://192.0.2.1:30000", "https://192.0.2.2:40000"),
    ],
)
def test_a_listener_on_a_wildcard_is_asked_where_the_seed_was(listener: str, asked: str, seen: str) -> None:
    assert reachable_listener(listener, asked) == seen


@pytest.mark.parametrize("listener", ["http://127.0.0.1:40000", "http://localhost:40000", "http://[::1]:40000"])
def test_a_listener_on_loopback_is_refused_by_another_host_with_the_fix(listener: str) -> None:
    """Loopback is never of use to another host (P43)."""
    with pytest.raises(SeedRefused, match=r"listens on loopback .* start it with `listen`") as caught:
        reachable_listener(listener, "http://192.0.2.1:30000")
    assert caught.value.reason == "loopback"


@pytest.mark.parametrize(
    "listener", ["", "192.0.2.1:1", "file:///etc/passwd", "http://h", "http://u@h:1", "http://[x:1"]
)
def test_a_listener_that_is_no_url_is_not_our_protocol(listener: str) -> None:
    with pytest.raises(SeedUnreachable, match="no URL"):
        reachable_listener(listener, "http://192.0.2.1:30000")


def status(**changes: object) -> bytes:
    fields: dict[str, object] = {
        "version": "1",
        "protocol_version": 1,
        "instance_id": "i-seed",
        "state": "serving",
        "generation": 2,
        "listener": "http://0.0.0.0:40000",
        "instance_key": "k",
        "content": "checkpoint:1",
    }
    return wire.encode(StatusReply(**(fields | changes)))  # type: ignore[arg-type]


def at(stage: Stage) -> str:
    return stage.url.removeprefix("http://")


def test_a_seed_is_found_with_its_identity(stage: Stage) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (200, status())
    found = resolve(at(stage), timeout_s=5)
    assert (found.instance_id, found.listener) == ("i-seed", "http://127.0.0.1:40000")
    assert (found.instance_key, found.content, found.state, found.generation) == ("k", "checkpoint:1", "serving", 2)


def test_a_server_without_rfork_is_a_stock_seed(stage: Stage) -> None:
    with pytest.raises(SeedRefused, match="is not SGLang, or SGLang without R-Fork") as caught:
        resolve(at(stage), timeout_s=5)
    assert caught.value.reason == "stock_seed"


def test_a_process_does_not_fork_from_itself(stage: Stage) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (200, status())
    with pytest.raises(SeedRefused, match="this instance itself") as caught:
        resolve(at(stage), timeout_s=5, own_instance_ids={"i-seed"})
    assert caught.value.reason == "self"


def test_an_instance_without_a_listener_gives_no_leases(stage: Stage) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (200, status(listener=None))
    with pytest.raises(SeedRefused) as caught:
        resolve(at(stage), timeout_s=5)
    assert caught.value.reason == "no_listener"


@pytest.mark.parametrize(("code", "reason"), [(401, "unauthorized"), (403, "unauthorized"), (503, "not_ready")])
def test_a_bare_status_code_is_a_reason_where_it_has_one_meaning(stage: Stage, code: int, reason: str) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (code, b"no")
    with pytest.raises(SeedRefused) as caught:
        resolve(at(stage), timeout_s=5)
    assert caught.value.reason == reason


@pytest.mark.parametrize("body", [b"", b"<html>hello</html>", b"{}", b"null"])
def test_something_else_at_the_address_is_not_our_protocol(stage: Stage, body: bytes) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (200, body)
    with pytest.raises(SeedUnreachable, match="not R-Fork's protocol"):
        resolve(at(stage), timeout_s=5)


def test_a_key_goes_where_the_user_said(stage: Stage) -> None:
    stage.answers["GET", "/rfork/v1/status"] = (200, status())
    asked: list[tuple[str, str, bytes]] = []

    def headers(method: str, path: str, body: bytes) -> dict[str, str]:
        asked.append((method, path, body))
        return {"Authorization": "Bearer k"}

    resolve(at(stage), timeout_s=5, headers=headers)
    assert asked == [("GET", "/rfork/v1/status", b"")]
