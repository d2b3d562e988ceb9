"""The same command starts the first instance and the next, whatever happens to seeds and planner meanwhile."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.forking import last_line, settled, status, weights
from support.models import Models
from support.outside import image_of, lease_on
from support.planner import INTERVAL_S, Planner, instance_id, until
from support.server import Fleet, Server

from rfork.wire.planner import Heartbeat, InstanceState, LeaseView

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

COMMAND = ("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine")
LARGER = {"num_hidden_layers": 8}
"""9 MB: at 1 MB/s there is time to do something in the middle of it."""


def start(fleet: Fleet, model: Path, planner: Planner, *, wait: bool = True, **env: str) -> Server:
    server = fleet.start(model, *COMMAND, env=planner.env(**env), wait=wait)
    return offered(planner, settled(server)) if wait else server


def offered(planner: Planner, server: Server) -> Server:
    """Wait until the planner sends clients there."""
    name = instance_id(server)
    until(f"{name} to be offered", lambda: (v := planner.instances().get(name)) is not None and v.offered, 30)
    return server


def source(server: Server) -> str:
    """The seed that it forked from, or `disk (reason)`."""
    report = weights(server)
    return str(report["seed"]["instance_id"]) if report["seed"] else f"disk ({report['fallback_reason']})"


@pytest.fixture(scope="module")
def three(planner: Planner, module_fleet: Fleet, models: Models) -> list[Server]:
    """One command line, typed three times."""
    return [start(module_fleet, models.path("llama"), planner, RFORK_CAPACITY="1") for _ in range(3)]


@pytest.fixture
def more(module_fleet: Fleet) -> Iterator[Fleet]:
    """For a server or two beside the three; they are gone after the test."""
    with module_fleet.visited():
        yield module_fleet


def test_the_first_reads_the_disk_and_the_others_fork(three: list[Server], planner: Planner) -> None:
    first, second, third = three
    assert source(first) == "disk (elected)"
    assert source(second) == instance_id(first)
    assert source(third) in (instance_id(first), instance_id(second))
    assert first.generate() == second.generate() == third.generate()
    assert image_of(third).differences(image_of(first)) == []
    assert {name: view.parent for name, view in planner.instances().items()} == {
        instance_id(first): "disk",
        instance_id(second): source(second),
        instance_id(third): source(third),
    }
    listed = planner.run("seeds")
    assert all(instance_id(server) in listed for server in three)
    assert "3 instances, 3 offered" in listed
    assert len([e for e in planner.client.events().events if e.kind == "report_loaded"]) == 2


def test_a_seed_over_capacity_refuses_and_the_client_moves_on_at_once(
    three: list[Server], planner: Planner, more: Fleet, models: Models
) -> None:
    """The planner is told that nobody reads the first and somebody the second; the truth is the other way round."""
    first, second, third = three
    stop = threading.Event()
    liar = threading.Thread(target=tell_lies, args=(planner, [first, second, third], stop))
    with lease_on(first):
        liar.start()
        try:
            client = start(more, models.path("llama"), planner)
        finally:
            stop.set()
            liar.join()
    assert source(client) in (instance_id(second), instance_id(third))
    refused = [e for e in planner.client.events().events if e.kind == "report_refused"]
    assert [(e.instance, e.client) for e in refused] == [(instance_id(first), instance_id(client))]
    assert "busy" in refused[0].text
    until("the three to be heard of again", lambda: len(planner.instances()) >= 3, 30)


def tell_lies(planner: Planner, servers: list[Server], stop: threading.Event) -> None:
    """Heartbeats that overtake the true ones: one reader everywhere, but none at the first."""
    known = planner.instances()
    seq = 1 << 40
    while not stop.is_set():
        for server in servers:
            view = known[instance_id(server)]
            seq += 1
            planner.client.heartbeat(
                Heartbeat(
                    instance_id=view.instance_id,
                    instance_key=view.instance_key,
                    state=InstanceState.SERVING,
                    seq=seq,
                    listener=view.listener,
                    generation=view.generation,
                    content=view.content,
                    capacity=2,
                    leases=[] if server is servers[0] else [LeaseView("i-somebody")],
                )
            )
        time.sleep(0.5)


def test_a_planner_that_restarts_empty_lists_every_instance_by_its_heartbeats(
    three: list[Server], planner: Planner
) -> None:
    names = {instance_id(server) for server in three}
    planner.kill()
    time.sleep(2 * INTERVAL_S)
    planner.start()
    until("all to be listed", lambda: names <= set(planner.instances()), 10)


def test_without_a_planner_seeds_are_used_and_without_seeds_the_disk_after_a_wait_of_its_own(
    three: list[Server], planner: Planner, more: Fleet, models: Models
) -> None:
    planner.kill()
    try:
        env = {"RFORK_SEEK_TIMEOUT_S": "5", "RFORK_STORAGE_JITTER_S": "2"}
        listed = start(
            more, models.path("llama"), planner, wait=False, RFORK_SEEDS=f"dns+localhost:{three[1].port}", **env
        )
        alone = start(more, models.path("llama"), planner, wait=False, **env)
        assert source(settled(listed.wait_until_ready())) == instance_id(three[1])
        assert source(settled(alone.wait_until_ready())) == "disk (planner_unavailable)"
        assert re.search(r"no planner and no other seed; reading the disk in ([01]\.\d|2\.0) s", alone.log())
        assert alone.generate() == listed.generate() == three[0].generate()
    finally:
        planner.start()
    until("both to register by themselves", lambda: len(planner.instances()) >= 5, 30)


def test_a_drained_instance_is_offered_to_nobody_while_its_readers_finish(
    three: list[Server], planner: Planner
) -> None:
    first = offered(planner, three[0])
    name = instance_id(first)
    with lease_on(first) as lease:
        until("the lease to be heard of", lambda: planner.instances()[name].num_leases == 1, 10)
        assert f"{name} is asked to drain" in planner.run("drain", name)
        assert not planner.instances()[name].offered
        until("it to drain", lambda: status(first)["state"] == "draining", 10)
        lease.check()
        assert name in planner.run("leases")
    assert planner.run("drain", name, "--wait", "20")
    first.terminate(60)
    assert name not in planner.instances(), "it withdrew before it ended"


def test_of_two_that_start_together_one_reads_the_disk_and_the_other_waits_and_forks(
    planner: Planner, more: Fleet, models: Models
) -> None:
    """`fallback: never` does not stop the one that reads the disk for all."""
    path = models.path("llama", seed=3)
    config = f'{{"rfork_scheduler_url": "{planner.url}", "fallback": "never", "advertise_host": "127.0.0.1"}}'
    two = [more.start(path, *COMMAND, "--rfork-config", config, wait=False) for _ in range(2)]
    for server in two:
        settled(server.wait_until_ready())
    disk, fork = sorted(two, key=lambda server: weights(server)["source"] == "seed")
    assert source(disk) == "disk (elected)"
    assert source(fork) == instance_id(disk)
    first, second = instance_id(disk), instance_id(fork)
    answers = [e for e in planner.client.events().events if e.client in (first, second)]
    told = [(e.kind, e.client, e.instance) for e in answers if e.kind in ("claim", "assigned")]
    assert told == [("claim", first, ""), ("assigned", second, first)]
    assert disk.generate() == fork.generate()


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_a_seed_that_ends_halfway_is_followed_by_the_next_candidate(
    end: str, planner: Planner, more: Fleet, models: Models
) -> None:
    path = models.path("llama", **LARGER, seed=4 if end == "killed" else 5)
    seeds = [start(more, path, planner) for _ in range(2)]
    slowly = {"RFORK_READ_GBPS_LIMIT": "0.001", "RFORK_READ_TIMEOUT_S": "2"}
    client = start(more, path, planner, wait=False, **slowly)
    client.wait_for("to have read a third", lambda: re.search(r"rfork target:\s+(3[3-9]|[4-9]\d)%", client.log()), 60)
    names = {instance_id(server) for server in seeds}
    (reading,) = (line.seed for line in planner.client.leases().leases if line.client and line.seed in names)
    used, other = sorted(seeds, key=lambda server: instance_id(server) != reading)
    if end == "killed":
        used.kill()
        client.wait_for("to end its start", lambda: last_line(client) is not None, 60)
    else:
        with used.frozen():
            client.wait_for("to end its start", lambda: last_line(client) is not None, 60)
    assert source(client) == instance_id(other)
    assert client.generate() == other.generate()
    failed = [e for e in planner.client.events().events if e.kind == "report_failed" and e.instance == reading]
    assert [e.client for e in failed] == [instance_id(client)]
    assert "seed_lost" in failed[0].text


def test_live_weights_come_from_whoever_holds_them_and_never_from_the_disk(
    three: list[Server], planner: Planner, more: Fleet, models: Models
) -> None:
    """Nobody has updated anything yet: a client of live weights waits, refuses, and says why. Then somebody has."""
    live = {"RFORK_WEIGHTS": "live", "RFORK_PLAN_TIMEOUT_S": "2"}
    refused = more.start(models.path("llama"), *COMMAND, env=planner.env(**live), wait=False)
    assert refused.wait_until_ended(120) != 0
    assert "no weights from a seed (no_seed) and `weights` is live and `fallback` names no loader" in refused.log()
    trainer = three[2]
    update = {"model_path": str(models.path("llama", seed=7)), "weight_version": "step-7"}
    assert trainer.post("/update_weights_from_disk", update).json()["success"] is True
    offered(planner, trainer)
    client = start(more, models.path("llama"), planner, RFORK_WEIGHTS="live")
    assert source(client) == instance_id(trainer)
    assert client.generate() == trainer.generate() != three[1].generate()
    assert status(client)["content"] == status(trainer)["content"]
    assert status(client)["content"].startswith("live:")
