"""The node over its real listener: who may read, who is refused, and with which words."""

import concurrent.futures
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import msgspec
import pytest
from support.seed_node import until
from support.seed_rank import IDENTITY, BufferShard, make_agent, report, seed_shard

from rfork.config import load_config
from rfork.errors import ConfigError
from rfork.identity import RankIdentity
from rfork.manifest import decode_manifest
from rfork.seed.lifecycle import SEED
from rfork.seed.node import NodeService
from rfork.wire.seed import DigestTable, LeaseReply, Refusal, StatusReply

RETRY = {"not_ready", "paused", "draining", "busy"}


def refusal(response, status, reason):
    """The body of a refusal, after what must hold for each of them."""
    assert response.status_code == status, response.text
    body = msgspec.json.decode(response.content, type=Refusal)
    assert (body.reason, bool(body.message)) == (reason, True)
    if reason in RETRY:
        assert int(response.headers["retry-after"]) >= 1
    return body


def test_a_lease_hands_out_manifest_digests_and_binding(serving):
    response = serving.lease()
    assert response.status_code == 201
    reply = msgspec.json.decode(response.content, type=LeaseReply)
    assert (reply.instance_id, reply.generation, reply.ttl_s) == (serving.node.instance_id, 2, 30)
    assert reply.binding.generation == 2
    manifest = serving.http.get(reply.manifest_path)
    assert decode_manifest(manifest.content).digest == reply.manifest_digest
    assert manifest.headers["content-encoding"] == "gzip"
    digests = msgspec.msgpack.decode(serving.http.get(reply.digests_path).content, type=DigestTable)
    assert digests == serving.shards[0].resolve().digests()


def test_manifest_is_plain_where_gzip_is_not_taken_and_304_where_it_is_known(serving):
    path = serving.lease().json()["manifest_path"]
    plain = serving.http.get(path, headers={"Accept-Encoding": "identity"})
    assert "content-encoding" not in plain.headers
    assert plain.content == serving.http.get(path).content
    known = serving.http.get(path, headers={"If-None-Match": plain.headers["etag"]})
    assert (known.status_code, known.content) == (304, b"")


def test_before_health_nothing_is_granted(seed):
    seed.start().add()
    refusal(seed.lease(), 503, "not_ready")
    seed.node.ready()
    seed.wait("serving")
    assert seed.lease().status_code == 201


def test_health_alone_is_not_enough_while_a_rank_is_missing(seed):
    seed.start(num_local_ranks=2)
    seed.add(BufferShard(RankIdentity(tp_rank=0, tp_size=2)), agent={"rank": 0, "num_ranks": 2})
    seed.node.ready()
    refusal(seed.lease(), 503, "not_ready")
    seed.add(BufferShard(RankIdentity(tp_rank=1, tp_size=2)), agent={"rank": 1, "num_ranks": 2})
    seed.wait("serving")


def test_loaded_shard_that_is_not_published_keeps_the_instance_back(seed):
    agent = seed.start().add()
    agent.loaded(RankIdentity(role="draft-0"), report())
    until(lambda: len(seed.node.status_reply().ranks) == 2)
    seed.node.ready()
    refusal(seed.lease(), 503, "not_ready")


def test_while_weights_change_nothing_is_granted_and_old_leases_are_revoked(serving):
    lease = serving.lease().json()
    with serving.agents[0].changing("update_weights_from_disk"):
        serving.wait("paused")
        assert "update_weights_from_disk" in refusal(serving.lease(), 503, "paused").message
        refusal(serving.http.post(f"/rfork/v1/leases/{lease['lease']}/renew"), 409, "stale_generation")
        refusal(serving.http.get(lease["manifest_path"]), 409, "stale_generation")
    serving.wait("serving")


def test_live_content_is_refused_to_whoever_wants_a_checkpoint(serving):
    with serving.agents[0].changing("update"):
        pass
    until(lambda: serving.node.status_reply().generation == 4)
    serving.wait("serving")
    refusal(serving.lease(), 409, "live_content")
    reply = serving.lease(weights="live", content="", instance_key="").json()
    assert (reply["generation"], reply["content"][:5]) == (4, "live:")


