"""Memory is bounded whatever strangers send; what comes beyond the bounds is told to go on without the planner."""

from __future__ import annotations

import pytest

from rfork.planner.lifecycle import PlannerFull
from rfork.planner.policy import Policy
from rfork.wire.planner import FallBack, ReadDisk


def test_instances_beyond_the_bound_are_refused_and_the_others_live_on(build):
    planner = build.Driver(max_instances=2)
    planner.beat("i-1")
    planner.beat("i-2")
    with pytest.raises(PlannerFull, match="2 instances"):
        planner.beat("i-3")
    planner.beat("i-1", generation=2)
    assert sorted(planner.state.instances) == ["i-1", "i-2"]


def test_keys_beyond_the_bound_are_refused(build):
    planner = build.Driver(max_keys=1)
    planner.beat("i-1")
    with pytest.raises(PlannerFull, match="1 instance keys"):
        planner.beat("i-2", instance_key=build.OTHER_KEY)
    answer = planner.ask(instance_key=build.OTHER_KEY)
    assert isinstance(answer, FallBack)
    assert answer.reason == "planner_full"


def test_waiting_clients_beyond_the_bound_fall_back_at_once(build):
    planner = build.Driver(max_waiting=1)
    planner.beat("i-disk", state="starting")
    assert isinstance(planner.ask("i-disk"), ReadDisk)
    assert planner.ask("i-1") is None
    assert planner.ask("i-2").reason == "planner_full"


def test_reports_of_made_up_clients_fill_nothing(build):
    planner = build.Driver(max_waiting=3)
    planner.beat()
    for n in range(20):
        planner.report("failed", f"i-made-up-{n}", reason="unreachable")
    assert len(planner.state.instances["i-seed"].strikes) == 3


@pytest.mark.parametrize(
    "knobs",
    [
        {"ttl_s": 10.0},
        {"claim_ttl_s": 19.0},
        {"interval_s": 0.0},
        {"interval_s": float("nan")},
        {"wait_bound_s": -1.0},
        {"bound_jitter": 1.0},
        {"disk_claims": 0},
        {"candidates": 0},
    ],
    ids=str,
)
def test_a_policy_that_contradicts_itself_is_refused_at_birth(knobs):
    with pytest.raises(ValueError, match=next(iter(knobs))):
        Policy(**knobs)
