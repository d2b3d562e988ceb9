"""docs/protocol.md names a test for each rule: those tests exist."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_that_the_protocol_names_exists():
    named = set(re.findall(r"`(test_\w+)`", (HERE.parents[1] / "docs" / "protocol.md").read_text()))
    written = {
        name for file in HERE.parent.glob("*/test_*.py") for name in re.findall(r"def (test_\w+)", file.read_text())
    }
    assert len(named) > 30
    assert named <= written, named - written
