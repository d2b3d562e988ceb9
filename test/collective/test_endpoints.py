"""The two POST end-points: SGLang's fields, one answer for every wrong request, and never a wait for a scheduler."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import pytest
from support.groups import LIMITS, GroupSeed
from support.seed_node import until
from support.seed_rank import BufferShard, make_agent, report, seed_shard

from rfork.client import receive
from rfork.identity import RankIdentity
from rfork.wire.collective import INIT_PATH, SEND_PATH, InitGroup, SendWeights

STOCK = {
    "master_address": "127.0.0.1",
    "ports": "29500",
    "group_rank": 0,
    "world_size": 2,
    "group_name": "send_weights_127.0.0.1",
    "backend": "nccl",
}


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def seed(stack: ExitStack) -> GroupSeed:
    return GroupSeed(stack, stock_nccl_clients="on").serve()


def init(seed: GroupSeed, **changes: Any) -> httpx.Response:
    return seed.http.post(INIT_PATH, json={**STOCK, **changes})


def refused(answer: httpx.Response) -> tuple[int, str]:
    """Status and our word; SGLang's `success` and `message` are always there."""
    body = answer.json()
    assert body["success"] is False
    assert body["message"]
    return answer.status_code, body["reason"]


def test_a_stock_client_is_refused_where_nobody_vouches_for_it(stack: ExitStack) -> None:
    """It names no tensor: neither order nor coverage can be proven from what it says."""
    answer = init(GroupSeed(stack).serve())
    assert refused(answer) == (409, "not_for_stock_clients")
    assert "names neither its tensors nor their order" in answer.json()["message"]


@pytest.mark.parametrize(
    "changes",
    [
        {"group_rank": 1},
        {"world_size": 3},
        {"backend": "mpi"},
        {"ports": ""},
        {"ports": "0"},
        {"ports": "70000"},
        {"ports": "29500,29501"},
        {"ports": "ssh://elsewhere"},
        {"group_name": ""},
        {"group_name": "a b/../c"},
        {"group_rank": "zero"},
        {"limit_gbps": 0},
        {"limit_gbps": -1.5},
        {"ports": ",".join(["1"] * 2000)},
    ],
)
def test_a_request_that_makes_no_sense_is_a_400(seed: GroupSeed, changes: dict[str, Any]) -> None:
    assert refused(init(seed, **changes)) == (400, "bad_request")
    assert seed.broadcasts.num_groups == 0


def test_what_is_no_json_is_a_400(seed: GroupSeed) -> None:
    assert refused(seed.http.post(INIT_PATH, content=b"{")) == (400, "bad_request")
    assert refused(seed.http.post(SEND_PATH, content=b"[]")) == (400, "bad_request")


def test_a_body_beyond_any_use_is_turned_away(seed: GroupSeed) -> None:
    assert seed.http.post(INIT_PATH, content=b"x" * (1 << 20)).status_code == 413


def test_a_backend_of_another_device_is_refused_by_name(seed: GroupSeed) -> None:
    """These weights are on the CPU: NCCL can't send them."""
    answer = init(seed)
    assert refused(answer) == (409, "not_understood")
    assert "gloo, not nccl" in answer.json()["message"]


def test_data_parallel_replicas_answer_a_stock_client_with_400(stack: ExitStack) -> None:
    """SGLang's own end-points fail an assertion here."""
    seed = GroupSeed(stack, stock_nccl_clients="on")
    seed.start(num_local_ranks=2)
    for replica in range(2):
        agent = make_agent(seed.node.environment(), seed.fabric, replica=replica, num_replicas=2, pid=replica + 1)
        stack.callback(agent.close)
        agent.loaded(seed.shard.rank, report())
        agent.publish([seed_shard(seed.shard)])
    seed.node.ready()
    seed.wait("serving")
    assert refused(init(seed, backend="gloo")) == (400, "bad_request")


def test_pipeline_ranks_answer_a_stock_client_with_400(stack: ExitStack) -> None:
    seed = GroupSeed(stack, BufferShard(RankIdentity(pp_rank=0, pp_size=2)), stock_nccl_clients="on").serve()
    assert refused(init(seed, backend="gloo")) == (400, "bad_request")


def test_ranks_of_another_node_answer_with_400(stack: ExitStack) -> None:
    seed = GroupSeed(stack, BufferShard(RankIdentity(tp_rank=0, tp_size=2)), stock_nccl_clients="on").serve()
    answer = init(seed, backend="gloo", ports="29500,29501")
    assert refused(answer) == (400, "bad_request")
    assert "rank 1 is not on this node" in answer.json()["message"]


