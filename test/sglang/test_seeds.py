"""Where a model's weights are asked for, joined to the process that speaks for this rank."""

from __future__ import annotations

from contextlib import ExitStack
from types import SimpleNamespace

import pytest
import torch
from support.seed_node import Seed, until
from support.seed_rank import CHECKPOINT, IDENTITY

from rfork.config import load_config
from rfork.identity import RankIdentity
from sglang_rfork.srt.compat import Placement, installed_release
from sglang_rfork.srt.managers.rank import RankState
from sglang_rfork.srt.model_loader.seeds import seeds_for
from sglang_rfork.srt.server_args import ForkRequest
from test.planner.conftest import LivePlanner


def test_the_process_that_sends_the_heartbeats_knows_that_this_rank_reads_the_disk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    planner = LivePlanner().start()
    with ExitStack() as stack:
        stack.callback(planner.stop)
        seed = Seed(stack, planner_url=planner.url).start()
        for name, text in seed.node.environment().items():
            monkeypatch.setenv(name, text)
        state = RankState(
            installed_release(),
            ForkRequest(client=True, seed=True, draft_client=False, seed_address=None),
            load_config(None, {"RFORK_PLANNER_URL": planner.url}),
            SimpleNamespace(nnodes=1, node_rank=0, api_key=None),
            Placement(0, 1, 0),
            torch.device("cpu"),
            facts=None,  # type: ignore[arg-type]  # nothing is transferred here
        )
        state.__dict__["agent"] = agent = seed.add(publish=False)
        agent.seeking(IDENTITY, CHECKPOINT)
        until(lambda: (seen := seed.node.snapshot()) is not None and not seen.what.reads_disk)
        assert seeds_for(state, RankIdentity(), IDENTITY, CHECKPOINT).next().elected
        until(lambda: seed.node.snapshot().what.reads_disk)
