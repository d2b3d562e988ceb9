"""What the planner's verbs share: reaching one, printing tables or JSON, and saying no in one line."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence
from typing import NoReturn

import msgspec
import typer

from rfork.client.sources import signer_of, tls_of
from rfork.config import Config, load_config
from rfork.errors import ConfigError, RForkError
from rfork.planner.client import PlannerClient
from rfork.planner.policy import Policy

EXIT_NO, EXIT_USAGE = 1, 2
VARIABLES = ("RFORK_KEY", "RFORK_KEY_FILE", "RFORK_CA_FILE", "RFORK_TLS_SERVER_NAME")
"""What the verbs read from the environment; a planner's own variables are no settings of an instance."""


def no_secret_in_argv(context: typer.Context, option: typer.CallbackParam, text: str) -> str:
    """For options with addresses: a password comes from the environment, which other users can't read."""
    source = context.get_parameter_source(option.name or "")
    if "@" in text and source is not None and source.name == "COMMANDLINE":
        raise usage(
            f"{option.opts[0]} carries a secret, which every user of the host can read in the process list; "
            f"expected it in {option.envvar}"
        )
    return text


PLANNER = typer.Option(
    ...,
    "--planner",
    envvar="RFORK_PLANNER_URL",
    callback=no_secret_in_argv,
    help="The planner's address, http://host:port, or several with commas between them.",
)
AS_JSON = typer.Option(False, "--json", help="Print JSON for programs.")


def settings() -> Config:
    """What a verb takes from the environment: the fleet key and how certificates are checked. Raises ConfigError."""
    return load_config(None, {name: text for name, text in os.environ.items() if name in VARIABLES})


def connect(url: str) -> PlannerClient:
    try:
        found = settings()
        return PlannerClient(url, tls=tls_of(found), signer=signer_of(found, "operator"))
    except ConfigError as error:
        raise usage(str(error)) from None


def usage(message: str) -> typer.Exit:
    """Say in one line what is wrong with the call; raise the result."""
    typer.echo(f"rfork: {message}", err=True)
    return typer.Exit(EXIT_USAGE)


def fail(error: RForkError) -> NoReturn:
    """The planner says no, or none answers."""
    typer.echo(f"rfork: {error}", err=True)
    raise typer.Exit(EXIT_NO) from None


def parse_policy(text: str, interval_s: float) -> Policy:
    """Knobs from JSON over the defaults; `interval_s`, the JSON's if it has one, sets what depends on it.

    A claim and a reservation must outlast heartbeats, and not only these: they get longer with them, never shorter.
    """
    default = Policy()
    try:
        named = msgspec.json.decode(text)
        if not isinstance(named, dict):
            raise ValueError("a JSON object is expected")
        interval_s = msgspec.convert(named.get("interval_s", interval_s), float)
        share = interval_s / default.interval_s
        given = {
            "interval_s": interval_s,
            "ttl_s": default.ttl_s * share,
            "settle_s": default.settle_s * share,
            "assignment_ttl_s": default.assignment_ttl_s * max(share, 1.0),
            "claim_ttl_s": default.claim_ttl_s * max(share, 1.0),
        }
        return msgspec.convert({**given, **named}, Policy)
    except (msgspec.MsgspecError, ValueError) as error:
        raise usage(f"--policy: {error}") from None


def print_json(body: object) -> None:
    typer.echo(msgspec.json.format(msgspec.json.encode(body)).decode())


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str]], footer: str = "") -> None:
    """Print a table with rich; text of others is stripped of control characters and never read as markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(Text(clean(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else 200)
    console.print(table)
    if footer:
        console.print(Text(footer, style="dim"))


def clean(text: str) -> str:
    """Without control characters: registrations are hostile text, also to a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def seconds(value: float) -> str:
    """`0.4 s`, `12 s`, `3 min`, `5 h`."""
    if value < 10:
        return f"{value:.1f} s"
    if value < 120:
        return f"{value:.0f} s"
    return f"{value / 60:.0f} min" if value < 7200 else f"{value / 3600:.0f} h"
