"""Real servers of a fleet with a key: the fleet forks, a stranger does not, and the key is to be seen nowhere."""

from __future__ import annotations

import pytest
from support.forking import ENV, fork_from, rfork_lines, settled, start_seed, status, weights
from support.models import Models
from support.server import Fleet

from . import KEY
from .test_seed_door import ADDRESS

pytestmark = pytest.mark.server

STOCK = "/get_remote_instance_transfer_engine_info?rank=0"


def test_the_fleet_forks_a_stranger_loads_from_disk_and_nobody_sees_key_or_address(
    fleet: Fleet, models: Models
) -> None:
    keyed = {**ENV, "RFORK_KEY": KEY}
    model = models.path("llama")
    seed = start_seed(fleet, model, env=keyed)
    shown = seed.get("/rfork/v1/status")
    assert (shown.json()["ticket_wanted"], shown.json()["listener"]) == (True, None)
    assert not ADDRESS.search(shown.content)
    assert (seed.get(STOCK).status_code, seed.get(STOCK).json()["error"]["reason"]) == (403, "ticket_wanted")

    fork = settled(fleet.start(model, *fork_from(seed.port), env=keyed))
    assert weights(fork)["source"] == "seed"
    assert weights(fork)["seed"]["instance_id"] == status(seed)["instance_id"]
    assert weights(fork)["seed"]["address"] == ""
    assert fork.generate() == seed.generate()

    stranger = settled(fleet.start(model, *fork_from(seed.port), env=ENV))
    assert (weights(stranger)["source"], weights(stranger)["fallback_reason"]) == ("checkpoint", "unauthorized")
    assert any("set `key_file` (or `key`) here too" in line for line in rfork_lines(stranger))
    assert stranger.generate() == seed.generate()

    for server in (seed, fork):
        info = next(a for a in (server.get("/server_info"), server.get("/get_server_info")) if a.status_code == 200)
        argv = [word for process in server.processes() for word in process.cmdline()]
        assert KEY not in "".join([info.text, server.log(), *argv, server.get("/rfork/v1/status").text])
