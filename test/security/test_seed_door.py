"""A seed of a fleet with a key: strangers change nothing and see no address; a seed without the key can't serve."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec
import pytest
from support.host_shard import HostShard
from support.seed_node import Seed, lease_body, until

from rfork.auth import TICKET_HEADER, Signer, seed_audience
from rfork.client.calls import Caller, Reply
from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.pull import pull
from rfork.client.resolve import Candidate, resolve
from rfork.clock import SystemClock
from rfork.errors import SeedError, SeedRefused, SeedUnproven
from rfork.fence import check_fence
from rfork.keys import KeyRing
from rfork.seed import bodies
from rfork.seed.app import OPEN, make_app
from rfork.seed.node import NodeService
from rfork.seed.stock import stock_reply
from rfork.transports.memory import MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import LeaseRequest, WeightsReport

from . import KEY, OTHER_KEY

ADDRESS = re.compile(rb"\d+\.\d+\.\d+\.\d+|https?://|localhost|\[::1\]|memory:")
MAKE = Callable[..., Seed]


def url_of(seed: Seed) -> str:
    return str(seed.http.base_url).rstrip("/")


def signer(key: str = KEY) -> Signer:
    return Signer(KeyRing(key), "i-client")


def find(seed: Seed, key: str | None = KEY) -> Candidate:
    return resolve(url_of(seed), timeout_s=5, signer=signer(key) if key else None)


def request_for(seed: Seed) -> LeaseRequest:
    return msgspec.convert(lease_body(seed=seed.node.instance_id), LeaseRequest)


def routes(node: NodeService) -> list[tuple[str, str]]:
    """Every end-point that needs a ticket."""
    found = []
    for route in make_app(node)._app.routes:  # type: ignore[attr-defined]
        handler = route.endpoint.args[1]
        if handler not in OPEN:
            method = next(m for m in ("POST", "DELETE", "GET") if m in route.methods)
            found.append((method, route.path.replace("{lease}", "l-1")))
    return found


def test_whatever_changes_state_or_names_an_address_wants_a_ticket(seed: Seed) -> None:
    asked = routes(seed.node)
    assert len(asked) >= 6
    for method, path in asked:
        for headers in ({}, {TICKET_HEADER: "ask1;1;2;3;4;5"}, {"authorization": "Bearer x"}):
            answer = seed.http.request(method, path, json=lease_body() if method == "POST" else None, headers=headers)
            assert (answer.status_code, answer.json()["reason"]) == (401, "unauthorized"), (method, path)
            assert not ADDRESS.search(answer.content)
    assert (seed.node.state.value, seed.node.num_readers) == ("serving", 0)


def test_a_status_shows_no_address_to_strangers_and_all_to_the_fleet(seed: Seed) -> None:
    shown = seed.http.get("/rfork/v1/status")
    assert not ADDRESS.search(shown.content)
    assert shown.json()["listener"] is None
    assert (shown.json()["ticket_wanted"], shown.json()["instance_id"]) == (True, seed.node.instance_id)
    assert find(seed).listener == url_of(seed)


def test_a_fallbacks_reason_is_shown_and_its_text_is_not(make_seed: MAKE) -> None:
    """It may quote addresses of other seeds."""
    seed = make_seed()
    seed.agents[0].loaded(
        seed.shards[0].rank,
        WeightsReport(
            source="checkpoint", fallback_reason="unreachable", fallback_detail="http://192.0.2.3:4 is silent"
        ),
    )
    until(lambda: b"unreachable" in seed.http.get("/rfork/v1/status").content)  # the rank's word is on its way
    body = seed.http.get("/rfork/v1/status").content
    assert not ADDRESS.search(body)


def test_metrics_are_open_and_show_no_address(seed: Seed) -> None:
    answer = seed.http.get("/metrics")
    assert answer.status_code == 200
    assert not ADDRESS.search(answer.content)


def test_the_fleet_forks_from_one_another(seed: Seed) -> None:
    shard = HostShard(seed.shards[0].resolve().manifest)
    with take_lease(find(seed).listener, request_for(seed), timeout_s=5, signer=signer()) as lease:
        fabrics = GivenFabrics([MemoryTransport(seed.fabric)])
        pull(shard, lease, fabrics, PullSettings(), check_fence=check_fence, clock=SystemClock())
    assert shard.buffer.view == seed.shards[0].buffer.view
    assert seed.node.num_readers == 0


@pytest.mark.parametrize(("key", "hint"), [(None, "set `key_file`"), (OTHER_KEY, "is the fleet key the same")])
def test_a_client_without_the_key_is_told_so(seed: Seed, key: str | None, hint: str) -> None:
    with pytest.raises(SeedRefused, match=hint) as caught:
        find(seed, key)
    assert caught.value.reason == "unauthorized"
    with pytest.raises(SeedRefused) as caught:
        take_lease(url_of(seed), request_for(seed), timeout_s=5, signer=signer(key) if key else None)
    assert caught.value.reason == "unauthorized"


def test_a_key_rotates_under_a_serving_seed(make_seed: MAKE, tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_text(KEY)
    seed = make_seed(key=None, key_file=str(path))
    assert find(seed, KEY).instance_id == seed.node.instance_id
    path.write_text(f"{OTHER_KEY}\n{KEY}\n")
    assert find(seed, KEY).instance_id == find(seed, OTHER_KEY).instance_id
    path.write_text(OTHER_KEY)
    assert find(seed, OTHER_KEY).instance_id == seed.node.instance_id
    with pytest.raises(SeedRefused):
        find(seed, KEY)


def test_a_seed_without_the_key_can_not_serve(make_seed: MAKE) -> None:
    stranger = make_seed(key=None)
    with pytest.raises(SeedUnproven, match="without a proof of this fleet's key") as caught:
        find(stranger)
    assert caught.value.reason == "unproven"
    with pytest.raises(SeedUnproven):
        take_lease(url_of(stranger), request_for(stranger), timeout_s=5, signer=signer())


def test_a_refusal_of_a_stranger_is_not_believed_either(make_seed: MAKE) -> None:
    """Only 401 needs no proof: anybody can deny, nobody but the fleet can say why."""
    stranger = make_seed(key=None)
    stranger.node.drain()
    with pytest.raises(SeedUnproven):
        take_lease(url_of(stranger), request_for(stranger), timeout_s=5, signer=signer())


def test_the_fleets_refusals_keep_their_reason(seed: Seed) -> None:
    seed.node.drain()
    with pytest.raises(SeedRefused) as caught:
        take_lease(url_of(seed), request_for(seed), timeout_s=5, signer=signer())
    assert (caught.value.reason, caught.value.retry_after_s) == ("draining", 30.0)


def test_a_ticket_for_the_former_instance_on_an_address_is_answered_421(seed: Seed) -> None:
    caller = Caller(url_of(seed), signer=signer(), audience=seed_audience("i-former"))
    answer = caller.call("POST", "/rfork/v1/drain", timeout_s=5, limit=1 << 20)
    caller.close()
    assert (answer.status, json.loads(answer.body)["reason"]) == (421, "other_instance")
    assert seed.node.state.value == "serving"


def test_a_drain_that_was_overheard_drains_nobody_else(make_seed: MAKE) -> None:
    asked, other = make_seed(), make_seed()
    ticket: dict[str, str] = {}

    def send(headers: Mapping[str, str]) -> Reply:
        ticket.update(headers)
        reply = asked.http.post("/rfork/v1/drain", headers=headers)
        return Reply(reply.status_code, reply.content, None, reply.headers["rfork-proof"])

    assert signer().ask(seed_audience(asked.node.instance_id), "POST", "/rfork/v1/drain", b"", send).status == 202
    assert other.http.post("/rfork/v1/drain", headers=ticket).status_code == 421
    assert asked.http.post("/rfork/v1/drain", headers=ticket).status_code == 401  # used up
    assert (asked.node.state.value, other.node.state.value) == ("draining", "serving")


@pytest.mark.parametrize("key", [None, KEY])
def test_a_body_that_never_comes_is_given_up_and_one_that_breaks_off_harms_nobody(
    make_seed: MAKE, monkeypatch: pytest.MonkeyPatch, key: str | None
) -> None:
    monkeypatch.setattr(bodies, "BODY_DEADLINE_S", 0.2)
    seed = make_seed(key=key)
    address = (seed.http.base_url.host, int(seed.http.base_url.port or 0))
    head = b"POST /rfork/v1/leases HTTP/1.1\r\nHost: seed\r\nContent-Length: 1000\r\n\r\n{"
    with socket.create_connection(address, timeout=10) as slow:
        slow.sendall(head)
        assert slow.recv(12) == b"HTTP/1.1 400"
    with socket.create_connection(address, timeout=10) as broken:
        broken.sendall(head)
    assert seed.http.get("/rfork/v1/status").status_code == 200


def test_a_client_without_rfork_is_refused_by_name(seed: Seed, make_seed: MAKE) -> None:
    status, _, body = stock_reply(seed.node, "0", accepts_gzip=False)
    assert status == 403
    assert b"ticket_wanted" in body
    assert not ADDRESS.search(body)
    assert stock_reply(make_seed(key=None).node, "0", accepts_gzip=False)[0] == 200


@pytest.mark.parametrize("accept", ["gzip", "identity"])
def test_every_answer_to_the_fleet_is_proven_packed_or_not(seed: Seed, accept: str) -> None:
    with take_lease(url_of(seed), request_for(seed), timeout_s=5, signer=signer()) as lease:
        audience = seed_audience(seed.node.instance_id)
        for path in (lease.reply.manifest_path, lease.reply.digests_path, "/rfork/v1/nothing", "/rfork/v1/status"):
            caller = Caller(
                url_of(seed), signer=signer(), audience=audience, headers=lambda *_: {"Accept-Encoding": accept}
            )
            try:
                answer = caller.call("GET", path, timeout_s=5, limit=1 << 20)
            except SeedError:
                assert path.endswith("nothing")  # no end-point looked at that ticket
            else:
                assert answer.status == 200
                assert answer.proof
            finally:
                caller.close()
