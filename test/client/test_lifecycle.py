"""The life of a pull, and the machine that it shares with seeds and leases."""

from __future__ import annotations

import enum

import pytest

from rfork.client.lifecycle import PULL, PullEvent, PullState, new_pull
from rfork.errors import IllegalTransition
from rfork.machine import MAX_HISTORY, Machine, Table, check_table, draw

HAPPY = [PullEvent.LEASED, PullEvent.PAIRED, PullEvent.CONNECTED, PullEvent.ALL_READ, PullEvent.SETTLED]


def test_a_pull_that_goes_well_ends_loaded() -> None:
    life = new_pull("target")
    states = [life.apply(event, now=at) for at, event in enumerate(HAPPY)]
    assert states == [
        PullState.MATCHING,
        PullState.CONNECTING,
        PullState.READING,
        PullState.SETTLING,
        PullState.LOADED,
    ]
    assert life.is_terminal


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3, 4])
def test_a_seed_may_fail_at_any_step_and_the_next_one_is_sought(num_steps: int) -> None:
    life = new_pull("target")
    for event in HAPPY[:num_steps]:
        life.apply(event, now=0)
    assert life.apply(PullEvent.SEED_FAILED, now=1, note="lost") is PullState.SEEKING


@pytest.mark.parametrize("state", [s for s, row in PULL.items() if row])
def test_every_state_that_is_not_final_can_be_ended_at_once(state: PullState) -> None:
    assert PULL[state][PullEvent.FORBIDDEN] is PullState.REFUSED


def test_the_fallback_is_only_taken_between_seeds() -> None:
    """While a seed is read, its engine has to be destroyed first."""
    assert [s for s, row in PULL.items() if PullEvent.GAVE_UP in row] == [PullState.SEEKING]


def test_an_illegal_event_changes_nothing_and_tells_the_story() -> None:
    life = new_pull("tp0of2")
    life.apply(PullEvent.LEASED, now=1.5, note="seed i-7")
    with pytest.raises(IllegalTransition) as caught:
        life.apply(PullEvent.SETTLED, now=2)
    assert life.state is PullState.MATCHING
    assert str(caught.value) == (
        "pull tp0of2: SETTLED is not allowed in MATCHING (allowed: PAIRED, SEED_FAILED, FORBIDDEN)\n"
        "  1.500 s SEEKING --LEASED--> MATCHING (seed i-7)"
    )


def test_the_story_is_bounded() -> None:
    life = new_pull("target")
    for at in range(3 * MAX_HISTORY):
        life.apply(PullEvent.SEED_FAILED, now=at)
    assert len(life.history) == MAX_HISTORY
    assert life.history[-1].at_s == 3 * MAX_HISTORY - 1


class Door(enum.Enum):
    OPEN = "open"
    SHUT = "shut"


class Knock(enum.Enum):
    PUSH = "push"


def test_a_table_that_forgets_a_state_is_refused() -> None:
    with pytest.raises(ValueError, match="no row for SHUT"):
        Machine("door", {Door.OPEN: {Knock.PUSH: Door.SHUT}}, Door.OPEN)


def test_a_state_that_nothing_leads_to_is_refused() -> None:
    table: Table[Door, Knock] = {Door.OPEN: {}, Door.SHUT: {Knock.PUSH: Door.OPEN}}
    with pytest.raises(ValueError, match="no event leads from OPEN to SHUT"):
        check_table(table, Door.OPEN)


def test_the_drawing_comes_from_the_table() -> None:
    table: Table[Door, Knock] = {Door.OPEN: {Knock.PUSH: Door.SHUT}, Door.SHUT: {}}
    assert draw(table) == "stateDiagram-v2\n    OPEN --> SHUT: push\n    SHUT --> [*]"
