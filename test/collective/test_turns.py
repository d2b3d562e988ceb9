"""A broadcast beside a spinning scheduler asks for shorter turns while it lasts."""

import sys

from rfork.seed.turns import QUICK_S, quick_turns


def test_turns_are_quick_inside_and_as_before_afterwards() -> None:
    before_s = sys.getswitchinterval()
    with quick_turns():
        with quick_turns():
            assert abs(sys.getswitchinterval() - QUICK_S) < 1e-5
        assert abs(sys.getswitchinterval() - QUICK_S) < 1e-5
    assert sys.getswitchinterval() == before_s