def test_lease_for_another_instance_answers_421(serving):
    refusal(serving.lease(seed="i-somebody-else"), 421, "other_instance")
    assert serving.lease(seed=serving.node.instance_id).status_code == 201


def test_another_model_is_refused_with_the_fields_that_differ(serving):
    body = refusal(serving.lease(identity={**IDENTITY.fields, "dtype": "bfloat16"}), 409, "key_mismatch")
    assert body.differing == [("dtype", "bfloat16", "uint8")]


def test_other_weights_of_the_same_model_are_refused(serving):
    body = refusal(serving.lease(content="checkpoint:other"), 409, "key_mismatch")
    assert body.differing == [("content", "checkpoint:other", "checkpoint:c0ffee")]


def test_key_that_does_not_belong_to_its_fields_is_refused(serving):
    assert refusal(serving.lease(instance_key="0" * 64), 409, "key_mismatch").differing[0][0] == "instance_key"


def test_unknown_shard_is_refused_naming_those_held(serving):
    body = refusal(serving.lease(shard=BufferShard(RankIdentity(tp_rank=1, tp_size=2))), 409, "unknown_shard")
    assert "target.tp0of1" in body.message


def test_generation_that_is_not_here_any_more_is_refused(serving):
    refusal(serving.lease(generation=1), 409, "stale_generation")
    assert serving.lease(generation=2).status_code == 201


def test_requirement_that_this_build_does_not_know_is_refused(serving):
    assert "teleport" in refusal(serving.lease(requires=["teleport"]), 409, "not_understood").message
    refusal(serving.lease(transport="pigeon"), 409, "not_understood")


def test_unknown_fields_are_ignored(serving):
    assert serving.lease(colour="blue").status_code == 201


def test_capacity_counts_clients_and_busy_ones_are_told_to_come_again(make_seed):
    seed = make_seed(capacity=2).serve()
    for client in ("a", "b", "a"):
        assert seed.lease(client=client).status_code == 201
    refusal(seed.lease(client="c"), 429, "busy")
    assert seed.node.num_readers == 2


def test_released_lease_gives_its_place_to_the_next(make_seed):
    seed = make_seed(capacity=1).serve()
    lease = seed.lease(client="a").json()["lease"]
    refusal(seed.lease(client="b"), 429, "busy")
    assert seed.http.delete(f"/rfork/v1/leases/{lease}").status_code == 204
    assert seed.lease(client="b").status_code == 201
    refusal(seed.http.delete(f"/rfork/v1/leases/{lease}"), 404, "unknown_lease")


def test_eight_clients_at_once_are_all_served(serving):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        replies = list(pool.map(lambda i: serving.lease(client=f"c{i}"), range(8)))
    assert [r.status_code for r in replies] == [201] * 8


def test_renewal_says_how_long_it_lasts(serving):
    lease = serving.lease().json()["lease"]
    reply = serving.http.post(f"/rfork/v1/leases/{lease}/renew")
    assert (reply.status_code, reply.json()) == (200, {"lease": lease, "ttl_s": 30.0})


def test_draining_seed_grants_nothing_and_lets_readers_end(serving):
    lease = serving.lease().json()["lease"]
    assert serving.http.post("/rfork/v1/drain").status_code == 202
    refusal(serving.lease(client="late"), 503, "draining")
    assert serving.http.post(f"/rfork/v1/leases/{lease}/renew").status_code == 200
    assert serving.node.wait_drained(0.05) is False
    serving.http.delete(f"/rfork/v1/leases/{lease}")
    assert serving.node.wait_drained(5) is True


def test_replicas_of_a_shard_share_its_readers(seed):
    seed.start(num_local_ranks=2)
    for replica in (0, 1):
        seed.add(agent={"replica": replica, "num_replicas": 2})
    seed.node.ready()
    seed.wait("serving")
    for client in ("a", "b", "c", "d"):
        seed.lease(client=client)
    assert [seed.node._core.book.num_leases(s.ref) for s in seed.node._core.table.shards()] == [2, 2]


