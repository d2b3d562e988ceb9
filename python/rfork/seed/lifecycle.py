"""A seed's life, as a table.

STARTING  weights are loading, or the server is not healthy yet: nobody may read.
SERVING   every shard of this node is published, healthy and checked a second time: leases are granted.
PAUSED    bytes change, or changed without a new publication yet: nothing is granted, old leases are revoked.
DRAINING  shutdown was asked for: nothing is granted, leases run out.
STOPPED   never a seed (again): switched off, refused by name, a rank died, or shut down.
"""

from __future__ import annotations

import enum

from rfork.machine import Machine, Table


class SeedState(enum.Enum):
    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class SeedEvent(enum.Enum):
    """FIT: all published, healthy, checked. UNFIT: a rank changes its weights. DRAIN: shutdown began. STOP: the end."""

    FIT = "fit"
    UNFIT = "unfit"
    DRAIN = "drain"
    STOP = "stop"


SEED: Table[SeedState, SeedEvent] = {
    SeedState.STARTING: {
        SeedEvent.FIT: SeedState.SERVING,
        SeedEvent.DRAIN: SeedState.DRAINING,
        SeedEvent.STOP: SeedState.STOPPED,
    },
    SeedState.SERVING: {
        SeedEvent.UNFIT: SeedState.PAUSED,
        SeedEvent.DRAIN: SeedState.DRAINING,
        SeedEvent.STOP: SeedState.STOPPED,
    },
    SeedState.PAUSED: {
        SeedEvent.FIT: SeedState.SERVING,
        SeedEvent.DRAIN: SeedState.DRAINING,
        SeedEvent.STOP: SeedState.STOPPED,
    },
    SeedState.DRAINING: {SeedEvent.STOP: SeedState.STOPPED},
    SeedState.STOPPED: {},
}


def seed_machine(name: str) -> Machine[SeedState, SeedEvent]:
    return Machine(f"seed {name}", SEED, SeedState.STARTING)
