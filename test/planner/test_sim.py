"""The planner's own core in a simulated fleet: how many rounds until all are ready (bench/sim.py)."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

PATH = Path(__file__).parents[2] / "bench" / "sim.py"


@pytest.fixture(scope="module")
def sim():
    spec = importlib.util.spec_from_file_location("rfork_bench_sim", PATH)
    module = importlib.util.module_from_spec(spec)
    sys.modules["rfork_bench_sim"] = module
    spec.loader.exec_module(module)
    return module


def fleet(sim, num, policy, **faults):
    return sim.Fleet(num, policy, round_s=10.0, capacity=4, faults=sim.Faults(**faults), seed=1)


def test_the_tree_is_within_a_quarter_of_the_ideal_for_1024_instances(sim):
    assert fleet(sim, 1024, "tree").run() <= 1.25 * sim.ideal(1024)


def test_one_seed_alone_takes_as_many_rounds_as_there_are_instances(sim):
    assert fleet(sim, 16, "star").run() == pytest.approx(16, abs=0.5)
    assert fleet(sim, 16, "serial").run() == pytest.approx(16, abs=0.5)


@pytest.mark.parametrize("seed", range(3))
def test_everybody_gets_ready_though_seeds_crash_readers_are_slow_and_the_planner_restarts(sim, seed):
    faults = sim.Faults(crash=0.05, slow=0.05, slowness=5.0, planner_restarts=(0.5, 2.5, 5.5))
    shaken = sim.Fleet(128, "tree", round_s=10.0, capacity=4, faults=faults, seed=seed)
    assert shaken.run() < 4 * sim.ideal(128)
    assert shaken.disk_reads <= 3


@pytest.mark.parametrize("restarts", [(0.1,), (0.1, 0.4, 0.7)], ids=["once", "three times"])
def test_a_planner_that_restarts_while_the_disk_is_read_sends_nobody_else_there(sim, restarts):
    faults = sim.Faults(planner_restarts=restarts)
    shaken = sim.Fleet(64, "tree", round_s=60.0, capacity=4, faults=faults, seed=1)
    assert shaken.run() <= 1.25 * sim.ideal(64)
    assert shaken.disk_reads == 1
