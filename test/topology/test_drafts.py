"""A draft beside its target: a shard of its own, sharing what the target lends it, before and after a fork."""

from __future__ import annotations

from typing import Any

import pytest
from support.holding import Probed, differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

LENT = {"model.embed_tokens.weight", "lm_head.weight"}
LENT_NBYTES = 2 * 512 * 256 * 2  # both are 512 x 256 numbers of two bytes
DRAFT_NBYTES = 1_442_816 + LENT_NBYTES
TARGET_NBYTES = 2_886_144


def eagle(models: Models, **draft: Any) -> tuple[str, ...]:
    path = str(models.path("llama-eagle", **draft))
    steps = "--speculative-num-steps 1 --speculative-eagle-topk 1 --speculative-num-draft-tokens 2"
    return ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", path, *steps.split())


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Probed:
    return start_seed(module_fleet, models.path("llama"), *eagle(models))


def test_target_and_draft_are_forked_each_as_its_own_shard_and_share_what_is_lent(
    seed: Probed, models: Models, fleet: Fleet
) -> None:
    fork = start_fork(fleet, models.path("llama"), seed.server, *eagle(models))
    fork_of_fork = start_fork(fleet, models.path("llama"), fork.server, *eagle(models))
    for forked in (fork, fork_of_fork):
        assert moved(forked) == {"target": (TARGET_NBYTES, 0), "draft-0": (DRAFT_NBYTES - LENT_NBYTES, LENT_NBYTES)}
        assert differences(forked, seed) == []
        assert lent(forked) == lent(seed) == LENT


def test_a_draft_without_a_seed_falls_back_alone(seed: Probed, models: Models, fleet: Fleet) -> None:
    """The seed has another draft: the target is forked all the same, and the draft comes from the disk."""
    fork = start_fork(fleet, models.path("llama"), seed.server, *eagle(models, seed=1))
    sources = {r["role"]: r["weights"] for r in fork.reports}
    assert sources["target"]["source"] == "seed"
    assert (sources["draft-0"]["source"], sources["draft-0"]["fallback_reason"]) == ("checkpoint", "key_mismatch")
    assert lent(fork) == LENT
    assert [d for d in differences(fork, seed) if d.startswith("target")] == []
    assert [d for d in differences(fork, seed) if d.startswith("draft")] != []


def moved(probed: Probed) -> dict[str, tuple[int, int]]:
    """Role → bytes that crossed the link and bytes that its target had already; of a forked rank 0."""
    reports = {r["role"]: r["weights"] for r in probed.reports}
    assert {w["source"] for w in reports.values()} == {"seed"}, reports
    return {role: (weights["nbytes"], weights["lent_nbytes"]) for role, weights in reports.items()}


def lent(probed: Probed) -> set[str]:
    """Weights of the draft that are the target's own memory; rotary caches are shared by the whole process anyway."""
    (draft,) = [held for rank, held in probed.holdings.items() if rank.startswith("draft-0")]
    return {
        name for name, facts in draft["tensors"].items() if facts[-1].startswith("target:") and "rotary" not in name
    }
