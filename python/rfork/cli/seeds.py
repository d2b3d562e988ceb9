"""`rfork seeds`: the instances that a planner knows."""

from __future__ import annotations

import typer

from rfork.cli import _planner
from rfork.errors import RForkError
from rfork.wire.planner import InstanceView


def command(
    instance: str = typer.Argument("", help="Tell the story of this one instance."),
    planner: str = _planner.PLANNER,
    key: str = typer.Option("", help="Only instances whose key starts so."),
    state: str = typer.Option("", help="Only starting, serving, paused or draining ones."),
    identity: bool = typer.Option(False, "--identity", help="With its story: the identity behind its key, by fields."),
    as_json: bool = _planner.AS_JSON,
) -> None:
    """List instances, or tell one instance's story.

    Exit status: 0 shown, 1 the planner does not know it, refuses, or does not answer, 2 wrong usage.
    """
    client = _planner.connect(planner)
    try:
        if instance:
            story = client.story(instance)
            if as_json:
                _planner.print_json(story)
                return
            _planner.print_table(COLUMNS, [row(story.instance)])
            for line in story.story:
                typer.echo(_planner.clean(f"  {line}"))
            for name, value in sorted(story.identity.items()) if identity else ():
                typer.echo(_planner.clean(f"  {name} = {value}"))
            return
        found = client.instances(key=key, state=state)
    except RForkError as error:
        _planner.fail(error)
    if as_json:
        _planner.print_json(found)
        return
    offered = sum(view.offered for view in found.instances)
    _planner.print_table(COLUMNS, map(row, found.instances), f"{found.total} instances, {offered} offered")


COLUMNS = ("INSTANCE", "STATE", "GEN", "LEASES", "RANKS", "KEY", "MODEL", "FROM", "HEARTBEAT", "LISTENER", "")


def row(view: InstanceView) -> tuple[str, ...]:
    remarks = []
    if view.set_aside_s:
        remarks.append(f"set aside for {_planner.seconds(view.set_aside_s)}")
    if view.drain_asked:
        remarks.append("asked to drain")
    return (
        view.instance_id,
        view.state,
        str(view.generation),
        f"{view.num_leases}/{view.capacity}",
        f"{view.ranks_ready}/{view.ranks}",
        view.instance_key[:12],
        view.model,
        view.parent,
        f"{_planner.seconds(view.heartbeat_age_s)} ago",
        view.listener,
        ", ".join(remarks),
    )
