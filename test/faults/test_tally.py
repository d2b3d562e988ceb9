"""The tally of `make faults`: of what was played, on whatever day."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "faults.py"


def test_runs_add_up_and_go_on_where_the_last_one_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tool: dict[str, Any] = runpy.run_path(str(TOOL))
    log = tmp_path / "log.jsonl"
    tool["main"].__globals__["LOG"] = log
    good = {"endings": {"seed": 2}, "faults": 5, "wrong": []}
    bad = {"endings": {"seed": 1}, "faults": 5, "wrong": ["case 3: wrong weights"]}
    assert tool["run"]("in-process", lambda first, count: good, 0, 2, 1) == 0
    assert tool["next_case"]("in-process") == 2
    assert tool["run"]("in-process", lambda first, count: bad, 2, 2, 1) == 1
    capsys.readouterr()
    assert tool["tally"]() == 0
    assert "in-process: 4 starts with 10 faults in 2 runs, 1 ended wrong" in capsys.readouterr().out
