"""Two nodes, one instance: each node grants the leases of its own shards, and node 0 says where the others are."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import httpx
import msgspec
import pytest
import typer
from support import forking
from support.forking import SEED, fork_from
from support.group_client import take
from support.holding import Probed, differences, start_probed
from support.models import Models
from support.ports import lend
from support.seed_node import Seed, lease_body, until
from support.seed_rank import BufferShard
from support.server import HOST, Fleet, Server
from typer.testing import CliRunner

from rfork.cli import audit as rfork_audit
from rfork.cli import drain as rfork_drain
from rfork.client.lease import take_lease
from rfork.identity import RankIdentity
from rfork.planner.client import PlannerClient
from rfork.seed import registration as rfork_registration
from rfork.seed.registration import Registration
from rfork.wire.planner import Heartbeat, InstanceState
from rfork.wire.seed import LeaseReply, LeaseRequest
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
    else:
        goes_as_one(forks[0].server, forks[1].server)


def goes_as_one(first: Server, second: Server) -> None:
    """Drained at its second node, as that pod's preStop does, and then told to end at its first: both wait for a reader
    that only the second has.
    """
    (listener,) = set(re.findall(r"rfork: instance \S+, listener (\S+)", second.log()))
    with take(first.address, rank=RankIdentity(pp_rank=1, pp_size=2)) as lease:
        assert lease.address == listener
        shown = run(rfork_drain.command, "--local", listener, "--wait", "0.1")
        assert (shown.exit_code, "still has 1 readers" in shown.output) == (1, True), shown.output
        assert forking.status(first)["state"] == "draining"
        assert forking.status(first)["num_readers"] == 0
        os.kill(first.pid, signal.SIGTERM)
        first.wait_for_log("rfork: waiting for 1 readers of other nodes")
        assert httpx.get(f"{listener}/rfork/v1/status", trust_env=False).json()["readers"] == ["i-light"]
        assert (first.returncode, second.returncode) == (None, None)
    assert first.wait_until_ended() == 0
    second.wait_until_ended()
    assert "did not finish in time" not in first.log()


def audit(server: Server, env: Mapping[str, str]) -> Any:
    """`rfork audit`, which goes on to the other nodes by itself."""
    return run(rfork_audit.command, server.url, env=env)


def run(command: Callable[..., None], *arguments: str, env: Mapping[str, str] | None = None) -> Any:
    """A verb, with nothing but the fleet key from its environment."""
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, arguments, env={"RFORK_KEY": (env or {}).get("RFORK_KEY", "")})


@pytest.mark.parametrize(
    ("given", "node_rank", "bound"),
    [
        ("127.0.0.1", 0, "127.0.0.1"),
        ("0.0.0.0", 0, "0.0.0.0"),
        ("192.0.2.7", 1, "192.0.2.7"),
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


@pytest.fixture(params=["", KEY], ids=["open", "key"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Seed, Seed]]:
    """Two nodes of one instance with a shard each, in this process; of a fleet with a key too."""
    with ExitStack() as stack:
        config = {"key": request.param} if request.param else {}
        first = Seed(stack, **config).start()
        second = Seed(stack, instance_id=first.node.instance_id, **config).start()
        ranks = [RankIdentity(tp_rank=rank, tp_size=2) for rank in range(2)]
        for rank, (seed, other) in enumerate([(first, second), (second, first)]):
            seed.add(BufferShard(ranks[rank]), agent={"rank": rank})
            seed.agents[0].elsewhere({ranks[1 - rank].key: other.node.listener_url or ""})
            seed.node.ready()
            seed.wait("serving")
            until(lambda seed=seed: seed.node.other_listeners)
        yield first, second


def taken(seed: Seed, client: str = "i-client") -> str:
    """A lease of the shard that is there, by its id: no request of a client's, so that none has to prove a key."""
    request = msgspec.convert(lease_body(shard=seed.shards[0], client=client), LeaseRequest)
    reply = seed.node.grant(request)
    assert isinstance(reply, LeaseReply), reply
    return reply.lease


@pytest.mark.parametrize("which", [0, 1])
def test_a_drain_at_any_node_is_one_of_all(which: int, pair: tuple[Seed, Seed]) -> None:
    """Whoever asks: a signal, the planner, an operator; and nobody is granted anything at any of them."""
    pair[which].node.drain()
    for seed in pair:
        seed.wait("draining")