def test_status_tells_of_the_instance_and_of_each_rank(serving):
    status = msgspec.json.decode(serving.http.get("/rfork/v1/status").content, type=StatusReply)
    assert (status.state, status.generation, status.listener) == ("serving", 2, serving.node.listener_url)
    assert status.content == "checkpoint:c0ffee"
    assert status.weights.source == "checkpoint"
    assert [(r.shard, r.rank, r.state) for r in status.ranks] == [(RankIdentity().key, 0, "published")]


def test_status_shows_the_shard_that_fell_back_before_slower_ones(seed):
    agent = seed.start().add(publish=False)
    agent.loaded(RankIdentity(), report(fallback_reason="no_seed", seconds=1))
    agent.loaded(RankIdentity(tp_rank=1, tp_size=2), report(seconds=9))
    until(lambda: len(seed.node.status_reply().ranks) == 2)
    assert seed.node.status_reply().weights.fallback_reason == "no_seed"


def test_get_changes_nothing(serving):
    lease = serving.lease().json()
    before = serving.node._core.book.find(lease["lease"])
    for path in ("/rfork/v1/status", lease["manifest_path"], lease["digests_path"], "/metrics"):
        assert serving.http.get(path).status_code == 200
    assert serving.node._core.book.find(lease["lease"]) == before


@pytest.mark.parametrize(
    ("method", "path", "status", "reason"),
    [
        ("GET", "/rfork/v1/leases/l-none/manifest", 404, "unknown_lease"),
        ("GET", "/rfork/v1/leases/l-none/digests", 404, "unknown_lease"),
        ("POST", "/rfork/v1/leases/l-none/renew", 404, "unknown_lease"),
        ("GET", "/rfork/v1/nothing", 404, "not_found"),
        ("PUT", "/rfork/v1/leases", 405, "bad_request"),
        ("GET", "/", 404, "not_found"),
    ],
)
def test_what_does_not_exist_is_refused_in_json(serving, method, path, status, reason):
    refusal(serving.http.request(method, path), status, reason)


def test_killed_rank_ends_the_seed(seed):
    seed.start(num_local_ranks=2)
    control, instance, _ = seed.node.environment().values()
    command = [sys.executable, "-m", "support.seed_rank", control, instance]
    folder = Path(__file__).parents[1]
    ranks = [subprocess.Popen([*command, str(r), "2"], cwd=folder, stdout=subprocess.PIPE, text=True) for r in (0, 1)]
    try:
        assert [rank.stdout.readline().strip() for rank in ranks] == ["published"] * 2
        seed.node.ready()
        seed.wait("serving")
        shard = BufferShard(RankIdentity(tp_rank=0, tp_size=2))
        lease = seed.lease(shard=shard).json()["lease"]
        os.kill(ranks[1].pid, signal.SIGKILL)
        seed.wait("stopped")
        assert "rank 1 is gone" in refusal(seed.lease(shard=shard), 409, "not_a_seed").message
        refusal(seed.http.post(f"/rfork/v1/leases/{lease}/renew"), 409, "stale_generation")
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
            rank.stdout.close()


def test_restart_on_the_same_port_answers_421_to_clients_of_the_former_life(make_seed):
    first = make_seed().serve()
    port = int(first.node.listener_url.rsplit(":", 1)[1])
    former = first.node.instance_id
    first.node.stop()
    second = make_seed(listen=f"127.0.0.1:{port}").serve()
    assert second.node.instance_id != former
    refusal(second.lease(seed=former), 421, "other_instance")


def test_two_instances_on_one_host_need_no_settings(make_seed):
    assert make_seed().serve().node.listener_url != make_seed().serve().node.listener_url


