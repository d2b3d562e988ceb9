"""Two nodes, one instance: each node grants the leases of its own shards, and node 0 says where the others are."""

from __future__ import annotations

import pytest
from support import forking
from support.forking import SEED, fork_from
from support.holding import Probed, differences, start_probed
from support.models import Models
from support.ports import lend
from support.server import HOST, Fleet

pytestmark = pytest.mark.server

LAYOUTS = {"tp": ("--tp", "2"), "pp": ("--pp-size", "2")}


def start_nodes(fleet: Fleet, model: object, *flags: str, name: str) -> tuple[Probed, Probed]:
    """Both nodes of one instance, on this box; the first answers requests."""
    meeting = lend()
    try:
        ranks = [
            start_probed(
                fleet, model, *flags, "--nnodes", "2", "--node-rank", str(rank),
                *("--dist-init-addr", f"{HOST}:{meeting.port}"), name=f"{name}-node{rank}", wait=False,
            )
            for rank in range(2)
        ]  # fmt: skip
        ranks[0].server.wait_until_ready()
    finally:
        meeting.release()
    return ranks[0], ranks[1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_instance_of_two_nodes_forks_from_one_of_two_nodes(layout: str, models: Models, fleet: Fleet) -> None:
    """Ranks of node 1 read shards that only node 1 of the seed has, through its own listener."""
    flags, model = LAYOUTS[layout], models.path("qwen3")
    seeds = start_nodes(fleet, model, SEED, *flags, name="seed")
    forking.serving(seeds[0].server)
    forks = start_nodes(fleet, model, *fork_from(seeds[0].server.port), *flags, name="fork")
    for fork, seed in zip(forks, seeds, strict=True):
        line = fork.server.wait_for_log("verified: full").log()
        assert "falling back" not in line
        assert differences(fork, seed) == []
    tokens = [s[0].server.generate("hello world").tokens for s in (seeds, forks)]
    assert tokens[0] == tokens[1]
