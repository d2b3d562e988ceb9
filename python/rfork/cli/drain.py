"""`rfork drain`: let an instance grant no more leases, and wait until nobody reads it."""

from __future__ import annotations

import time

import httpx
import msgspec
import typer

from rfork.cli import _planner
from rfork.errors import RForkError
from rfork.planner.client import PlannerClient
from rfork.wire.seed import StatusReply

POLL_S = 0.5


def command(
    instance: str = typer.Argument("", help="The instance to drain."),
    planner: str = typer.Option("", "--planner", envvar="RFORK_PLANNER_URL", help="The planner's address."),
    local: str = typer.Option(
        "",
        "--local",
        help="Drain the instance that serves at this address (http://127.0.0.1:30000): for preStop hooks.",
    ),
    wait: float = typer.Option(0.0, "--wait", min=0, help="Wait so many seconds for its leases to end."),
) -> None:
    """Drain an instance. Exits 0 once it is draining (and, with --wait, nobody reads it), else 1."""
    if not instance and not local:
        raise _planner.usage("name an instance, or its server with --local http://127.0.0.1:30000")
    if not planner:
        raise _planner.usage("drain needs the planner's address: --planner http://host:port or RFORK_PLANNER_URL")
    client = _planner.connect(planner)
    instance = instance or _instance_at(local)
    try:
        client.drain(instance)
        typer.echo(f"{instance} is asked to drain")
        left = _wait(client, instance, wait)
    except RForkError as error:
        _planner.fail(error)
    if left:
        typer.echo(f"rfork: {instance} still has {left} leases after {wait:g} s", err=True)
        raise typer.Exit(_planner.EXIT_NO)


def _wait(client: PlannerClient, instance: str, wait_s: float) -> int:
    """Leases left after at most `wait_s`."""
    deadline = time.monotonic() + wait_s
    while True:
        left = sum(line.seed == instance for line in client.leases().leases)
        if not left or time.monotonic() >= deadline or not wait_s:
            return left if wait_s else 0
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))


def _instance_at(address: str) -> str:
    try:
        reply = httpx.get(address.rstrip("/") + "/rfork/v1/status", timeout=5.0, trust_env=False)
        reply.raise_for_status()
        return msgspec.json.decode(reply.content, type=StatusReply).instance_id
    except (httpx.HTTPError, httpx.InvalidURL, msgspec.MsgspecError) as error:
        typer.echo(f"rfork: no R-Fork instance answers at {address}: {error}", err=True)
        raise typer.Exit(_planner.EXIT_NO) from None
