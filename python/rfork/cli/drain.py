"""`rfork drain`: let an instance grant no more leases, and wait until nobody reads it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from http import HTTPStatus

import typer

from rfork.cli import _planner
from rfork.cli._instance import Instance
from rfork.errors import RForkError, SeedError, SeedUnreachable
from rfork.planner.client import PlannerClient, PlannerRefused
from rfork.wire.planner import InstanceState
from rfork.wire.seed import DRAIN_PATH

POLL_S = 0.5
CALL_S = 5.0


def command(
    instance: str = typer.Argument("", help="The instance to drain, by its id at the planner."),
    planner: str = typer.Option(
        "",
        "--planner",
        envvar="RFORK_PLANNER_URL",
        callback=_planner.no_secret_in_argv,
        help="The planner's address.",
    ),
    local: str = typer.Option(
        "",
        "--local",
        help="Drain the instance that serves at this address (http://127.0.0.1:30000), with or without a planner: for "
        "preStop hooks. SGLang answers at an instance's first node; at a further one name rfork's own listener.",
    ),
    wait: float = typer.Option(
        0.0, "--wait", min=0, help="Wait so many seconds until it drains and its leases have ended."
    ),
) -> None:
    """Let an instance grant no more leases; it serves on. Through the planner it hears of it with its next heartbeat.

    Exit status: 0 it was asked to (with --wait: it drains and nobody reads it, or it is gone), 1 not, 2 wrong usage.
    """
    if local:
        _drain_local(local, wait)
        return
    if not instance:
        raise _planner.usage("name an instance, or its server with --local http://127.0.0.1:30000")
    if not planner:
        raise _planner.usage("drain needs the planner's address: --planner http://host:port or RFORK_PLANNER_URL")
    client = _planner.connect(planner)
    try:
        asked_s = time.monotonic()
        client.drain(instance)
        typer.echo(f"{instance} is asked to drain: it hears of it with its next heartbeat")
        left = _wait(lambda: _left_at_planner(client, instance, asked_s), wait)
    except RForkError as error:
        _planner.fail(error)
    _verdict(instance, left, wait)


def _left_at_planner(client: PlannerClient, instance: str, asked_s: float) -> str:
    """What it still has to do, as it said itself in its last heartbeat; empty where that is nothing."""
    try:
        state = client.story(instance).instance.state
    except PlannerRefused as refusal:
        if refusal.status != HTTPStatus.NOT_FOUND:
            raise
        if client.overview().uptime_s < time.monotonic() - asked_s:
            return "may never hear of it: the planner has restarted"
        typer.echo(f"{instance} is gone from the planner")
        return ""
    if state != InstanceState.DRAINING.value:
        return f"has not said that it drains (it is {state})"
    return _readers(sum(line.seed == instance for line in client.leases().leases))


def _readers(count: int) -> str:
    return f"still has {count} readers" if count else ""


def _drain_local(address: str, wait_s: float) -> None:
    """Ask the instance itself, all its nodes: they stop granting, and the first tells the planner with its next
    heartbeat, at once.
    """
    instance = Instance(address)
    try:
        status = instance.status()
        if status.listener is None:
            typer.echo(f"{status.instance_id} is no seed ({status.state})")
            return
        listeners = (status.listener, *status.nodes)
        asked = _ask_to_drain(instance, status.instance_id, listeners)
        typer.echo(f"{status.instance_id} drains")
        left = _wait(lambda: _readers(_num_readers(instance, status.instance_id, asked)), wait_s)
    except SeedUnreachable as error:
        _planner.fail(SeedUnreachable(f"no R-Fork instance answers at {address}: {error}"))
    except RForkError as error:
        _planner.fail(error)
    _verdict(status.instance_id, left, wait_s)
    if len(asked) < len(listeners):
        raise typer.Exit(_planner.EXIT_NO)


def _ask_to_drain(instance: Instance, instance_id: str, listeners: Sequence[str]) -> list[str]:
    """Ask every node, and return those that answered: nobody waits for readers of the others. Raises SeedError where
    the first, the one that was named, does not.
    """
    asked: list[str] = []
    for listener in listeners:
        try:
            instance.post(DRAIN_PATH, instance_id, listener, timeout_s=CALL_S)
        except SeedError as error:
            if not asked:
                raise
            typer.echo(_planner.clean(f"rfork: a node was not asked: {error}"), err=True)
        else:
            asked.append(listener)
    return asked


def _num_readers(instance: Instance, instance_id: str, listeners: Sequence[str]) -> int:
    """Clients that read from any of its nodes, each once. Where another instance answers, or nobody, ours is gone, and
    its readers with it.
    """
    readers, nameless = set[str](), 0
    for listener in listeners:
        try:
            seen = instance.status(listener)
        except SeedUnreachable:
            continue
        if seen.instance_id == instance_id:
            readers.update(seen.readers)
            nameless = max(nameless, seen.num_readers)  # an older instance counts them and names none
    return max(len(readers), nameless)


def _wait(left_now: Callable[[], str], wait_s: float) -> str:
    """What is left to do after at most `wait_s`; empty at once where nobody waits for it."""
    deadline = time.monotonic() + wait_s
    while wait_s:
        left = left_now()
        if not left or time.monotonic() >= deadline:
            return left
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
    return ""


def _verdict(instance: str, left: str, wait_s: float) -> None:
    if left:
        typer.echo(f"rfork: {instance} {left} after {wait_s:g} s", err=True)
        raise typer.Exit(_planner.EXIT_NO)
