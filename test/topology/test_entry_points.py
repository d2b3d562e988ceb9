"""`sglang serve` and `python -m sglang.launch_server`: two ways to start one and the same server."""

from __future__ import annotations

import pytest
from support.forking import rfork_lines
from support.holding import differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server


def test_sglang_serve_forks_and_seeds_as_launch_server_does(models: Models, fleet: Fleet) -> None:
    """Each way forks from the other, and ends the same."""
    model = models.path("qwen3")
    seed = start_seed(fleet, model, serve=True)
    old = start_fork(fleet, model, seed.server)
    new = start_fork(fleet, model, old.server, serve=True)
    for fork in (old, new):
        assert set(fork.sources.values()) == {"seed"}, fork.sources
        assert differences(fork, seed) == []
        assert fork.server.generate() == seed.server.generate()
    first = [next(line for line in rfork_lines(probed.server) if "hooks applied" in line) for probed in (old, new)]
    assert first[0] == first[1]
    assert old.server.terminate() == new.server.terminate()
