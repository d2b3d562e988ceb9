"""What the tests of changing weights share: a seed for each module, and servers beside it for one test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.server import Fleet, Generation, Server


@pytest.fixture(scope="module")
def right(seed: Server) -> Generation:
    """Of the module's seed with the checkpoint, before anything has changed."""
    return seed.generate()


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    with module_fleet.visited():
        yield module_fleet
