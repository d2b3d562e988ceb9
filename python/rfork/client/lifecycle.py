"""The life of one pull: one rank's attempts to get one shard, from looking for a seed to a model or a way around it.

SEEKING     no seed chosen; the next candidate is looked for.
MATCHING    a seed granted a lease; manifest compared both ways. Nothing local was touched.
CONNECTING  a pull engine of one fabric is opened and reads the fence page.
READING     bytes land in local memory; from here on it counts as dirty until SETTLING ends well.
SETTLING    fence and digests agree or not, values are set, the engine is destroyed.
LOADED      the shard holds the seed's bytes, verified as asked, and nothing writes into it any more.
FELL_BACK   no seed was any use; the fallback loader has the shard.
REFUSED     no seed was any use and no fallback is allowed, or going on is not safe: the process ends with the reason.
"""

from __future__ import annotations

import enum

from rfork.machine import Machine, Table


class PullState(enum.Enum):
    SEEKING = "seeking"
    MATCHING = "matching"
    CONNECTING = "connecting"
    READING = "reading"
    SETTLING = "settling"
    LOADED = "loaded"
    FELL_BACK = "fell_back"
    REFUSED = "refused"


class PullEvent(enum.Enum):
    """What happens to a pull. SEED_FAILED sends it to the next seed; its note carries the reason."""

    LEASED = "leased"
    PAIRED = "paired"
    CONNECTED = "connected"
    ALL_READ = "all_read"
    SETTLED = "settled"
    SEED_FAILED = "seed_failed"
    GAVE_UP = "gave_up"
    FORBIDDEN = "forbidden"


_ENDS = {PullEvent.FORBIDDEN: PullState.REFUSED}
_FAILS = {PullEvent.SEED_FAILED: PullState.SEEKING, **_ENDS}

PULL: Table[PullState, PullEvent] = {
    PullState.SEEKING: {
        PullEvent.LEASED: PullState.MATCHING,
        PullEvent.SEED_FAILED: PullState.SEEKING,
        PullEvent.GAVE_UP: PullState.FELL_BACK,
        **_ENDS,
    },
    PullState.MATCHING: {PullEvent.PAIRED: PullState.CONNECTING, **_FAILS},
    PullState.CONNECTING: {PullEvent.CONNECTED: PullState.READING, **_FAILS},
    PullState.READING: {PullEvent.ALL_READ: PullState.SETTLING, **_FAILS},
    PullState.SETTLING: {PullEvent.SETTLED: PullState.LOADED, **_FAILS},
    PullState.LOADED: {},
    PullState.FELL_BACK: {},
    PullState.REFUSED: {},
}


def new_pull(shard_key: str) -> Machine[PullState, PullEvent]:
    """The lifecycle of one shard's pull, before any seed is known."""
    return Machine(f"pull {shard_key}", PULL, PullState.SEEKING)
