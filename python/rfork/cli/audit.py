"""`rfork audit`: are the weights that an instance serves still the ones that it published?"""

from __future__ import annotations

import typer

from rfork.cli import _planner
from rfork.cli._instance import MAX_REPLY_NBYTES, Instance
from rfork.client.calls import parse_json
from rfork.errors import RForkError, SeedRefused
from rfork.wire.seed import AUDIT_PATH, AuditReply

COLUMNS = ("SHARD", "RANK", "GEN", "VERDICT", "BYTES", "CHUNKS", "")


def command(
    address: str = typer.Argument(..., help="The instance's server, http://host:30000."),
    timeout: float = typer.Option(600.0, "--timeout", min=1, help="Seconds to wait for each of its nodes."),
    as_json: bool = _planner.AS_JSON,
) -> None:
    """Digest an instance's weights again, where they are, and compare them with what it published.

    Exit status: 0 all are equal, 1 some are not or it can't be asked, 2 wrong usage.
    """
    instance = Instance(address)
    try:
        replies = _audit(instance, timeout)
    except RForkError as error:
        _planner.fail(error)
    if as_json:
        _planner.print_json(replies)
    else:
        _show(replies)
    if any(shard.verdict != "equal" for reply in replies for shard in reply.shards):
        raise typer.Exit(_planner.EXIT_NO)


def _audit(instance: Instance, timeout_s: float) -> list[AuditReply]:
    """One reply for each node."""
    status = instance.status()
    if status.listener is None:
        raise SeedRefused(f"{status.instance_id} has published nothing ({status.state})")
    todo, done, replies = [status.listener], set[str](), list[AuditReply]()
    while todo:
        listener = todo.pop()
        if listener in done:
            continue
        done.add(listener)
        answer = instance.post(AUDIT_PATH, status.instance_id, listener, timeout_s=timeout_s)
        replies.append(parse_json(answer, AuditReply, f"audit at {listener}", limit=MAX_REPLY_NBYTES))
        if len(done) == 1:  # the first node knows all others; what they say of it may be another name
            todo += replies[0].elsewhere
    return replies


def _show(replies: list[AuditReply]) -> None:
    shards = [shard for reply in replies for shard in reply.shards]
    rows = [
        (s.shard, str(s.rank), str(s.generation), s.verdict, str(s.nbytes), str(s.num_chunks), s.why) for s in shards
    ]
    num_equal = sum(s.verdict == "equal" for s in shards)
    _planner.print_table(COLUMNS, rows, f"{replies[0].instance_id}: {num_equal} of {len(shards)} shards are equal")
    for shard in shards:
        for name in shard.differing:
            typer.echo(_planner.clean(f"  {shard.shard}: {name}"))
        if shard.num_differing > len(shard.differing):
            typer.echo(f"  … and {shard.num_differing - len(shard.differing)} more chunks")
