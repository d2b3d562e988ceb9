"""Fixtures of the whole suite. What they hand out is in `support`; see there for how to use it.

models          tiny checkpoints, built when first asked for
fleet           starts real SGLang servers, for one test; kills what is left of them after it
module_fleet    the same for all tests of a module, for servers that they share
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from support.models import Models
from support.server import Fleet, Nursery

LOG_LINES = 80

UNHURRIED: dict[str, Any] = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow]}
settings.register_profile("suite", derandomize=True, **UNHURRIED)
settings.register_profile("random", **UNHURRIED)
settings.load_profile("suite")
"""Hypothesis plays the same examples each time, however slow the machine; `--hypothesis-profile random` others."""


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="session")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    nursery = Nursery(tmp_path_factory.mktemp("nursery"))
    yield nursery
    nursery.stop()


@pytest.fixture
def fleet(tmp_path: Path, nursery: Nursery) -> Iterator[Fleet]:
    with Fleet(tmp_path, nursery) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), nursery) as fleet:
        yield fleet


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Show, with a failed test, the end of the log of each server that it used."""
    report = yield
    if report.when == "call" and report.failed:
        for fixture in getattr(item, "funcargs", {}).values():
            for server in fixture.servers if isinstance(fixture, Fleet) else ():
                tail = "\n".join(server.log().splitlines()[-LOG_LINES:])
                report.sections.append((f"end of the log of {server!r}", tail))
    return report
