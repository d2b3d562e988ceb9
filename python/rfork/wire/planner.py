"""Bodies of the planner's protocol v1 (docs/protocol.md). Durations, never clocks; every text and list is bounded."""

from __future__ import annotations

import enum
import itertools
import re
import zlib
from collections.abc import Mapping
from typing import Annotated

import msgspec
from msgspec import Meta

from rfork.identity import Scalar

PREFIX = "/rfork/v1"
MAX_BODY_NBYTES = 64 * 1024
MAX_LEASES = 256

Id = Annotated[str, Meta(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._:-]+$")]
Key = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}$")]
MaybeKey = Annotated[str, Meta(pattern=r"^([0-9a-f]{64})?$")]
Listener = Annotated[str, Meta(max_length=256, pattern=r"^(https?://[^\s/?#@]+)?$")]
Text = Annotated[str, Meta(max_length=256)]
Detail = Annotated[str, Meta(max_length=2048)]
Duration = Annotated[float, Meta(ge=0, le=1e7)]
Count = Annotated[int, Meta(ge=0, le=1 << 62)]
Labels = Annotated[dict[Annotated[str, Meta(max_length=64)], Annotated[str, Meta(max_length=128)]], Meta(max_length=16)]
Field = Annotated[str, Meta(max_length=1024)] | int | float | bool | None
Identity = Annotated[dict[Annotated[str, Meta(max_length=128)], Field], Meta(max_length=256)]
Requires = Annotated[list[Text], Meta(max_length=16)]
Ids = Annotated[list[Id], Meta(max_length=64)]


MAX_FIELDS, MAX_FIELD_NCHARS = 256, 160
"""Of an identity that is sent: with these a body stays within its limit whatever a model is called."""


def shown_identity(fields: Mapping[str, Scalar]) -> dict[str, Field]:
    """An identity cut to what a body may carry. It explains keys to people and decides nothing."""
    cut = itertools.islice(fields.items(), MAX_FIELDS)
    return {n[:128]: v[:MAX_FIELD_NCHARS] if isinstance(v, str) else v for n, v in cut}


def shown_labels(labels: Mapping[str, str]) -> dict[str, str]:
    """Labels cut to what a body may carry."""
    return {name[:64]: text[:128] for name, text in itertools.islice(labels.items(), 16)}


def shown_id(name: str) -> str:
    """`name` if it may stand in a body, else a stable name made from it: a client calls itself what it likes."""
    return name if re.fullmatch(r"[A-Za-z0-9._:-]{1,128}", name) else f"other-{zlib.crc32(name.encode()):08x}"


def shown_word(text: str, max_nchars: int = 64) -> str:
    """A peer's reason as a word that may stand in a body."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "_", text)[:max_nchars]


class InstanceState(enum.Enum):
    """Where an instance is in its life, as it says itself (`STOPPED` is said by withdrawing)."""

    STARTING = "starting"
    SERVING = "serving"
    PAUSED = "paused"
    DRAINING = "draining"
    STOPPED = "stopped"


class LeaseView(msgspec.Struct, frozen=True, omit_defaults=True):
    """One lease that a seed has granted, as its heartbeat lists it."""

    client: Id
    age_s: Duration = 0.0
    ttl_s: Duration = 30.0


class Heartbeat(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """PUT /instances/{id}: registration and sign of life in one, idempotent, of bounded size.

    `seq` grows with every heartbeat of one instance, so that one which overtook another is ignored (0: not counted).
    `identity` goes along until one reply said that it is known. `live_key`, set while the content is live, is a second
    key under which the instance may be asked for. `parent` is the instance that it forked from, `disk`, or empty.
    `ticket`, where the fleet has a key, is the instance's word for its listeners, handed on to clients. `reads_disk`,
    from a `read_disk` answer until it serves, tells a planner that has lost its memory who holds the claim.
    """

    instance_id: Id
    instance_key: Key
    state: InstanceState
    seq: Count = 0
    listener: Listener = ""
    nodes: Annotated[list[Listener], Meta(max_length=64)] = []
    live_key: MaybeKey = ""
    content: Text = ""
    generation: Count = 0
    weight_version: Text = ""
    capacity: Annotated[int, Meta(ge=0, le=100_000)] = 1
    ranks: Annotated[int, Meta(ge=1, le=65536)] = 1
    ranks_ready: Annotated[int, Meta(ge=0, le=65536)] = 1
    leases: Annotated[list[LeaseView], Meta(max_length=MAX_LEASES)] = []
    labels: Labels = {}
    parent: Annotated[str, Meta(max_length=128)] = ""
    model: Text = ""
    identity: Identity | None = None
    ticket: Text = ""
    reads_disk: bool = False
    requires: Requires = []


class HeartbeatReply(msgspec.Struct, frozen=True, kw_only=True):
    """Send the next one within `interval_s`; the entry dies after `ttl_s` without one.

    `identity_wanted`: send `identity` next time. `drain`: an operator asks this instance to drain. `planner` is this
    planner's name for one life; a change says that it restarted.
    """

    ttl_s: float
    interval_s: float
    planner: str
    identity_wanted: bool = False
    drain: bool = False


class Ask(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /asks: who can I fork from? Held open up to `wait_s`; ask again after a `wait` answer.

    `waited_s` is how long this client has been asking in all (it keeps its place in the queue at any planner).
    `exclude` are seeds that it has given up on; whoever is registered at `listener`, its own address, is its former
    self. `bound_s` 0 takes the planner's bound.
    """

    client: Id
    instance_key: Key
    wait_s: Duration = 0.0
    waited_s: Duration = 0.0
    bound_s: Duration = 0.0
    allow_disk: bool = True
    exclude: Ids = []
    listener: Listener = ""
    labels: Labels = {}
    identity: Identity | None = None
    requires: Requires = []


