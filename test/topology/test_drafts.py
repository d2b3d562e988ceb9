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


def test_target_and_draft_are_forked_each_as_its_own_shard(seed: Probed, models: Models, fleet: Fleet) -> None:
    fork = start_fork(fleet, models.path("llama"), seed.server, *eagle(models))
    assert [(r["role"], r["weights"]["source"]) for r in fork.reports] == [("draft-0", "seed"), ("target", "seed")]
    assert differences(fork, seed) == []
