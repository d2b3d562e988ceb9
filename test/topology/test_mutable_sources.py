"""Weights that something else wraps, moves or releases: carried where that is proven, fenced while it goes on."""

from __future__ import annotations

import pytest
from support.forking import serving, status
from support.holding import differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet, Server

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


def test_released_memory_is_closed_to_readers_until_its_weights_are_back(models: Models, fleet: Fleet) -> None:
    """With --enable-memory-saver: engines go before memory does; what comes back is compared with what was published."""
    seed = start_seed(fleet, models.path("llama"), "--enable-memory-saver").server
    assert seed.post("/release_memory_occupation").status_code == 200
    assert state(seed) == "paused"
    fork = start_fork(fleet, models.path("llama"), seed, env={"RFORK_SEEK_TIMEOUT_S": "2"})
    assert "paused" in str(fork.sources), fork.sources
    assert seed.post("/resume_memory_occupation").status_code == 200
    serving(seed)


def state(server: Server) -> str:
    return str(status(server)["state"])
