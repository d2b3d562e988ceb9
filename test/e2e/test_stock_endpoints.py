"""SGLang's own R-Fork end-points on SGLang's port: what a client without R-Fork reads, to the byte."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.forking import ENV, SEED, fork_from, serving, start_fork, start_seed, status, weights
from support.middleman import Middleman
from support.models import Models
from support.outside import lease_on
from support.plugins import HELD_START, PROBE, install_plugin
from support.server import Fleet, Server

pytestmark = pytest.mark.server

PATHS = ("/get_remote_instance_transfer_engine_info", "/remote_instance_transfer_engine_info")
API_KEY, ADMIN_KEY = "an-api-key", "an-admin-key"
ELEMENT_NBYTES = {"bfloat16": 2, "float32": 4}


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    return start_seed(module_fleet, models.path("llama"))


@pytest.mark.parametrize("path", PATHS)
def test_a_rank_answers_with_its_session_and_every_parameter(path: str, seed: Server) -> None:
    answer = seed.get(path, params={"rank": 0})
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert list(body) == ["rank", "remote_instance_transfer_engine_info"]
    assert body["rank"] == 0
    session_id, table = body["remote_instance_transfer_engine_info"]
    with lease_on(seed) as lease:
        manifest, binding = lease.manifest(), lease.reply.binding
    assert session_id == binding.endpoints[0].session_id
    assert table == {
        t.name: [binding.addresses[t.group] + t.offset, count(t.shape), ELEMENT_NBYTES[t.dtype]]
        for t in manifest.tensors
        if t.kind == "parameter"
    }


def count(shape: tuple[int, ...]) -> int:
    total = 1
    for size in shape:
        total *= size
    return total


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("query", "code", "reason"),
    [
        ("", 400, "bad_rank"),
        ("?rank=", 400, "bad_rank"),
        ("?rank=-1", 400, "bad_rank"),
        ("?rank=one", 400, "bad_rank"),
        ("?rank=0.0", 400, "bad_rank"),
        ("?rank=99999999999999999999", 400, "bad_rank"),
        ("?rank=1", 404, "unknown_rank"),
    ],
)
def test_a_rank_that_is_none_is_refused_with_the_reason(
    path: str, query: str, code: int, reason: str, seed: Server
) -> None:
    answer = seed.get(path + query)
    assert answer.status_code == code
    assert answer.json()["error"]["reason"] == reason
    assert "rank" in answer.json()["error"]["message"]


def test_a_client_that_takes_gzip_gets_gzip(seed: Server) -> None:
    plain = seed.get(PATHS[0], params={"rank": 0}, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    url = f"{seed.url}{PATHS[0]}?rank=0"
    with seed.http.stream("GET", url, headers={"Accept-Encoding": "gzip"}) as packed:
        raw = b"".join(packed.iter_raw())
    assert packed.headers["content-encoding"] == "gzip"
    assert len(raw) < len(plain.content)
    assert gzip.decompress(raw) == plain.content


def test_the_status_names_where_everything_else_is(seed: Server) -> None:
    found = status(seed)
    assert {"version", "state", "generation", "listener", "weights", "ranks"} <= found.keys()
    assert found["state"] == "serving"
    assert found["generation"] % 2 == 0
    assert httpx.get(f"{found['listener']}/rfork/v1/status", trust_env=False).json() == found
    report = {"source", "seed", "fallback_reason", "verify", "protocol", "nbytes", "seconds", "gbps"}
    assert report <= found["weights"].keys()
    assert [(r["rank"], r["role"], r["weights"]) for r in found["ranks"]] == [(0, "target", found["weights"])]


def test_nothing_of_it_leaks_into_server_info(seed: Server) -> None:
    """Whoever may ask for the server's settings must not learn addresses of its memory."""
    session_id = seed.get(PATHS[0], params={"rank": 0}).json()["remote_instance_transfer_engine_info"][0]
    text = seed.get("/server_info").text
    for secret in (session_id, status(seed)["instance_id"], status(seed)["listener"], "rfork", "down_proj"):
        assert secret not in text


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        (("--pp-size", "2"), "pipeline parallel"),
        (("--dp-size", "2"), "data parallel"),
    ],
)
def test_ranks_that_a_stock_client_would_mix_up_are_refused(
    flags: tuple[str, ...], why: str, fleet: Fleet, models: Models
) -> None:
    assert_refused(start_seed(fleet, models.path("llama"), *flags), why)


def test_layouts_that_a_stock_client_would_not_build_are_refused(fleet: Fleet, models: Models) -> None:
    assert_refused(start_seed(fleet, models.path("llama-fp8")), "post-processed")


def assert_refused(server: Server, why: str) -> None:
    for path in PATHS:
        answer = server.get(path, params={"rank": 0})
        assert answer.status_code == 409
        assert answer.json()["error"]["reason"] == "not_for_stock_clients"
        assert why in answer.json()["error"]["message"]


