"""`rfork leases`: who reads whom."""

from __future__ import annotations

from rfork.cli import _planner
from rfork.errors import RForkError


def command(planner: str = _planner.PLANNER, as_json: bool = _planner.AS_JSON) -> None:
    """List leases that seeds have granted, and reservations that they have not confirmed yet.

    Exit status: 0 listed, 1 no planner answers or it refuses, 2 wrong usage.
    """
    client = _planner.connect(planner)
    try:
        found = client.leases()
    except RForkError as error:
        _planner.fail(error)
    if as_json:
        _planner.print_json(found)
        return
    rows = (
        (
            line.client,
            line.seed,
            "granted" if line.granted else "reserved",
            _planner.seconds(line.age_s),
            _planner.seconds(line.ttl_s),
            line.instance_key[:12],
        )
        for line in found.leases
    )
    _planner.print_table(("CLIENT", "SEED", "STATE", "AGE", "ENDS IN", "KEY"), rows, f"{found.total} leases")
