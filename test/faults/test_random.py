"""Random faults, several at a time: reproducible by their number, and never wrong weights. `make faults` plays more."""

from __future__ import annotations

import threading
from contextlib import ExitStack

import pytest
from support.chaos import Stage
from support.dice import Case, Table
from support.leaks import nothing_left
from support.seed_node import until

from rfork.clock import SystemClock

NUM_CASES, NUM_PARTS = 200, 2
FIRST = 1_000_000
WHY = ("fence", "paused", "stale_generation", "not_ready", "unreachable")
"""What a client may hear of a seed whose weights change, depending on when it asks; the last one seldom."""


@pytest.mark.parametrize("part", range(NUM_PARTS))
def test_random_faults_never_end_in_wrong_weights(part: int) -> None:
    each = NUM_CASES // NUM_PARTS
    with ExitStack() as stack:
        table = Table(stack)
        stack.enter_context(nothing_left(table.stage.fabric))
        for number in range(FIRST + part * each, FIRST + (part + 1) * each):
            table.play(number)
    assert table.tally["seed"] > each // 10, "most of these seeds could have been used"
    assert sum(table.tally.values()) == each


def test_a_case_is_its_number() -> None:
    assert [Case.roll(n) for n in range(50)] == [Case.roll(n) for n in range(50)]


def test_a_seed_that_never_rests() -> None:
    """Its weights change again and again, in a thread of their own: what is read is all old, or not taken."""
    with ExitStack() as stack:
        stage = Stage(stack, num_seeds=1)
        stop = threading.Event()

        def reload() -> None:
            weights = [w for w in stage.models[0].layers if w.numel()]
            kept = [w.clone() for w in weights]
            number = 0
            while not stop.wait(0.003 * (number % 5)):
                number += 1
                with stage.agent.changing("a reload", alters=False):
                    for weight in weights:
                        weight.fill_(number % 256)
                    stop.wait(0.002)
                    for weight, old in zip(weights, kept, strict=True):
                        weight.copy_(old)

        thread = threading.Thread(target=reload)
        thread.start()
        try:
            endings = [stage.load(clock=SystemClock(), seek_timeout_s=0.9) for _ in range(40)]
        finally:
            stop.set()
            thread.join()
        until(lambda: stage.seeds[0].node.state.value == "serving")
        for ending in endings:
            assert ending.model is not None
            assert ending.model.image() == stage.right, ending
            assert ending.source == "seed" or ending.reason in WHY, ending
        assert sum(ending.reason == "unreachable" for ending in endings) < len(endings) // 4
