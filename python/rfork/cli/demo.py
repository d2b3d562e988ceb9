"""`rfork demo`: see a fork happen on this machine, in about two minutes."""

from __future__ import annotations

import enum
import signal
from pathlib import Path
from typing import Annotated

import msgspec
import typer

from rfork.cli import EXIT_USAGE
from rfork.demo.preflight import CannotStart, choose_device, require_packages
from rfork.demo.processes import Stopped, stopped_by_signals
from rfork.demo.screen import Screen
from rfork.demo.server import DemoFailed
from rfork.demo.story import Story

DEFAULT_SIZE_MB = 128
MIN_SIZE_MB = 16
_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Device(enum.StrEnum):
    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


def command(
    device: Annotated[
        Device, typer.Option(help="Where the servers run; auto takes a GPU if there is one.")
    ] = Device.AUTO,
    model: Annotated[
        Path | None,
        typer.Option(
            exists=True, file_okay=False, resolve_path=True, help="A checkpoint's folder, instead of one made."
        ),
    ] = None,
    size_mb: Annotated[
        int, typer.Option(min=MIN_SIZE_MB, help="Least size of the model that is made.")
    ] = DEFAULT_SIZE_MB,
    json_file: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Write all that was seen to this file.")
    ] = None,
    keep_logs: Annotated[
        Path | None,
        typer.Option(file_okay=False, resolve_path=True, help="Keep all logs here (default: only after a failure)."),
    ] = None,
) -> None:
    """Start four servers, each from another source, and prove that they hold the same weights.

    A and B are started by the same command: a planner has A read the disk and B fork from A. A is killed, C is told to
    fork from B, and D to fork from the dead A.

    Exit status: 0 all of that came true, 1 it did not, 2 it can't start (something is not installed).
    """
    screen = Screen()
    try:
        with stopped_by_signals(_STOPS):
            raise typer.Exit(_run(screen, device, model, size_mb * 1_000_000, json_file, keep_logs))
    except CannotStart as error:
        screen.say(str(error))
        raise typer.Exit(EXIT_USAGE) from error
    except Stopped as stop:
        screen.say(f"Stopped ({stop}); every server is gone.")
        raise typer.Exit(128 + stop.number) from stop


def _run(
    screen: Screen, device: Device, model: Path | None, nbytes: int, json_file: Path | None, keep_logs: Path | None
) -> int:
    _require_writable(json_file, keep_logs)
    versions = require_packages()
    chosen, num_gpus = choose_device(device.value)
    where = {0: "no GPU", 1: "one GPU"}.get(num_gpus, f"{num_gpus} GPUs")
    sglang = versions["sglang"]
    screen.say(f"R-Fork demo: four SGLang {sglang} servers and a planner on this machine ({where}).", "bold")
    story = Story(screen, chosen, num_gpus, versions, model, nbytes, keep_logs)
    try:
        with story:
            facts = story.tell()
    except DemoFailed as error:
        screen.failure(error, story.servers)
        return 1
    if json_file is not None:
        json_file.write_bytes(msgspec.json.format(msgspec.json.encode(facts), indent=1))
    screen.table(facts)
    screen.verdict(facts)
    if keep_logs is not None:
        screen.kept("logs", keep_logs)
    return 0 if facts.ok else 1


def _require_writable(json_file: Path | None, keep_logs: Path | None) -> None:
    """Raise CannotStart now rather than lose two minutes' work then."""
    try:
        if keep_logs is not None:
            keep_logs.mkdir(parents=True, exist_ok=True)
        if json_file is not None:
            json_file.touch()
    except OSError as error:
        raise CannotStart(f"can't write to {error.filename}: {error.strerror}") from error