def test_a_stock_client_is_refused_where_parameters_are_not_all(stack: ExitStack, free_port: int) -> None:
    """The table of this rank does not cover its manifest: a client without R-Fork would miss the rest."""
    seed = GroupSeed(stack, stock_nccl_clients="on").serve(stock_table=lambda: {"layers.0.weight": (4096, 64, 1)})
    answer = init(seed, backend="gloo", ports=str(free_port))
    assert refused(answer) == (409, "not_for_stock_clients")
    assert "layers.0.weight is no named parameter" in answer.json()["message"]


def test_send_without_init_is_refused(seed: GroupSeed) -> None:
    body = {"master_address": "127.0.0.1", "ports": "29500", "group_name": "nobody"}
    assert refused(seed.http.post(SEND_PATH, json=body)) == (404, "unknown_lease")


def test_a_seed_that_pauses_opens_nothing(seed: GroupSeed) -> None:
    with seed.agents[0].changing("an update"):
        seed.wait("paused")
        assert refused(init(seed, backend="gloo")) == (503, "paused")


@pytest.fixture
def trap() -> Iterator[tuple[str, int]]:
    """An address that a body may name. Whoever connects waits in its queue, also once they have gone again."""
    with socket.create_server(("127.66.0.1", 0)) as listening:
        yield listening.getsockname()[:2]
        listening.setblocking(False)
        with pytest.raises(BlockingIOError):
            listening.accept()


@pytest.mark.parametrize("asker", ["stock", "leased"])
def test_a_post_can_not_make_the_seed_dial_anybody(asker: str, stack: ExitStack, trap: tuple[str, int]) -> None:
    """The seed listens; an address in a body is dialled at no moment, from the POST until the group has ended."""
    seed = GroupSeed(
        stack, limits=LIMITS._replace(connect_timeout_s=0.5, progress_timeout_s=0.5), stock_nccl_clients="on"
    )
    held = seed.shard.resolve()
    extents = zip(held.addresses, held.manifest.group_nbytes, strict=True)
    seed.serve(stock_table=lambda table={str(a): (a, nbytes, 1) for a, nbytes in extents}: table)
    body = {**STOCK, "master_address": trap[0], "ports": str(trap[1]), "backend": "gloo"}
    with seed.take() as lease:
        mark = {"lease": lease.reply.lease} if asker == "leased" else {}
        answer = seed.http.post(INIT_PATH, json={**body, **mark})
        assert (answer.status_code, answer.json()["ports"]) == (200, str(trap[1]))
        assert seed.broadcasts.num_groups == 1
        seed.http.post(SEND_PATH, json={**body, **mark})
        until(lambda: seed.broadcasts.num_groups == 0, 30.0)


def test_a_transfer_dials_nobody_whom_its_posts_name(
    seed: GroupSeed, trap: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same until all of it has been sent: the client finds the seed at the port that it named, and nobody else."""
    named = {"master_address": trap[0], "ports": str(trap[1])}
    for body in (InitGroup, SendWeights):
        monkeypatch.setattr(receive, body.__name__, lambda body=body, **fields: body(**{**fields, **named}))
    assert seed.holds(seed.fork())
    until(lambda: seed.broadcasts.num_groups == 0, 30.0)


def test_a_group_that_nobody_joins_ends_by_itself(stack: ExitStack) -> None:
    """The rendezvous has a deadline; port, thread and place are free again."""
    seed = GroupSeed(stack, limits=LIMITS._replace(connect_timeout_s=1.5)).serve()
    with seed.take() as lease:
        body = {**STOCK, "ports": "0", "backend": "gloo", "lease": lease.reply.lease}
        assert seed.http.post(INIT_PATH, json=body).status_code == 200
        assert seed.broadcasts.num_groups == 1
        until(lambda: seed.broadcasts.num_groups == 0)
    assert seed.holds(seed.fork())


def test_a_rank_holds_so_many_groups_and_no_more(stack: ExitStack) -> None:
    seed = GroupSeed(stack, limits=LIMITS._replace(max_groups=1)).serve()
    with seed.take() as lease:
        body = {**STOCK, "ports": "0", "backend": "gloo", "lease": lease.reply.lease}
        assert seed.http.post(INIT_PATH, json=body).status_code == 200
        answer = seed.http.post(INIT_PATH, json=body)
    assert refused(answer) == (429, "busy")
    assert answer.json()["retry_after_s"] > 0
