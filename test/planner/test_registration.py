"""A seed at the planner: the real node with real ranks of the memory transport, registered with a real planner."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

import certifi
import msgspec
import pytest
from support.seed_node import Seed, until
from support.seed_rank import CHECKPOINT, IDENTITY, seed_shard

from rfork.config import load_config
from rfork.identity import ANY_LIVE, instance_key
from rfork.planner.client import PlannerClient
from rfork.seed import registration
from rfork.seed.lifecycle import SeedState
from rfork.seed.node import Snapshot
from rfork.seed.registration import Registration, heartbeat_of
from rfork.wire.control import WITHDRAWAL_S, Seeking
from rfork.wire.planner import Heartbeat, Outcome, Report

KEY = instance_key(IDENTITY, CHECKPOINT)
NOT_ANSWERING = "no heartbeats until it does"


@pytest.fixture
def stack():
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def start(stack, live_planner, monkeypatch):
    """Start a node that is registered with the planner: `start(**config)`."""
    monkeypatch.setattr(registration, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(registration, "PING_TIMEOUT_S", 0.3)
    live_planner.service.policy = msgspec.structs.replace(live_planner.service.policy, interval_s=0.2)

    def start(**config):
        seed = Seed(stack, **config)
        made = Registration(seed.node, PlannerClient(live_planner.url))
        stack.callback(made.stop, "the test ends")
        made.start()
        return seed, made

    return start


@pytest.fixture
def listed(live_planner):
    """What the planner says of the one instance that it knows, or None."""

    def listed():
        found = PlannerClient(live_planner.url).instances().instances
        assert len(found) <= 1
        return found[0] if found else None

    return listed


def test_a_seed_is_registered_once_it_serves_and_withdrawn_when_it_stops(start, listed):
    seed, made = start()
    seed.serve()
    until(lambda: (found := listed()) is not None and found.offered)
    assert (listed().instance_id, listed().instance_key) == (seed.node.instance_id, KEY)
    assert listed().listener == seed.node.listener_url
    made.stop("SIGTERM")
    assert listed() is None


def test_an_elected_instance_is_heard_of_while_it_loads_and_so_keeps_its_claim(start, listed, live_planner, build):
    seed, _ = start()
    PlannerClient(live_planner.url).ask(build.ask(seed.node.instance_id, instance_key=KEY))
    seed.start()
    agent = seed.add(publish=False)
    assert listed() is None
    agent.seeking(IDENTITY, CHECKPOINT)
    until(lambda: (found := listed()) is not None and found.state == "starting")
    pool = live_planner.service.state.pools[KEY]
    before = pool.claims[seed.node.instance_id]
    until(lambda: pool.claims[seed.node.instance_id] > before)


def test_an_elected_instance_tells_a_planner_that_has_forgotten_it(start, live_planner):
    """The planner restarts while the disk is read: what it hears from the holder is all that it knows."""
    seed, made = start()
    seed.start()
    agent = seed.add(publish=False)
    agent.seeking(IDENTITY, CHECKPOINT)
    until(lambda: (beat := made.describe()) is not None and not beat.reads_disk)
    agent.seeking(IDENTITY, CHECKPOINT, reads_disk=True)
    pools = live_planner.service.state.pools
    until(lambda: KEY in pools and seed.node.instance_id in pools[KEY].claims)
    agent.publish([seed_shard(seed.shards[0])])
    until(lambda: seed.node.snapshot().generation > 0)
    assert made.describe().reads_disk, "until it serves, nobody can fork from it"
    seed.node.ready()
    until(lambda: not pools[KEY].claims)
    assert not made.describe().reads_disk


def test_a_disk_load_that_fails_passes_the_claim_on_at_once(start, live_planner, build):
    """The rank that read the disk dies; nobody waits for the claim's time to live."""
    seed, _ = start()
    seed.start()
    client = PlannerClient(live_planner.url)
    client.ask(build.ask(seed.node.instance_id, instance_key=KEY))
    command = [sys.executable, "-m", "support.seed_rank", *list(seed.node.environment().values())[:2], "0", "1"]
    rank = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    rank.stdout.readline()
    os.kill(rank.pid, signal.SIGKILL)
    rank.wait()
    answer = client.ask(build.ask("i-next", instance_key=KEY, wait_s=15.0))
    assert type(answer).__name__ == "ReadDisk"


