"""A draft beside its target: a shard of its own, sharing what the target lends it, before and after a fork."""

from __future__ import annotations

from typing import Any

import pytest
from support.holding import Probed, differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

LENT = {"model.embed_tokens.weight", "lm_head.weight"}


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
    assert [(r["role"], r["weights"]["source"]) for r in fork.reports] == [("draft-0", "seed"), ("target", "seed")]
    assert differences(fork, seed) == []
    assert lent(fork) == lent(seed) == LENT


def test_a_draft_without_a_seed_falls_back_alone(seed: Probed, models: Models, fleet: Fleet) -> None:
    """The seed has another draft: the target is forked all the same, and the draft comes from the disk."""
    fork = start_fork(fleet, models.path("llama"), seed.server, *eagle(models, seed=1))
    sources = {r["role"]: r["weights"] for r in fork.reports}
    assert sources["target"]["source"] == "seed"
    assert (sources["draft-0"]["source"], sources["draft-0"]["fallback_reason"]) == ("checkpoint", "key_mismatch")
    assert lent(fork) == LENT
    assert [d for d in differences(fork, seed) if d.startswith("target")] == []
    assert [d for d in differences(fork, seed) if d.startswith("draft")] != []


def lent(probed: Probed) -> set[str]:
    """Weights of the draft that are the target's own memory; rotary caches are shared by the whole process anyway."""
    (draft,) = [held for rank, held in probed.holdings.items() if rank.startswith("draft-0")]
    return {
        name for name, facts in draft["tensors"].items() if facts[-1].startswith("target:") and "rotary" not in name
    }
