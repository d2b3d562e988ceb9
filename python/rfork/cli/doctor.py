"""`rfork doctor`: a checklist of this environment, and what to do."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Annotated

import msgspec
import typer
from rich.console import Console
from rich.markup import escape

from rfork.doctor.checkup import check_all
from rfork.doctor.finding import Finding, Level

_SIGNS = {Level.OK: "[green]✓[/green]", Level.WARN: "[yellow]![/yellow]", Level.FAIL: "[red]✗[/red]"}
_PLAIN_WIDTH = 120
_SUBJECT_WIDTH = 13


def command(
    rfork_config: Annotated[
        list[str] | None,
        typer.Option("--rfork-config", metavar="JSON|FILE", help="What the server is given, to check with it."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print all findings as JSON instead.")] = False,
) -> None:
    """Look at this environment for all that a fork needs, and say what to do about what is missing.

    Exit status: 0 fine or warnings only, 1 a failure, 2 wrong usage.
    """
    if rfork_config and len(rfork_config) > 1:
        typer.echo(
            "rfork: --rfork-config is given twice; expected one JSON object or file, as the server does", err=True
        )
        raise typer.Exit(2)
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _PLAIN_WIDTH)
    found: list[Finding] = []
    status = contextlib.nullcontext() if as_json else console.status("looking: SGLang's own imports take a while …")
    try:
        with status:
            for finding in check_all(rfork_config[0] if rfork_config else None):
                found.append(finding)
                if not as_json:
                    _show(console, finding)
    except KeyboardInterrupt:
        os._exit(128 + signal.SIGINT)  # without waiting for the probes, which end with us
    counts = {level: sum(f.level is level for f in found) for level in Level}
    is_ok = counts[Level.FAIL] == 0
    if as_json:
        typer.echo(msgspec.json.format(msgspec.json.encode({"ok": is_ok, "findings": found}), indent=1).decode())
    else:
        _conclude(console, counts)
    raise typer.Exit(0 if is_ok else 1)


def _show(console: Console, finding: Finding) -> None:
    console.print(
        f"{_SIGNS[finding.level]} {escape(finding.subject):<{_SUBJECT_WIDTH}} {escape(finding.text)}", soft_wrap=True
    )
    if finding.remedy:
        console.print(f"  {'':<{_SUBJECT_WIDTH}} → {escape(finding.remedy)}", soft_wrap=True)


def _conclude(console: Console, counts: dict[Level, int]) -> None:
    console.print()
    warnings = f"{counts[Level.WARN]} warning{'s' if counts[Level.WARN] != 1 else ''}"
    if counts[Level.FAIL]:
        failures = f"{counts[Level.FAIL]} failure{'s' if counts[Level.FAIL] != 1 else ''}"
        console.print(
            f"{failures}, {warnings}: forks won't work here until the lines with ✗ are dealt with.", style="bold red"
        )
    else:
        console.print(f"Ready to fork and to seed ({warnings}).", style="bold green")
