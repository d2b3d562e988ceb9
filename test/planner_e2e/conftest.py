"""A planner for the real servers of a module."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.planner import Planner


@pytest.fixture(scope="module")
def planner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Planner]:
    with contextlib.closing(Planner(tmp_path_factory.mktemp("planner")).start()) as planner:
        yield planner
