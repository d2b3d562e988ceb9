"""SIGTERM: no new reader, those that read may finish, and nobody waits for ever."""

from __future__ import annotations

import os
import signal

import httpx
import pytest
from support.forking import start_fork, start_seed, status, weights
from support.models import Models
from support.outside import NOBODY, image_of, lease_on
from support.server import Fleet, Server

pytestmark = pytest.mark.server


def state(server: Server) -> str:
    """Its state by its listener, which answers to the last."""
    return str(status(server)["state"])


@pytest.mark.parametrize("has_served", [True, False], ids=["after requests", "before the first request"])
def test_readers_finish_before_a_server_ends(has_served: bool, fleet: Fleet, models: Models) -> None:
    """SGLang installs its own SIGTERM handler with the first request; before that it is uvicorn's."""
    server = start_seed(fleet, models.path("llama"))
    if has_served:
        server.generate()
    listener = status(server)["listener"]
    with lease_on(server) as lease:
        os.kill(server.pid, signal.SIGTERM)
        server.wait_for("to drain", lambda: f"{lease.reply.instance_id} is draining" in server.log(), 30)
        refused = httpx.post(f"{listener}/rfork/v1/leases", json=BODY, trust_env=False)
        assert (refused.status_code, refused.json()["reason"]) == (503, "draining")
        assert lease.manifest().nbytes > 0
        lease.check()
        assert server.returncode is None
    server.wait_until_ended(60)
    assert "cut off" not in server.log()


BODY = {"client": NOBODY, "instance_key": "", "identity": {}, "engine": "", "content": "checkpoint:0", "rank": {}}


def test_a_reader_that_does_not_finish_is_cut_off(fleet: Fleet, models: Models) -> None:
    server = start_seed(fleet, models.path("llama"), env={"RFORK_DRAIN_TIMEOUT_S": "1"})
    server.generate()
    with lease_on(server):
        os.kill(server.pid, signal.SIGTERM)
        server.wait_until_ended(60)
    assert "1 readers are cut off: they did not finish in 1 s" in server.log()


def test_without_readers_nothing_is_waited_for(fleet: Fleet, models: Models) -> None:
    server = start_seed(fleet, models.path("llama"), env={"RFORK_DRAIN_TIMEOUT_S": "86400"})
    server.generate()
    server.terminate(60)


def test_a_chain_outlives_its_first_link(fleet: Fleet, models: Models) -> None:
    """A to B to C: A is killed before C starts, and B and C hold what A held, in memory of their own."""
    path = models.path("llama")
    first = start_seed(fleet, path)
    right, from_disk = first.generate(), image_of(first)
    second = start_fork(fleet, path, first.port)
    assert weights(second)["seed"]["instance_id"] == status(first)["instance_id"]
    first.kill()
    assert second.generate() == right
    third = start_fork(fleet, path, second.port)
    assert weights(third)["seed"]["instance_id"] == status(second)["instance_id"]
    assert image_of(second).differences(from_disk) == []
    assert image_of(third).differences(from_disk) == []
    second.kill()
    assert third.generate() == right