def test_before_health_a_client_is_told_to_come_back(fleet: Fleet, models: Models) -> None:
    """The server listens, its ranks have published, and it has not warmed up: nobody may read yet."""
    install_plugin(fleet.folder, "held_start", HELD_START)
    go: Path = fleet.folder / "go"
    server = fleet.start(models.path("llama"), SEED, env={**ENV, PROBE: str(go)}, wait=False)
    server.wait_for("to listen", lambda: answers(server), 120)
    for path in PATHS:
        early = server.get(path, params={"rank": 0})
        assert early.status_code == 503
        assert int(early.headers["retry-after"]) >= 1
        assert early.json()["error"]["reason"] == "not_ready"
    assert status(server)["state"] == "starting"
    assert "rfork: weights from" not in server.log()
    go.touch()
    serving(server)
    assert server.get(PATHS[0], params={"rank": 0}).status_code == 200


def test_several_http_workers_answer_as_one(fleet: Fleet, models: Models) -> None:
    """SGLang runs each in a process of its own, which loads no plugin; whichever is asked, the node answers."""
    server = start_seed(fleet, models.path("llama"), "--tokenizer-worker-num", "2")
    expected = [server.get(PATHS[0], params={"rank": rank}) for rank in (0, 1, -1)]
    assert [answer.status_code for answer in expected] == [200, 404, 400]
    for _ in range(8):
        with httpx.Client(base_url=server.url, trust_env=False) as http:  # each connection may reach another worker
            found = [http.get(PATHS[1], params={"rank": rank}) for rank in (0, 1, -1)]
        assert [(a.status_code, a.content) for a in found] == [(a.status_code, a.content) for a in expected]
    fork = start_fork(fleet, models.path("llama"), server.port)
    assert weights(fork)["seed"]["instance_id"] == status(server)["instance_id"]
    assert server.terminate(60) in (0, -15)
    assert fork.generate().tokens


def answers(server: Server) -> bool:
    try:
        return server.get("/rfork/v1/status", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


@pytest.mark.parametrize("keys", [("--api-key", API_KEY), ("--admin-api-key", ADMIN_KEY), ()])
def test_they_open_to_the_keys_that_open_sglangs_control_end_points(
    keys: tuple[str, ...], fleet: Fleet, models: Models
) -> None:
    """With both keys set the admin key alone opens them, as everywhere in SGLang."""
    flags = keys or ("--api-key", API_KEY, "--admin-api-key", ADMIN_KEY)
    server = fleet.start(models.path("llama"), SEED, *flags, env=ENV, wait=False)
    server.wait_for_log("rfork: weights from")
    for key in (None, API_KEY, ADMIN_KEY):
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        control = server.post("/flush_cache", headers=headers).status_code
        opened = {path: server.get(path, params={"rank": 0}, headers=headers).status_code for path in PATHS}
        opened["/rfork/v1/status"] = server.get("/rfork/v1/status", headers=headers).status_code
        assert control in (200, 401)
        assert set(opened.values()) == {control}, (key, opened)


def test_a_clients_own_key_opens_the_seed_whose_address_was_typed(fleet: Fleet, models: Models) -> None:
    """An address from a list gets no key: only what a user typed does."""
    keys = ("--api-key", API_KEY)
    seed = fleet.start(models.path("llama"), SEED, *keys, env=ENV, wait=False).wait_for_log("rfork: weights from")
    typed = fleet.start(models.path("llama"), *fork_from(seed.port), *keys, env=ENV, wait=False)
    typed.wait_for_log("rfork: weights from")
    assert f"rfork: weights from seed {keyed_status(seed)['instance_id']}" in typed.log()
    typed.kill()
    flags = ("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine")
    listed = fleet.start(
        models.path("llama"), *flags, *keys, env={**ENV, "RFORK_SEEDS": json.dumps([seed.address])}, wait=False
    )
    listed.wait_for_log("rfork: weights from")
    assert "rfork: weights from checkpoint (reason unauthorized" in listed.log()


def test_a_clients_own_key_goes_to_the_typed_address_and_no_further(seed: Server, fleet: Fleet, models: Models) -> None:
    """The listener that the seed names could be anybody's."""
    with Middleman(seed) as middleman:
        flags = (*fork_from(middleman.port), "--api-key", API_KEY)
        client = fleet.start(models.path("llama"), *flags, env=ENV, wait=False).wait_for_log("rfork: weights from")
        assert "rfork: weights from seed" in client.log()
    carried = {asked.path: asked.headers.get("Authorization") for asked in middleman.asked}
    assert carried.pop("/rfork/v1/status") == f"Bearer {API_KEY}"
    assert len(carried) >= 4
    assert set(carried.values()) == {None}


def keyed_status(server: Server) -> dict[str, Any]:
    return dict(server.get("/rfork/v1/status", headers={"Authorization": f"Bearer {API_KEY}"}).json())
