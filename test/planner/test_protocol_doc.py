"""docs/protocol.md names a test for each rule: those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
PROTOCOL = (HERE.parents[1] / "docs" / "protocol.md").read_text()
NAMED = re.compile(r"`(test_\w+)`")


def test_every_test_that_the_protocol_names_exists():
    named = set(NAMED.findall(PROTOCOL))
    written = {
        name for file in HERE.parent.glob("*/test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert named <= written, named - written


def test_every_rule_names_a_test():
    """A rule begins with its number and goes on, indented, until another or a heading."""
    rules = dict(re.findall(r"(?m)^(\d+)\. (.*(?:\n +.*)*)", PROTOCOL))
    assert list(rules) == [str(number) for number in range(1, len(rules) + 1)]
    assert len(rules) > 30
    assert [number for number, rule in rules.items() if not NAMED.search(rule)] == []
