"""Stops a real client at an exact share of its bytes, until a test lets it go on: no racing for the right moment.

SGLang loads this as one more general plugin of the client. It makes `$HALT_FOLDER/there` when the share has landed, and
goes on once `$HALT_FOLDER/go` exists. Share 0 is after the seed's first word and before any weight.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOLDER_ENV = "HALT_FOLDER"
SHARE_ENV = "HALT_SHARE"
PATIENCE_S = 120.0
POLL_S = 0.02


class Halt:
    """The test's side: `env` for the client, which is to run in a folder that has this plugin."""

    def __init__(self, fleet_folder: Path, share: float) -> None:
        from support.plugins import install_metadata  # a server has no such package

        shutil.copyfile(__file__, fleet_folder / "sglang_halt.py")
        install_metadata(fleet_folder, "sglang_halt", "0", "[sglang.srt.plugins]\nhalt = sglang_halt:register\n")
        self._folder = fleet_folder / "halt"
        self._folder.mkdir()
        self.env = {FOLDER_ENV: str(self._folder), SHARE_ENV: str(share)}

    def is_there(self) -> bool:
        return (self._folder / "there").exists()

    def go(self) -> None:
        (self._folder / "go").touch()


def register() -> None:
    """Entry point `sglang.srt.plugins: halt`."""
    if FOLDER_ENV not in os.environ:
        return
    from rfork.client.progress import ProgressBar

    folder, share = Path(os.environ[FOLDER_ENV]), float(os.environ[SHARE_ENV])
    landed = total = 0

    def halt() -> None:
        if landed < share * total or (folder / "there").exists():
            return
        (folder / "there").touch()
        deadline = time.monotonic() + PATIENCE_S
        while not (folder / "go").exists() and time.monotonic() < deadline:
            time.sleep(POLL_S)

    def on_total(original: Callable[..., None], bar: Any, nbytes: int) -> None:
        nonlocal total
        original(bar, nbytes)
        total = nbytes
        halt()

    def on_bytes(original: Callable[..., None], bar: Any, nbytes: int) -> None:
        nonlocal landed
        original(bar, nbytes)
        landed += nbytes
        halt()

    for wrapper in (on_total, on_bytes):
        original = getattr(ProgressBar, wrapper.__name__)
        setattr(ProgressBar, wrapper.__name__, lambda *a, w=wrapper, o=original: w(o, *a))