@pytest.mark.parametrize("which", [0, 1])
def test_a_local_drain_at_any_node_waits_for_the_readers_of_all(which: int, pair: tuple[Seed, Seed]) -> None:
    """A client with leases of both nodes is one reader; who has finished at one may still read at the other."""
    env = {"RFORK_KEY": KEY if pair[0].node.guard else ""}
    ids = [(seed, taken(seed)) for seed in pair] + [(pair[1 - which], taken(pair[1 - which], "i-another"))]
    address = pair[which].node.listener_url or ""
    for num_left in (2, 2, 1):
        shown = run(rfork_drain.command, "--local", address, "--wait", "0.1", env=env)
        assert (shown.exit_code, f"still has {num_left} readers" in shown.output) == (1, True), shown.output
        seed, lease = ids.pop(which if len(ids) == 3 else 0)
        seed.node.release(lease)
    assert run(rfork_drain.command, "--local", address, "--wait", "20", env=env).exit_code == 0


def test_a_local_drain_tells_of_a_lost_node_and_waits_for_the_readers_of_the_others(pair: tuple[Seed, Seed]) -> None:
    env = {"RFORK_KEY": KEY if pair[0].node.guard else ""}
    lease = taken(pair[0])
    pair[1].node.stop()
    for num_left in (1, 0):
        shown = run(rfork_drain.command, "--local", pair[0].node.listener_url or "", "--wait", "0.1", env=env)
        assert (shown.exit_code, "a node was not asked" in shown.output) == (1, True), shown.output
        assert ("still has 1 readers" in shown.output) == bool(num_left)
        pair[0].node.release(lease)


def test_a_local_drain_goes_on_where_a_node_ends_meanwhile(pair: tuple[Seed, Seed]) -> None:
    env = {"RFORK_KEY": KEY if pair[0].node.guard else ""}
    lease, ended = taken(pair[0]), []
    command = (rfork_drain.command, "--local", pair[0].node.listener_url or "", "--wait", "60")
    verb = threading.Thread(target=lambda: ended.append(run(*command, env=env)))
    verb.start()
    pair[1].wait("draining")
    pair[1].node.stop()
    time.sleep(2 * rfork_drain.POLL_S)  # it looks again, and finds one node only
    assert not ended, "there is a reader at the other node"
    pair[0].node.release(lease)
    verb.join(30)
    assert [shown.exit_code for shown in ended] == [0]


def test_a_node_that_ends_waits_for_the_readers_of_the_others(
    pair: tuple[Seed, Seed], caplog: pytest.LogCaptureFixture
) -> None:
    """Its own ranks are gone with it, and theirs soon after."""
    lease = taken(pair[1])
    pair[0].node.drain()
    assert pair[0].node.wait_drained(0.1), "here, nobody reads"
    assert "1 readers of other nodes did not finish in time" in caplog.text
    caplog.clear()
    waiting = threading.Thread(target=pair[0].node.wait_drained, args=(60.0,))
    with caplog.at_level("INFO", "rfork"):
        waiting.start()
        until(lambda: "waiting for 1 readers of other nodes" in caplog.text)
        assert waiting.is_alive()
        pair[1].node.release(lease)
        waiting.join(30)
    assert not waiting.is_alive()
    assert "did not finish" not in caplog.text


def test_a_node_whose_others_are_gone_waits_for_nobody(pair: tuple[Seed, Seed]) -> None:
    taken(pair[1])
    pair[1].node.stop()
    pair[0].node.drain()
    waiting = threading.Thread(target=pair[0].node.wait_drained, args=(600.0,))
    waiting.start()
    waiting.join(30)
    assert not waiting.is_alive()


def test_the_planner_hears_of_readers_at_every_node(pair: tuple[Seed, Seed], monkeypatch: pytest.MonkeyPatch) -> None:
    """So `rfork drain i-… --wait` and `rfork leases` count them too."""
    monkeypatch.setattr(rfork_registration, "PING_INTERVAL_S", 0.05)
    lease = taken(pair[1])
    registration = Registration(pair[0].node, PlannerClient("http://127.0.0.1:9"))
    registration.start()
    try:
        until(lambda: [view.client for view in told(registration).leases] == ["i-client"])
        pair[1].node.release(lease)
        until(lambda: not told(registration).leases)
    finally:
        registration.stop("end of the test")


def told(registration: Registration) -> Heartbeat:
    """The heartbeat that would go out now; one without readers before ranks were looked at."""
    return registration.describe() or Heartbeat(
        instance_id="", instance_key="", state=InstanceState.STARTING, listener=""
    )


def test_a_stranger_is_told_neither_nodes_nor_readers(pair: tuple[Seed, Seed]) -> None:
    taken(pair[0])
    shown = pair[0].http.get("/rfork/v1/status").json()
    assert shown["num_readers"] == 1
    if pair[0].node.guard:
        assert (shown["nodes"], shown["readers"]) == ([], [])
    else:
        assert (shown["nodes"], shown["readers"]) == ([pair[1].node.listener_url], ["i-client"])