def test_a_claim_holder_that_withdraws_unheard_of_passes_the_claim_on(planner, build):
    planner.ask("i-first")
    planner.ask("i-second")
    from rfork.planner.events import Withdraw

    planner.handle(Withdraw("i-first", "its load failed"))
    assert type(planner.last("i-second")).__name__ == "ReadDisk"


def test_a_pause_is_told_at_once_and_so_is_its_end(start, listed):
    seed, _ = start()
    seed.serve()
    until(lambda: (found := listed()) is not None and found.offered)
    with seed.agents[0].changing("an update"):
        until(lambda: listed().state == "paused")
        assert not listed().offered
    until(lambda: listed().state == "serving")


def test_memory_goes_only_once_the_planner_has_heard(start, listed):
    seed, _ = start()
    seed.serve()
    for _ in range(3):
        until(lambda: (found := listed()) is not None and found.offered)
        with seed.agents[0].changing("release", alters=False, settles=False, unmaps=True):
            assert not listed().offered
        with seed.agents[0].changing("resume", alters=False, maps=True):
            pass


@pytest.mark.parametrize("listens", [True, False], ids=["is silent", "is gone"])
def test_memory_waits_a_second_at_most_for_a_planner_that(listens, stack):
    with socket.create_server(("127.0.0.1", 0)) as hole:
        url = f"http://127.0.0.1:{hole.getsockname()[1]}"
        if not listens:
            hole.close()
        seed = Seed(stack)
        made = Registration(seed.node, PlannerClient(url))
        stack.callback(made.stop, "")
        made.start()
        seed.serve()
        started_s = time.monotonic()
        with seed.agents[0].changing("release", alters=False, settles=False, unmaps=True):
            assert time.monotonic() - started_s < 5 * WITHDRAWAL_S
        assert seed.fabric.num_open == 0


def test_draining_is_told_at_once_also_where_an_operator_asked_for_it(start, listed, live_planner):
    seed, _ = start()
    seed.serve()
    until(lambda: (found := listed()) is not None and found.offered)
    PlannerClient(live_planner.url).drain(seed.node.instance_id)
    assert not listed().offered, "from that moment on"
    until(lambda: seed.node.state is SeedState.DRAINING)
    until(lambda: listed().state == "draining")


def test_a_rank_that_dies_ends_the_registration(start, listed):
    seed, _ = start()
    seed.serve()
    until(lambda: (found := listed()) is not None and found.offered)
    seed.agents[0].close()
    until(lambda: listed() is None)


