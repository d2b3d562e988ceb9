"""Environments that are broken on purpose, and for real: what is missing is missing, what is wrong is on the path."""

import fnmatch
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Iterable, Mapping
from pathlib import Path

SITE = Path(sysconfig.get_path("purelib"))


WITHOUT_SGLANG = ("sglang", "sglang-*", "mooncake*", "torch*")
"""What `pip install sglang-rfork` alone does not bring."""


def python_without(folder: Path, patterns: Iterable[str] = WITHOUT_SGLANG) -> Path:
    """A virtual environment with all of this one's packages but those whose files match one of `patterns`."""
    venv.EnvBuilder(with_pip=False, symlinks=True).create(folder)
    python = folder / "bin" / "python"
    where = subprocess.run(
        [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        capture_output=True,
        text=True,
        check=True,
    )
    site = Path(where.stdout.strip())
    for entry in SITE.iterdir():
        hidden = any(fnmatch.fnmatch(entry.name, pattern) for pattern in patterns)
        if not hidden and not (site / entry.name).exists():
            (site / entry.name).symlink_to(entry)
    return python


def distribution(folder: Path, name: str, version: str) -> None:
    """What pip leaves of a package that is installed: its metadata."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def package(folder: Path, modules: Mapping[str, str]) -> None:
    """Source files, by path below `folder`."""
    for path, text in modules.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)


def first_on_path(folder: Path) -> str:
    """PYTHONPATH that puts `folder` before everything that is installed."""
    return os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")]))


def run_rfork(
    *args: str, python: Path | str = sys.executable, env: Mapping[str, str] | None = None, timeout_s: float = 280
):
    return subprocess.run(
        [python, "-m", "rfork.cli", *args],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
        env={**os.environ, **(env or {})},
    )
