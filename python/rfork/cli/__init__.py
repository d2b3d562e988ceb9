"""The `rfork` command: one file per verb, imported only when that verb runs.

To add a verb, write `cli/<verb>.py` with a function `command(...)` whose parameters are Typer's and whose docstring is
its help, exit statuses included, and give it a line in `VERBS`. `rfork --help` imports no verb, so it answers at once
and works whatever is installed.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import typer

import rfork

EXIT_USAGE = 2


@dataclass(frozen=True)
class Verb:
    """What is known of a verb before its module is imported."""

    help: str
    """Its line in the list; `rfork <verb> --help` shows the docstring of its function."""

    extra: str | None = None
    """The extra of this distribution that has the packages which the verb's module imports."""


VERBS: dict[str, Verb] = {
    "demo": Verb("See a fork happen: four servers on this machine, each with the same weights from another source."),
    "doctor": Verb("Check this environment for all that a fork needs, and say what to do about what is missing."),
    "check": Verb("Say whether a server with these arguments could fork from a running one, and what differs if not."),
    "planner": Verb("Run the planner: it tells new instances whom to fork from.", extra="planner"),
    "seeds": Verb("List the instances that a planner knows."),
    "leases": Verb("List who reads from whom."),
    "drain": Verb("Ask an instance to grant no more leases, and wait until nobody reads."),
    "watch": Verb("Follow what happens at a planner."),
    "audit": Verb("Digest a running instance's weights again, and compare them with what it published."),
    "ticket": Verb("Mint a ticket with which the dashboard of a fleet with a key can be looked at."),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 1 the verb says no, 2 it could not start (usage, missing extra)."""
    args = list(sys.argv[1:] if argv is None else argv)
    named = next((arg for arg in args if not arg.startswith("-")), None)
    build({named} if named in VERBS else ())(args=args, prog_name="rfork")


def build(load: Sequence[str] | set[str] | None = None) -> typer.Typer:
    """Return the command line with the verbs in `load` imported (all of them for None) and the others as names."""
    app = typer.Typer(
        help="Fork SGLang instances from running ones, and look after the fleet that does.",
        add_completion=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for name, verb in VERBS.items():
        body = _load(name, verb) if load is None or name in load else _unloaded
        app.command(name, short_help=verb.help)(body)
    return app


def _root(
    context: typer.Context,
    version: bool = typer.Option(False, "--version", help="Print the version and exit."),
) -> None:
    if version:
        typer.echo(rfork.__version__)
    elif context.invoked_subcommand is None:
        typer.echo(context.get_help())


def _unloaded() -> None:
    """Stand in for a verb that this call does not run."""


def _load(name: str, verb: Verb) -> Callable[..., Any]:
    try:
        command: Callable[..., Any] = importlib.import_module(f"{__name__}.{name}").command
    except ModuleNotFoundError as error:
        missing = (error.name or "").partition(".")[0]
        if verb.extra is None or missing == "rfork":
            raise
        typer.echo(
            f"rfork {name} needs the package {missing!r}, which is not installed.\n"
            f"Install it with:  pip install 'sglang-rfork[{verb.extra}]'",
            err=True,
        )
        raise SystemExit(EXIT_USAGE) from error
    return command
