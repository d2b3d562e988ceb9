"""What a failed fork costs in memory: nothing but the time. A model of 300 MB, the resident memory of its rank."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.drills import BOUND_S, percent
from support.forking import ENV, fork_from, last_line, serving, settled, start_fork, start_seed, weights
from support.models import Models
from support.server import Fleet, Server

pytestmark = [pytest.mark.server, pytest.mark.long]

WIDER = {"num_hidden_layers": 11, "hidden_size": 1024, "intermediate_size": 4096}
MIB = 1 << 20
ALLOWED = 0.05


def peak_nbytes(server: Server) -> int:
    """The most that the rank has had resident at a time."""
    (rank,) = server.processes("scheduler")
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path(f"/proc/{rank.pid}/status").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) << 10


def test_a_fallback_peaks_like_a_load_from_disk_and_a_fork_outlives_its_seed(fleet: Fleet, models: Models) -> None:
    path = models.path("llama", **WIDER)
    model_nbytes = (path / "model.safetensors").stat().st_size
    seed = start_seed(fleet, path)
    right, from_disk = seed.generate(), peak_nbytes(seed)
    fork = start_fork(fleet, path, seed.port)
    assert weights(fork)["source"] == "seed", weights(fork)
    assert peak_nbytes(fork) <= from_disk + ALLOWED * model_nbytes
    serving(fork)

    env = {**ENV, "RFORK_READ_GBPS_LIMIT": "0.02", "RFORK_READ_TIMEOUT_S": "2"}
    fallen = fleet.start(path, *fork_from(seed.port), env=env, wait=False)
    fallen.wait_for("to have read half", lambda: percent(fallen) >= 50, BOUND_S)
    seed.kill()
    assert seed.processes() == []
    fallen.wait_for("to end its start", lambda: last_line(fallen) is not None, BOUND_S)
    assert weights(fallen)["fallback_reason"] == "seed_lost", weights(fallen)
    assert fallen.generate() == right
    assert peak_nbytes(fallen) <= from_disk + ALLOWED * model_nbytes, (
        f"{peak_nbytes(fallen) / MIB:.0f} MiB at most, {from_disk / MIB:.0f} MiB from disk"
    )

    assert fork.generate() == right
    again = settled(fleet.start(path, *fork_from(fork.port), env=ENV))
    assert weights(again)["source"] == "seed"
    assert again.generate() == right
