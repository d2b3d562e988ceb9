"""`rfork drain`: let an instance grant no more leases, and wait until nobody reads it."""

from __future__ import annotations

import time
from collections.abc import Callable

import typer

from rfork.cli import _planner
from rfork.cli._instance import Instance
from rfork.errors import RForkError, SeedUnreachable

POLL_S = 0.5
CALL_S = 5.0


def command(
    instance: str = typer.Argument("", help="The instance to drain, by its id at the planner."),
    planner: str = typer.Option("", "--planner", envvar="RFORK_PLANNER_URL", help="The planner's address."),
    local: str = typer.Option(
        "",
        "--local",
        help="Drain the instance that serves at this address (http://127.0.0.1:30000), with or without a planner: for "
        "preStop hooks.",
    ),
    wait: float = typer.Option(0.0, "--wait", min=0, help="Wait so many seconds for its leases to end."),
) -> None:
    """Drain an instance. Exits 0 once it is draining (and, with --wait, nobody reads it), else 1."""
    if local:
        _drain_local(local, wait)
        return
    if not instance:
        raise _planner.usage("name an instance, or its server with --local http://127.0.0.1:30000")
    if not planner:
        raise _planner.usage("drain needs the planner's address: --planner http://host:port or RFORK_PLANNER_URL")
    client = _planner.connect(planner)
    try:
        client.drain(instance)
        typer.echo(f"{instance} is asked to drain")
        left = _wait(lambda: sum(line.seed == instance for line in client.leases().leases), wait)
    except RForkError as error:
        _planner.fail(error)
    _verdict(instance, left, wait)


def _drain_local(address: str, wait_s: float) -> None:
    """Ask the instance itself: it stops granting, and tells the planner with its next heartbeat, at once."""
    instance = Instance(address)
    try:
        status = instance.status()
        if status.listener is None:
            typer.echo(f"{status.instance_id} is no seed ({status.state})")
            return
        instance.post("/rfork/v1/drain", status.instance_id, status.listener, timeout_s=CALL_S)
        typer.echo(f"{status.instance_id} drains")
        left = _wait(lambda: instance.status().num_readers, wait_s)
    except SeedUnreachable as error:
        _planner.fail(SeedUnreachable(f"no R-Fork instance answers at {address}: {error}"))
    except RForkError as error:
        _planner.fail(error)
    _verdict(status.instance_id, left, wait_s)


def _wait(num_readers: Callable[[], int], wait_s: float) -> int:
    """Readers left after at most `wait_s`; 0 at once where nobody waits for them."""
    deadline = time.monotonic() + wait_s
    while wait_s:
        left = num_readers()
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
    return 0


def _verdict(instance: str, left: int, wait_s: float) -> None:
    if left:
        typer.echo(f"rfork: {instance} still has {left} readers after {wait_s:g} s", err=True)
        raise typer.Exit(_planner.EXIT_NO)