def test_no_heartbeat_is_sent_while_a_rank_is_silent(start, listed, caplog):
    seed, made = start()
    seed.start()
    command = [sys.executable, "-m", "support.seed_rank", *list(seed.node.environment().values())[:2], "0", "1"]
    rank = subprocess.Popen(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    try:
        assert rank.stdout is not None
        rank.stdout.readline()
        seed.node.ready()
        until(lambda: (found := listed()) is not None and found.offered)
        os.kill(rank.pid, signal.SIGSTOP)
        until(lambda: NOT_ANSWERING in caplog.text)
        assert made.describe() is None
        os.kill(rank.pid, signal.SIGCONT)
        until(lambda: made.describe() is not None)
    finally:
        rank.kill()
        rank.wait()


def test_what_can_not_be_looked_at_is_not_called_alive(start, listed, tmp_path, caplog):
    """The authority's file is replaced while nodes look at each other: half a file, and then a whole one."""
    whole = Path(certifi.where()).read_text()
    ca_file = tmp_path / "ca.pem"
    ca_file.write_text(whole)
    seed, made = start(ca_file=str(ca_file))
    seed.start()
    seed.add().elsewhere({"target.tp1of2": "https://127.0.0.1:1"})
    seed.node.ready()
    until(lambda: listed() is not None)
    ca_file.write_text("-----BEGIN CERTIFICATE-----\nhalf")
    until(lambda: made.describe() is None)
    until(lambda: "could not look at the ranks" in caplog.text)
    ca_file.write_text(whole)
    until(lambda: made.describe() is not None)
    assert caplog.text.count("could not look at the ranks") == 1, "once, not with every look"


def test_what_ranks_report_is_delivered_when_the_planner_is_back(stack, build):
    from test.planner.conftest import LivePlanner

    planner = LivePlanner()
    seed = Seed(stack)
    made = Registration(seed.node, PlannerClient(planner.url))
    stack.callback(made.stop, "")
    made.start()
    agent = seed.start().add(publish=False)
    told = Report(client=seed.node.instance_id, instance_key=KEY, outcome=Outcome.FELL_BACK, reason="seed_lost")
    agent.tell(told)
    planner.start()
    stack.callback(planner.stop)
    until(lambda: [e.kind for e in planner.service.lines(prefix="report")] == ["report_fell_back"], 15)


def test_an_instance_that_is_no_seed_reports_all_the_same(start, live_planner):
    seed, _ = start(seed="off")
    seed.start()
    agent = seed.add(publish=False, agent={"is_on": False})
    agent.tell(Report(client=seed.node.instance_id, instance_key=KEY, outcome=Outcome.LOADED, seed="i-a"))
    until(lambda: [e.kind for e in live_planner.service.lines(prefix="report")] == ["report_loaded"])


def test_an_instance_of_several_nodes_is_offered_while_all_of_them_serve(start, listed, stack):
    """Clients of the second node's shards are sent there by the first, so the first speaks for both."""
    first, _ = start()
    second = Seed(stack, instance_id=first.node.instance_id)
    second.serve()
    first.start()
    first.add().elsewhere({"target.tp1of2": second.node.listener_url})
    first.node.ready()
    until(lambda: (found := listed()) is not None and found.offered)
    with second.agents[0].changing("an update"):
        until(lambda: not listed().offered)
        assert (listed().state, listed().ranks_ready) == ("serving", 0)
    until(lambda: listed().offered)
    second.node.stop(timeout_s=2)
    until(lambda: not listed().offered)


def snapshot(**fields):
    identity = {f"field.{n}": "x" * 5000 for n in range(600)}
    what = Seeking(rank=0, engine="test", identity=fields.pop("identity", identity), content=str(CHECKPOINT))
    known = {
        "what": what, "state": SeedState.SERVING, "generation": 2, "weight_version": "", "num_ranks": 1,
        "num_ready": 1, "readers": (), "seed": None, "is_loaded": True,
    }  # fmt: skip
    return Snapshot(**{**known, **fields})


def test_a_heartbeat_keeps_its_bounds_with_any_number_of_readers_and_any_names():
    """Whatever clients and users call themselves, the planner takes it."""
    readers = ("<script>", "é" * 200, *(f"i-{n}" for n in range(1000)))
    seen = snapshot(readers=readers, weight_version="v" * 5000, seed="<b>")
    config = load_config(None, {"RFORK_CAPACITY": "1000", "RFORK_LABELS": '{"zone": "' + "z" * 999 + '"}'})
    beat = heartbeat_of(seen, config, "i-seed", "http://127.0.0.1:1")
    sent = msgspec.json.encode(beat)
    assert len(sent) < 64 * 1024
    taken = msgspec.json.decode(sent, type=Heartbeat)
    assert len(taken.leases) == 256
    assert taken.parent.startswith("other-")


def test_live_content_is_registered_under_its_live_key_too():
    what = Seeking(rank=0, engine=IDENTITY.engine, identity=IDENTITY.fields, content="live:77")
    beat = heartbeat_of(snapshot(what=what), load_config(None, {}), "i-seed", "")
    assert beat.live_key == instance_key(IDENTITY, ANY_LIVE)
    assert beat.instance_key not in (KEY, beat.live_key)
