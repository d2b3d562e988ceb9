"""Real servers on the CPU, forked by collective transfers: `--remote-instance-weight-loader-backend nccl` over gloo."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from support import holding
from support.forking import ENV, fork_from, serving, settled, start_seed, status, weights
from support.group_client import fork as light_fork
from support.group_client import take
from support.groups import SETTINGS, AtShare, receive
from support.halt import Halt
from support.host_shard import HostShard
from support.models import Models
from support.server import Fleet, Server

from rfork.client.contract import PullSettings
from rfork.errors import SeedError

pytestmark = pytest.mark.server

PROMPT = "the quick brown fox"
NCCL = ("--remote-instance-weight-loader-backend", "nccl")
VOUCHED = {"RFORK_STOCK_NCCL_CLIENTS": "on", "RFORK_LEASE_TTL_S": "3"}
PROGRAM = {"cwd": str(Path(__file__).parents[1]), "stdout": subprocess.PIPE, "text": True}


def start_fork(fleet: Fleet, model: Any, seed: Server, *flags: str, **how: Any) -> Server:
    env = {**ENV, **how.pop("env", {})}
    server = fleet.start(model, *fork_from(seed.port, backend="nccl"), *flags, env=env, **how)
    return settled(server) if how.get("wait", True) else server


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    """A seed that serves readers of both kinds, and vouches for SGLang's own."""
    return start_seed(module_fleet, models.path("llama"), env=VOUCHED)


def target_bytes(shard: HostShard) -> dict[str, str]:
    """SHA-256 of each tensor that is a group of its own."""
    entries = [t for t in shard.manifest.tensors if t.group >= 0]
    return {t.name: hashlib.sha256(bytes(shard.group(t.group))).hexdigest() for t in entries}


def test_a_fork_and_a_fork_of_it_answer_as_the_first(fleet: Fleet, models: Models) -> None:
    """A → B → C, A gone: every byte verified and the same tokens. The seed needs no transfer engine, B has none."""
    a = serving(fleet.start(models.path("qwen3"), *NCCL, env=ENV))
    tokens = a.generate(PROMPT).tokens
    b = serving(start_fork(fleet, models.path("qwen3"), a))
    assert (weights(b)["source"], weights(b)["protocol"], weights(b)["verify"]) == ("seed", "gloo", "full"), b.log()
    assert b.generate(PROMPT).tokens == tokens
    assert "Transfer engines listen on all interfaces" not in a.log() + b.log()
    a.kill()
    c = start_fork(fleet, models.path("qwen3"), b)
    assert (weights(c)["source"], weights(c)["protocol"]) == ("seed", "gloo"), c.log()
    assert c.generate(PROMPT).tokens == tokens


EAGLE = (
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
)


@pytest.mark.parametrize(
    ("model", "flags", "shards"),
    [("llama", "--tp 2", 2), ("qwen3", "--pp-size 2", 2), ("qwen2-tied", "--dp 2", 1), ("llama", "draft", 2)],
    ids=["tp2", "pp2", "dp2", "draft"],
)
def test_each_rank_gets_its_own_shard(model: str, flags: str, shards: int, fleet: Fleet, models: Models) -> None:
    """Rank i of the client and rank i of the seed: target and draft hold what the seed's hold, tensor for tensor."""
    draft = ("--speculative-draft-model-path", str(models.path("llama-eagle")), *EAGLE)
    more = draft if flags == "draft" else tuple(flags.split())
    seed = holding.start_seed(fleet, models.path(model), *more, env={"RFORK_BACKEND": "nccl"})
    fork = holding.start_probed(fleet, models.path(model), *fork_from(seed.server.port, backend="nccl"), *more)
    settled(fork.server)
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert len(fork.sources) == shards
    assert {r["weights"]["protocol"] for r in fork.reports} == {"gloo"}
    assert holding.differences(fork, seed) == []


def test_given_ports_are_the_ones_used(fleet: Fleet, models: Models, seed: Server, free_port: int) -> None:
    """The flag names the seed's port for each rank, for users who open ports one by one."""
    fork = start_fork(
        fleet, models.path("llama"), seed, "--remote-instance-weight-loader-send-weights-group-ports", f"[{free_port}]"
    )
    assert weights(fork)["source"] == "seed", fork.log()
    seed.wait_for_log(f"at port {free_port} ended", 10)


class Answer(NamedTuple):
    began_s: float
    ended_s: float
    tokens: tuple[int, ...]


class Asking:
    """Asks a server to generate, again and again, until the block ends."""

    def __init__(self, server: Server) -> None:
        self._server, self._stop = server, threading.Event()
        self._more = threading.Condition()
        self.answers: list[Answer] = []
        self._thread = threading.Thread(target=self._ask)

    def _ask(self) -> None:
        while not self._stop.is_set():
            began_s = time.monotonic()
            tokens = self._server.generate(PROMPT).tokens
            with self._more:
                self.answers.append(Answer(began_s, time.monotonic(), tokens))
                self._more.notify_all()

    def wait_for_another(self) -> None:
        """An answer to a request that begins after this call. Raises AssertionError where none comes."""
        now_s = time.monotonic()
        with self._more:
            assert self._more.wait_for(lambda: any(a.began_s > now_s for a in self.answers), 25.0), "it answers no more"

    def within(self, began_s: float, ended_s: float) -> int:
        """Requests that began and were answered between the two."""
        return sum(began_s < a.began_s and a.ended_s < ended_s for a in self.answers)

    def slowest_s(self) -> float:
        return max(a.ended_s - a.began_s for a in self.answers)

    def __enter__(self) -> Asking:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(60)


