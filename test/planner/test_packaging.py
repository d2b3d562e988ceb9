"""`pip install sglang-rfork[planner]` on a plain box."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_NBYTES = 100e6


@pytest.mark.long
@pytest.mark.timeout(600)
def test_the_planner_installs_small_and_runs_without_torch_or_sglang(tmp_path: Path) -> None:
    """A fresh environment, filled from the package index: this one takes a minute and a network."""
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "--quiet", f"{ROOT}[planner]"], check=True)
    subprocess.run([tmp_path / "venv" / "bin" / "rfork", "planner", "--show-policy"], check=True)
    code = "from importlib.util import find_spec as f; print([m for m in ('torch', 'sglang', 'numpy') if f(m)])"
    assert subprocess.check_output([python, "-c", code], text=True).strip() == "[]"
    nbytes = sum(path.stat().st_size for path in (tmp_path / "venv" / "lib").rglob("*") if path.is_file())
    assert nbytes < MAX_NBYTES, f"{nbytes / 1e6:.0f} MB"
