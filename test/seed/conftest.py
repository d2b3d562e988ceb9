"""A node that starts, or that serves already."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
from support.seed_node import Seed


@pytest.fixture
def make_seed() -> Iterator[Callable[..., Seed]]:
    with ExitStack() as stack:
        yield lambda **config: Seed(stack, **config)


@pytest.fixture
def seed(make_seed: Callable[..., Seed]) -> Seed:
    return make_seed()


@pytest.fixture
def serving(seed: Seed) -> Seed:
    return seed.serve()