SHARES = (0.01, 0.5, 0.99)
PATIENT = PullSettings(connect_timeout_s=30.0, progress_timeout_s=30.0, close_timeout_s=30.0)


class Lingering:
    """An observer under whose eyes the seed has to answer at several moments of a transfer, or it does not go on."""

    def __init__(self, asking: Asking) -> None:
        self._steps = [AtShare(share, asking.wait_for_another) for share in SHARES]

    def on_phase(self, name: str) -> None: ...

    def on_total(self, nbytes: int) -> None:
        for step in self._steps:
            step.on_total(nbytes)

    def on_bytes(self, nbytes: int) -> None:
        for step in self._steps:
            step.on_bytes(nbytes)


def test_eight_clients_in_a_row_and_three_at_once_while_the_seed_answers(seed: Server) -> None:
    """Never crossed, all of them whole; requests are answered in the middle of each transfer, and alike."""
    with Asking(seed) as idle:
        for _ in range(5):
            idle.wait_for_another()
    held: list[dict[str, str]] = []
    spans: list[tuple[float, float]] = []

    def client(name: str) -> None:
        began_s = time.monotonic()
        held.append(target_bytes(light_fork(seed.address, name, settings=PATIENT, observer=Lingering(asking))))
        spans.append((began_s, time.monotonic()))

    with Asking(seed) as asking:
        for i in range(8):
            client(f"i-row-{i}")
        threads = [threading.Thread(target=client, args=(f"i-once-{i}",)) for i in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert len(held) == len(spans) == 11
    assert all(h == held[0] for h in held)
    assert min(asking.within(*span) for span in spans) >= len(SHARES)
    assert {a.tokens for a in asking.answers} == {idle.answers[0].tokens}
    assert asking.slowest_s() < 10 * idle.slowest_s() + 5


def test_three_servers_fork_at_once(fleet: Fleet, models: Models, seed: Server) -> None:
    tokens = seed.generate(PROMPT).tokens
    forks = [start_fork(fleet, models.path("llama"), seed, wait=False) for _ in range(3)]
    for fork in forks:
        settled(fork.wait_until_ready())
        assert weights(fork)["source"] == "seed", fork.log()
        assert fork.generate(PROMPT).tokens == tokens


@pytest.fixture
def doomed(seed: Server, request: pytest.FixtureRequest) -> Iterator[subprocess.Popen[str]]:
    """A client that stands still at some share of the bytes."""
    argv = [sys.executable, "-m", "support.group_client", seed.address, str(request.param)]
    client = subprocess.Popen(argv, **PROGRAM)  # type: ignore[call-overload]
    yield client
    client.kill()
    client.wait(10)
    client.stdout.close()


@pytest.mark.parametrize("doomed", [0, 0.5, 0.99], indirect=True)
def test_a_client_killed_on_the_way_leaves_a_seed_that_serves(seed: Server, doomed: subprocess.Popen[str]) -> None:
    """kill -9: its group ends at once, requests are answered, the next client succeeds without a restart."""
    assert doomed.stdout is not None
    assert doomed.stdout.readline().startswith("at ")
    before = seed.log().count(" ended after ")
    doomed.kill()
    seed.wait_for("to end the group", lambda: seed.log().count(" ended after ") > before, 10)
    assert seed.generate(PROMPT).tokens
    assert target_bytes(light_fork(seed.address))
    assert status(seed)["state"] == "serving"


@pytest.mark.parametrize("share", [0, 0.5, 0.99])
def test_a_client_whose_seed_is_killed_knows_at_once(share: float, fleet: Fleet, models: Models) -> None:
    """kill -9 of the seed: an error that says so within the deadline, and nothing that still writes."""
    seed = start_seed(fleet, models.path("llama"), env={"RFORK_BACKEND": "nccl"})
    with take(seed.address) as lease:
        target = HostShard(lease.manifest())
        started_s = time.monotonic()
        with pytest.raises(SeedError):
            receive(target, lease, observer=AtShare(share, seed.kill))
        assert time.monotonic() - started_s < SETTINGS.progress_timeout_s + SETTINGS.close_timeout_s


@pytest.mark.parametrize("share", [0, pytest.param(0.5, marks=pytest.mark.long), 0.99])
def test_a_server_whose_seed_is_killed_falls_back_to_the_disk(share: float, fleet: Fleet, models: Models) -> None:
    """kill -9 before the first weight, on the way and before the last word: the reason is told, and the answers are
    those of a plain load.
    """
    halt = Halt(fleet.folder, share)
    seed = start_seed(fleet, models.path("llama"), env={"RFORK_BACKEND": "nccl"})
    tokens = seed.generate(PROMPT).tokens
    fork = start_fork(fleet, models.path("llama"), seed, wait=False, env=halt.env)
    fork.wait_for("to have read its share", halt.is_there, 60)
    seed.kill()
    halt.go()
    settled(fork.wait_until_ready())
    assert weights(fork)["source"] == "checkpoint"
    assert weights(fork)["fallback_reason"] in ("seed_lost", "unreachable"), fork.log()
    assert fork.generate(PROMPT).tokens == tokens


def test_sglangs_own_client_gets_its_parameters_in_order(seed: Server, free_port: int) -> None:
    """Where the operator vouches for it: SGLang's own helper joins, and what it takes is what the seed holds."""
    argv = [sys.executable, "-m", "support.stock_group_client", str(seed.port), str(free_port)]
    client = subprocess.run(argv, **PROGRAM, timeout=120, check=True)  # type: ignore[call-overload]
    received, held = json.loads(client.stdout.splitlines()[-1]), target_bytes(light_fork(seed.address))
    assert received == held
    assert seed.generate(PROMPT).tokens
