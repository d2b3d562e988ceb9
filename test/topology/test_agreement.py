"""All ranks of an instance take one outcome, whichever of them failed and whatever became of the others."""

from __future__ import annotations

import signal
import time

import pytest
from support.holding import differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

IMPATIENT = {"RFORK_CONNECT_TIMEOUT_S": "5", "RFORK_READ_TIMEOUT_S": "8", "RFORK_SEEK_TIMEOUT_S": "10"}


def test_one_rank_that_can_not_read_makes_all_ranks_fall_back(models: Models, fleet: Fleet) -> None:
    """A rank of the seed is stopped: its shard can be leased, but not read. The other one arrives, and is dropped."""
    seed = start_seed(fleet, models.path("llama"), "--tp", "2")
    stopped = next(p for p in seed.server.processes("scheduler") if "TP1" in " ".join(p.cmdline()))
    stopped.send_signal(signal.SIGSTOP)
    started_s = time.monotonic()
    fork = start_fork(fleet, models.path("llama"), seed.server, "--tp", "2", env=IMPATIENT)
    assert time.monotonic() - started_s < 100
    reasons = {r["shard"]: (r["weights"]["source"], r["weights"]["fallback_reason"]) for r in fork.reports}
    assert len(reasons) == 2
    assert len(set(reasons.values())) == 1, reasons
    assert set(reasons.values()).pop()[0] == "checkpoint"
    assert "rank 1: " in fork.sources["target.tp0of2.pp0of1.ep0of1.moe_tp0of2.attn_dp0of1"]
    assert differences(fork, seed) == []
