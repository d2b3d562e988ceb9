"""`rfork watch`: what happens in the fleet, as it happens."""

from __future__ import annotations

import time

import msgspec
import typer

from rfork.cli import _planner
from rfork.errors import RForkError
from rfork.planner.client import PlannerUnavailable
from rfork.wire.planner import Event

WAIT_S = 20.0
RETRY_S = 1.0


def command(
    planner: str = _planner.PLANNER,
    kind: str = typer.Option("", help="Only events whose kind starts so, such as report_failed."),
    once: bool = typer.Option(False, "--once", help="Print what is remembered and exit."),
    as_json: bool = _planner.AS_JSON,
) -> None:
    """Follow events; with --json one object a line. Goes on when the planner restarts.

    Exit status: 1 the planner refuses, 2 wrong usage; with --once 0 printed, 1 also where none answers.
    """
    client = _planner.connect(planner)
    after, name = 0, ""
    while True:
        try:
            found = client.events(after, 0.0 if once else WAIT_S)
        except PlannerUnavailable as error:
            if once:
                _planner.fail(error)
            typer.echo(f"rfork: {error}", err=True)
            time.sleep(RETRY_S)
            continue
        except RForkError as error:
            _planner.fail(error)
        if name and found.planner != name:
            typer.echo("rfork: the planner restarted", err=True)
            after, name = 0, found.planner
            continue
        after, name = found.next, found.planner
        for event in found.events:
            if event.kind.startswith(kind):
                typer.echo(msgspec.json.encode(event).decode() if as_json else _line(event))
        if once:
            return


def _line(event: Event) -> str:
    """`12 s ago  report_failed  i-a <- i-b  unreachable`"""
    who = " <- ".join(part for part in (event.client, event.instance) if part)
    return _planner.clean(f"{_planner.seconds(event.age_s):>8} ago  {event.kind:<16} {who}  {event.text}").rstrip()
