"""Layers that something else wraps: carried where that is proven, refused by name where it is not."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from types import SimpleNamespace

import pytest
from support.forking import serving
from support.holding import differences, start_fork, start_seed
from support.models import Models
from support.seed_node import Seed
from support.server import Fleet

from sglang_rfork.srt.managers import rank
from sglang_rfork.srt.managers.scheduler import around_rebalance

pytestmark = pytest.mark.server

LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "--lora-backend", "torch_native")


def test_layers_wrapped_for_adapters_are_forked_by_what_is_in_them(models: Models, fleet: Fleet) -> None:
    """Both sides list their layers before SGLang wraps them; a forked one seeds the next, wrapped as it is by then."""
    seed = start_seed(fleet, models.path("llama"), *LORA)
    fork = start_fork(fleet, models.path("llama"), seed.server, *LORA)
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert differences(fork, seed) == []
    serving(fork.server)


def test_a_server_without_adapters_does_not_fork_from_one_with_them(models: Models, fleet: Fleet) -> None:
    seed = start_seed(fleet, models.path("llama"), *LORA)
    fork = start_fork(fleet, models.path("llama"), seed.server)
    assert "args.enable_lora" in str(fork.sources), fork.sources


def test_experts_that_move_close_the_seed_before_the_first_one_has_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamic EPLB: bytes belong to another expert map from then on, so nothing brings this seed back by itself."""
    with ExitStack() as stack:
        seed = Seed(stack).serve()
        monkeypatch.setattr(rank, "_state", SimpleNamespace(agent=seed.agents[0]))

        def rebalance(manager: object) -> Iterator[str]:
            yield "one layer moved"
            yield "all layers moved"

        steps = around_rebalance(rebalance, None)
        assert next(steps) == "one layer moved"
        seed.wait("paused")
        assert [*steps] == ["all layers moved"]
        assert seed.lease().json()["reason"] == "paused"
        assert seed.agents[0].generation % 2 == 1