def test_port_range_is_kept_and_its_end_is_a_clear_error(make_seed):
    port = int(make_seed().serve().node.listener_url.rsplit(":", 1)[1])
    with pytest.raises(ConfigError, match=f"port_range: can't bind 127.0.0.1 port {port}: Address already in use"):
        make_seed(port_range=f"{port}-{port}").start()


def test_wildcard_bind_advertises_an_address_that_others_can_use(make_seed):
    node = make_seed().node
    node.start(host="0.0.0.0")
    assert "0.0.0.0" not in node.listener_url
    node = make_seed(advertise_host="192.0.2.3").node
    node.start(host="0.0.0.0")
    assert node.listener_url.startswith("http://192.0.2.3:")


def test_seed_off_opens_no_port_and_still_has_a_status(make_seed):
    node = make_seed(seed="off").node
    node.start()
    assert (node.listener_url, node.status_reply().state) == (None, "stopped")
    assert node.status_reply().listener is None


def test_stop_leaves_no_thread_no_socket_and_no_engine(make_seed):
    before = {t for t in threading.enumerate() if t.name.startswith("rfork")}
    seed = make_seed().serve()
    url, control = seed.node.listener_url, seed.node.environment()["RFORK_CONTROL"]
    seed.node.stop()
    assert seed.fabric.num_open == 0
    assert not os.path.exists(control)
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/rfork/v1/status")
    until(lambda: {t for t in threading.enumerate() if t.name.startswith("rfork")} <= before)


def test_sixty_thousand_tensors_are_answered_at_once_and_small(seed):
    seed.start()
    shard = BufferShard(sizes=[64] * 60_000)
    shard.names = [f"model.layers.{i // 640}.mlp.experts.{i % 640}.down_proj.weight_scale_inv" for i in range(60_000)]
    seed.add(shard)
    seed.node.ready()
    until(lambda: seed.node.state.value == "serving", timeout_s=60)
    start = time.monotonic()
    reply = seed.lease(shard=BufferShard())
    with seed.http.stream("GET", reply.json()["manifest_path"]) as manifest:
        compressed = sum(len(part) for part in manifest.iter_raw())
    elapsed_s = time.monotonic() - start
    assert manifest.headers["content-encoding"] == "gzip"
    assert compressed < 3_000_000
    assert len(reply.content) < 6_000_000
    assert elapsed_s < 10  # 0.2 s on an idle machine


def test_listener_answers_while_a_large_publication_is_digested(seed):
    """No request waits for the work of a publication longer than a moment."""
    seed.start()
    shard = BufferShard(sizes=[64] * 30_000)
    agent = seed.add(shard, publish=False)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        publishing = pool.submit(agent.publish, [seed_shard(shard)])
        slowest_s = 0.0
        while not publishing.done():
            start = time.monotonic()
            seed.http.get("/rfork/v1/status")
            slowest_s = max(slowest_s, time.monotonic() - start)
    assert slowest_s < 10  # 0.2 s on an idle machine


def test_repr_tells_the_story():
    node = NodeService(load_config(None, {}))
    assert repr(node) == f"<Seed {node.instance_id} STARTING gen=0 leases=0/8 ranks=0>"
    node.stop()


def test_observers_hear_of_each_change_of_state(make_seed):
    seed, heard = make_seed(), []
    seed.node.subscribe(lambda state: heard.append(state.value))
    seed.serve()
    with seed.agents[0].changing("update"):
        pass
    until(lambda: heard == ["serving", "paused", "serving"])
    seed.node.drain()
    assert heard[-1] == "draining"


def test_every_state_but_the_last_can_be_drained_or_stopped():
    assert [s.name for s, row in SEED.items() if not row] == ["STOPPED"]
    assert all(len(row) >= 1 for s, row in SEED.items() if s.name != "STOPPED")


def test_second_process_in_the_place_of_a_rank_ends_the_seed(serving):
    other = make_agent(serving.node.environment(), pid=4343)
    serving.wait("stopped")
    assert "took the place" in refusal(serving.lease(), 409, "not_a_seed").message
    other.close()