class Candidate(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A seed to ask for a lease at `listener`: it admits. `ticket`: the seed's own word for its listeners, where the
    fleet has a key.
    """

    instance_id: Id
    listener: Listener
    generation: Count
    content: Text = ""
    instance_key: MaybeKey = ""
    weight_version: Text = ""
    nodes: Annotated[list[Listener], Meta(max_length=64)] = []
    labels: Labels = {}
    ticket: Text = ""


class Nearest(msgspec.Struct, frozen=True):
    """Instances of another key, and the identity fields in which they differ: name -> [asked for, theirs]."""

    instance_key: str
    instances: list[str]
    num_differing: int
    differs: dict[str, tuple[Field, Field]]


class ForkFrom(msgspec.Struct, frozen=True, tag_field="answer", tag="fork"):
    """Try these seeds in order, the first is reserved for you; report what came of it."""

    candidates: Annotated[list[Candidate], Meta(min_length=1, max_length=64)]


class ReadDisk(msgspec.Struct, frozen=True, tag_field="answer", tag="read_disk", omit_defaults=True):
    """No seed: you hold the claim to read the disk. It lasts `ttl_s` and is renewed by your heartbeats."""

    ttl_s: float
    nearest: list[Nearest] = []


class Wait(msgspec.Struct, frozen=True, tag_field="answer", tag="wait", omit_defaults=True):
    """Ask again at once. `reason`: claim_held, seeds_busy, settling, no_seed, replaced, planner_stops."""

    reason: str
    waiting_for: list[str]
    waited_s: float
    bound_s: float
    position: int
    nearest: list[Nearest] = []


class FallBack(msgspec.Struct, frozen=True, tag_field="answer", tag="fall_back", omit_defaults=True):
    """Stop asking and use the fallback. `reason`: bound, all_excluded, planner_full."""

    reason: str
    waited_s: float
    nearest: list[Nearest] = []


Answer = ForkFrom | ReadDisk | Wait | FallBack


class Outcome(enum.Enum):
    """What came of one attempt."""

    LOADED = "loaded"
    REFUSED = "refused"
    FAILED = "failed"
    FELL_BACK = "fell_back"


class Report(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """POST /reports: what came of an answer. `seed` is empty for a load from disk; `reason` is a stable short word.

    `refused`: the seed said no, nobody's fault. `failed`: the seed is no use to this client, which counts against it.
    `fell_back`: the client asks no more and loads without a seed.
    """

    client: Id
    instance_key: Key
    outcome: Outcome
    seed: Annotated[str, Meta(max_length=128, pattern=r"^[A-Za-z0-9._:-]*$")] = ""
    reason: Annotated[str, Meta(max_length=64, pattern=r"^[A-Za-z0-9_.-]*$")] = ""
    detail: Detail = ""
    nbytes: Count = 0
    phases_s: Annotated[dict[Annotated[str, Meta(max_length=32)], Duration], Meta(max_length=32)] = {}
    requires: Requires = []


class InstanceView(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GET /instances."""

    instance_id: str
    instance_key: str
    state: str
    listener: str
    generation: int
    content: str
    weight_version: str
    model: str
    capacity: int
    num_leases: int
    ranks: int
    ranks_ready: int
    labels: dict[str, str]
    parent: str
    age_s: float
    heartbeat_age_s: float
    offered: bool
    set_aside_s: float = 0.0
    drain_asked: bool = False


class InstanceStory(msgspec.Struct, frozen=True):
    """GET /instances/{id}: the line, the identity of its key, and what happened to it, oldest first."""

    instance: InstanceView
    identity: dict[str, Field]
    story: list[str]


class LeaseLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of GET /leases. `granted`: the seed has confirmed it; else it is only reserved."""

    seed: str
    client: str
    instance_key: str
    granted: bool
    age_s: float
    ttl_s: float


class WaitingLine(msgspec.Struct, frozen=True, kw_only=True):
    """One client that waits. `claim`: it holds the claim to read the disk."""

    client: str
    instance_key: str
    waited_s: float
    bound_s: float
    claim: bool = False


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that happened, for watchers. `seq` counts up within one life of one planner."""

    seq: int
    age_s: float
    kind: str
    instance: str = ""
    client: str = ""
    instance_key: str = ""
    text: str = ""


class Instances(msgspec.Struct, frozen=True):
    """GET /instances. `total` counts what matched, `instances` is cut at the limit."""

    total: int
    instances: list[InstanceView]


class Leases(msgspec.Struct, frozen=True):
    """GET /leases."""

    total: int
    leases: list[LeaseLine]


class Events(msgspec.Struct, frozen=True):
    """GET /events?after=&wait_s=: what came after `after`; `next` goes into the next call."""

    planner: str
    next: int
    events: list[Event]


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """GET /overview: what the dashboard draws."""

    planner: str
    uptime_s: float
    store: str
    totals: dict[str, int]
    instances: list[InstanceView]
    leases: list[LeaseLine]
    waiting: list[WaitingLine]
    failures: list[Event]


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Any 4xx or 5xx body: `code` is stable, `message` is for people, `story` what led there."""

    code: str
    message: str
    story: list[str] = []
