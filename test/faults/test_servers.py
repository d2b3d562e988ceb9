"""Real servers that are killed, frozen and cut off while an instance starts from them. `make faults` holds more."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
from support.drills import (
    ASKED,
    BOUNDS,
    CAPACITY,
    LOST,
    PLANNING,
    READING,
    SLOWLY,
    Drill,
    Ground,
    one_rank_frozen,
    percent,
)
from support.forking import ENV, fork_from, last_line, start_fork, start_seed, status, weights
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

CROWD = 3
"""Clients at once: eight in `make faults`, as many as two cores start in a test's time here."""

IN_CI = (
    Drill("seed frozen and woken", "50%"),
    Drill("client frozen", "50%"),
    Drill("silence", "/manifest"),
    Drill("nonsense", "/digests"),
    Drill("crowd", "once"),
    Drill("client killed", "50%"),
    Drill("seed killed", "0%"),
)
"""In this order few seeds are needed: only the last one does not survive."""


@pytest.fixture(scope="module")
def ground(module_fleet: Fleet, models: Models) -> Iterator[Ground]:
    with contextlib.closing(Ground(module_fleet, models, crowd=CROWD)) as ground:
        yield ground


@pytest.mark.parametrize("drill", IN_CI, ids=str)
def test_a_drill_ends_with_the_right_tokens_and_the_right_reason(drill: Drill, ground: Ground) -> None:
    ground.hold(drill)


@pytest.mark.long
@pytest.mark.parametrize("what", READING)
@pytest.mark.parametrize("when", ["0%", "99%"])
def test_the_other_moments_of_a_read(what: str, when: str, ground: Ground) -> None:
    ground.hold(Drill(what, when))


@pytest.mark.long
def test_eight_servers_that_start_at_once_all_fork(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ground, "crowd", CAPACITY)
    assert ground.hold(Drill("crowd", "once")) == "seed, 8 times"


@pytest.mark.long
@pytest.mark.parametrize("when", [ASKED, "50%"])
@pytest.mark.parametrize("what", PLANNING)
def test_a_planner_that_ends_costs_whoever_waits_for_it_time_and_nobody_else(
    what: str, when: str, ground: Ground
) -> None:
    ground.hold(Drill(what, when))


@pytest.mark.long
def test_an_entry_that_outlives_its_instance_leads_to_421_and_the_disk(ground: Ground) -> None:
    ground.hold(Drill("stale entry", "once"))


def test_another_instance_at_the_old_address_is_another_seed(ground: Ground, models: Models) -> None:
    """Killed and started again on the same ports while a client reads: the client is not told half of each."""
    seed = ground.seed()
    listen = status(seed)["listener"].rpartition(":")[2]
    client = ground._reading(seed, "50%")
    seed.kill()
    again = start_seed(ground.fleet, ground.path, env={"RFORK_LISTEN": f"127.0.0.1:{listen}"})
    client.wait_for("to end its start", lambda: last_line(client) is not None, 90)
    assert weights(client)["fallback_reason"] in LOST
    assert client.generate() == ground.right == again.generate()


@pytest.fixture
def fleet(module_fleet: Fleet) -> Iterator[Fleet]:
    with module_fleet.visited():
        yield module_fleet


def test_one_rank_of_two_that_fails_takes_the_other_along(fleet: Fleet, models: Models) -> None:
    """Both ranks fall back together: neither serves a shard of which the other has no counterpart."""
    flags = ("--tp", "2")
    seed = start_seed(fleet, models.path("llama"), *flags)
    right = seed.generate()
    with one_rank_frozen(seed, "TP1"):
        client = start_fork(fleet, models.path("llama"), seed.port, *flags, env=BOUNDS)
    ranks = status(client)["ranks"]
    assert [r["weights"]["source"] for r in ranks] == ["checkpoint", "checkpoint"], ranks
    assert weights(client)["fallback_reason"] in ("unreachable", "seed_lost"), ranks
    assert client.generate() == right


def test_a_seed_at_the_end_of_a_slow_link_is_not_too_slow(ground: Ground) -> None:
    """Progress is what is bounded, not the total: nine seconds of reading with time-outs of two."""
    client = ground.fleet.start(ground.path, *fork_from(ground.seed().port), env={**ENV, **BOUNDS, **SLOWLY})
    client.wait_for("to end its start", lambda: last_line(client) is not None, 90)
    assert weights(client)["source"] == "seed", weights(client)
    assert percent(client) == 100
    client.kill()
