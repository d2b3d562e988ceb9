"""`rfork ticket`: let somebody look at a planner, for a while, without the key."""

from __future__ import annotations

import typer

from rfork.auth import MAX_VIEW_S, mint_view
from rfork.cli import _planner
from rfork.errors import ConfigError
from rfork.keys import keyring


def command(
    ttl: float = typer.Option(3600.0, "--ttl", min=1, max=MAX_VIEW_S, help="Seconds until it ends."),
    name: str = typer.Option("operator", help="Who it is for, as the ticket says."),
) -> None:
    """Print a ticket, from the key in RFORK_KEY_FILE or RFORK_KEY: it shows addresses and changes nothing.

    Exit status: 0 printed, 2 there is no key, or wrong usage.
    """
    try:
        found = _planner.settings()
        keys = keyring(found.key, found.key_file)
    except ConfigError as error:
        raise _planner.usage(str(error)) from None
    if keys is None:
        raise _planner.usage("there is no key to make a ticket of: set RFORK_KEY_FILE or RFORK_KEY")
    typer.echo(mint_view(keys, name, ttl_s=ttl))
