"""What must be here before the demo starts anything, and what to install where it is not."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

from rfork.errors import RForkError
from rfork.transports.mooncake_import import installed_wheels

CHILD_TIMEOUT_S = 120.0
EXTRAS = """Install one of these, whichever fits this machine:
  pip install 'sglang-rfork[cpu]' sglang-host-cpu     no GPU
  pip install 'sglang-rfork[cuda12]'                  CUDA 12
  pip install 'sglang-rfork[cuda13]'                  CUDA 13"""


class CannotStart(RForkError):
    """Something is not installed. Consequence: exit status 2, with what to install."""

    reason = "missing"


def require_packages() -> dict[str, str]:
    """Versions of what takes part. Raises CannotStart."""
    try:
        sglang = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        raise CannotStart(f"SGLang is not installed here ({sys.executable}).\n{EXTRAS}") from None
    wheels = installed_wheels()
    if not wheels:
        raise CannotStart(f"Mooncake, which moves the bytes, is not installed here ({sys.executable}).\n{EXTRAS}")
    problem = _run("from rfork.transports.mooncake_import import load_mooncake; load_mooncake()")
    if problem is not None:
        raise CannotStart(f"Mooncake does not load: {problem}")
    return {"sglang": sglang, **wheels}


def choose_device(wanted: str) -> tuple[str, int]:
    """`cpu` or `cuda`, and how many GPUs there are. `auto` takes cuda where torch sees one. Raises CannotStart."""
    num_gpus = 0 if wanted == "cpu" else _count_gpus()
    if wanted == "cuda" and not num_gpus:
        raise CannotStart("--device cuda: torch sees no GPU here. `rfork doctor` tells more; --device cpu needs none")
    if num_gpus:
        return "cuda", num_gpus
    platforms = importlib.metadata.entry_points(group="sglang.srt.platforms")
    if "host_cpu" not in platforms.names:
        raise CannotStart("There is no GPU here; without one SGLang needs a plugin:\n  pip install sglang-host-cpu")
    return "cpu", 0


def _count_gpus() -> int:
    if not any(Path("/dev").glob("nvidia[0-9]*")) and not Path("/dev/dxg").exists():
        return 0
    try:
        text = _output("import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)")
        return int(text.split()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError):
        return 0


def _output(code: str) -> str:
    # A child: importing these may take memory, a device, or (with a broken wheel) the whole process.
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=CHILD_TIMEOUT_S,
        check=True,
        env={**os.environ, "PYTHONWARNINGS": "ignore"},
    )
    return done.stdout


def _run(code: str) -> str | None:
    """None if a child runs `code`, else the last line that it had to say."""
    try:
        _output(code)
    except subprocess.CalledProcessError as error:
        lines = [line for line in error.stderr.splitlines() if line.strip()]
        return lines[-1] if lines else f"the process ended with status {error.returncode}"
    except subprocess.TimeoutExpired:
        return f"no result after {CHILD_TIMEOUT_S:g} s"
    return None
