"""Two nodes, one instance: each node grants the leases of its own shards, and node 0 says where the others are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import typer
from support import forking
from support.forking import SEED, fork_from
from support.holding import Probed, differences, start_probed
from support.models import Models
from support.ports import lend
from support.seed_node import Seed, lease_body, until
from support.seed_rank import BufferShard
from support.server import HOST, Fleet, Server
from typer.testing import CliRunner

from rfork.cli import audit as rfork_audit
from rfork.client.lease import take_lease
from rfork.identity import RankIdentity
from rfork.wire.seed import LeaseRequest
from sglang_rfork.srt.entrypoints.engine import listener_host

pytestmark = pytest.mark.server

LAYOUTS = {"tp": ("--tp", "2"), "pp": ("--pp-size", "2")}
KEY = "a fleet key of this test"


def start_nodes(
    fleet: Fleet, model: object, *flags: str, name: str, env: Mapping[str, str] | None = None
) -> tuple[Probed, Probed]:
    """Both nodes of one instance, on this box; the first answers requests."""
    meeting = lend()
    try:
        ranks = [
            start_probed(
                fleet, model, *flags, "--nnodes", "2", "--node-rank", str(rank),
                *("--dist-init-addr", f"{HOST}:{meeting.port}"), name=f"{name}-node{rank}", env=env, wait=False,
            )
            for rank in range(2)
        ]  # fmt: skip
        ranks[0].server.wait_until_ready()
    finally:
        meeting.release()
    return ranks[0], ranks[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_instance_of_two_nodes_forks_from_one_of_two_nodes(layout: str, models: Models, fleet: Fleet) -> None:
    """Ranks of node 1 read shards that only node 1 of the seed has, through its own listener. One of the two fleets has
    a key, which a stranger and an audit need at both nodes.
    """
    flags, model = LAYOUTS[layout], models.path("qwen3")
    env = {"RFORK_KEY": KEY} if layout == "tp" else {}
    seeds = start_nodes(fleet, model, SEED, *flags, name="seed", env=env)
    forking.serving(seeds[0].server)
    forks = start_nodes(fleet, model, *fork_from(seeds[0].server.port), *flags, name="fork", env=env)
    for fork, seed in zip(forks, seeds, strict=True):
        line = fork.server.wait_for_log("verified: full").log()
        assert "falling back" not in line
        assert differences(fork, seed) == []
    tokens = [s[0].server.generate("hello world").tokens for s in (seeds, forks)]
    assert tokens[0] == tokens[1]
    shown = audit(forks[0].server, env)
    assert (shown.exit_code, "2 of 2 shards are equal" in shown.output) == (0, True), shown.output
    if env:
        assert audit(forks[0].server, {}).exit_code == 1
        for seed in seeds:
            (listener,) = set(re.findall(r"rfork: instance \S+, listener (\S+)", seed.server.log()))
            for path in ("leases", "audit"):
                answer = httpx.post(f"{listener}/rfork/v1/{path}", json=lease_body(), trust_env=False)
                assert (answer.status_code, answer.json()["reason"]) == (401, "unauthorized"), answer.text
                assert "127.0.0.1" not in answer.text


def audit(server: Server, env: Mapping[str, str]) -> Any:
    """`rfork audit`, which goes on to the other nodes by itself."""
    app = typer.Typer()
    app.command()(rfork_audit.command)
    return CliRunner().invoke(app, [server.url], env={"RFORK_KEY": env.get("RFORK_KEY", "")})


@pytest.mark.parametrize(
    ("given", "node_rank", "bound"),
    [
        ("127.0.0.1", 0, "127.0.0.1"),
        ("0.0.0.0", 0, "0.0.0.0"),
        ("10.0.0.7", 1, "10.0.0.7"),
        ("127.0.0.1", 1, "127.0.0.1"),
    ],
)
def test_a_node_binds_nothing_that_nobody_asked_for(given: str, node_rank: int, bound: str) -> None:
    """A further node without a host given binds the address at which it reaches the first, here this very host."""
    view = SimpleNamespace(host=given, node_rank=node_rank, dist_init_addr=f"{HOST}:5000")
    assert listener_host(view) == bound


def test_a_shard_of_another_node_is_granted_there_and_a_wrong_one_nowhere() -> None:
    with ExitStack() as stack:
        first, second = Seed(stack).start(), Seed(stack).start()
        ranks = [RankIdentity(tp_rank=rank, tp_size=2) for rank in range(2)]
        first.add(BufferShard(ranks[0]))
        second.add(BufferShard(ranks[1]), agent={"rank": 1})
        first.agents[0].elsewhere({ranks[1].key: second.node.listener_url or ""})
        for seed in (first, second):
            seed.node.ready()
            seed.wait("serving")
        request = msgspec.convert(lease_body(shard=BufferShard(ranks[1])), LeaseRequest)
        until(lambda: first.lease(shard=BufferShard(ranks[1])).status_code == 421)
        with take_lease(first.node.listener_url or "", request, timeout_s=5) as lease:
            assert lease.address == second.node.listener_url
            assert lease.manifest().rank == ranks[1]
        wrong = first.lease(shard=BufferShard(RankIdentity(pp_rank=1, pp_size=2))).json()
        assert wrong["reason"] == "unknown_shard"
