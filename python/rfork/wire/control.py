"""Messages between a rank process and its node's main process, over a Unix socket that only they share.

A frame is a 4-byte big-endian length and a MessagePack body. The rank speaks first (`Hello`); both sides may send at
any time.
"""

from __future__ import annotations

import msgspec

from rfork.binding import Binding
from rfork.identity import RankIdentity, Scalar
from rfork.wire.collective import GroupEnded, GroupOrder
from rfork.wire.planner import Report
from rfork.wire.seed import DigestTable, WeightsReport


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First frame of a rank. `rank` is its index in the WORLD of its replica, `num_ranks` the WORLD's size."""

    pid: int
    rank: int
    num_ranks: int
    replica: int
    num_replicas: int
    instance_id: str = ""


class Seeking(msgspec.Struct, frozen=True, tag="seeking", kw_only=True):
    """A target is about to load: what this instance will be. Sent before anything is asked of anybody, and again with
    `reads_disk` once the planner has chosen this instance to read the disk for its fleet.
    """

    rank: int
    engine: str
    identity: dict[str, Scalar]
    content: str
    reads_disk: bool = False


class Told(msgspec.Struct, frozen=True, tag="told"):
    """What came of a seed or of the planner's answer; the main process delivers it, again until it arrives."""

    report: Report


class Loaded(msgspec.Struct, frozen=True, tag="loaded", kw_only=True):
    """A shard has its weights (before it is published, and also where it never will be)."""

    shard: RankIdentity
    rank: int
    report: WeightsReport


class Published(msgspec.Struct, frozen=True, tag="published", kw_only=True):
    """A shard is complete and registered at a generation; a later one replaces it.

    `manifest` is `encode_manifest()`; `parameters` is the stock table {name: [address, num_elements,
    element_nbytes]}, or null with `parameters_refusal` where a stock client would misread it.
    """

    shard: RankIdentity
    rank: int
    engine: str
    identity: dict[str, Scalar]
    content: str
    weight_version: str | None
    generation: int
    manifest: bytes
    binding: Binding
    digests: DigestTable | None
    verified: bool
    parameters: dict[str, tuple[int, int, int]] | None = None
    parameters_refusal: str | None = None


WITHDRAWAL_S = 1.0
"""How long memory that is about to go waits for the planner to have heard; a seed that has closed refuses anyway."""


class Changing(msgspec.Struct, frozen=True, tag="changing"):
    """The fence went odd: grant nothing for this rank until it publishes again. `unmaps`: memory is about to go, and
    the rank waits for a moment to be told `withdrawn`: the planner sends nobody here any more.
    """

    rank: int
    why: str
    unmaps: bool = False


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """This rank can't be a seed; the reason, by name."""

    rank: int
    why: str


class Elsewhere(msgspec.Struct, frozen=True, tag="elsewhere"):
    """Shards of this instance that other nodes hold: shard key → URL of the listener that grants leases of it."""

    rank: int
    listeners: dict[str, str]


class Healthy(msgspec.Struct, frozen=True, tag="healthy"):
    """The node that answers requests is healthy; the others can't tell by themselves."""

    rank: int


class Ask(msgspec.Struct, frozen=True, tag="ask"):
    """Node → rank: do `verb` (ping, recheck, digests, audit, withdrawn, group, send, close), answer with the id.

    `order` belongs to group, `group` to send.
    """

    id: int
    verb: str
    order: GroupOrder | None = None
    group: str = ""


class Answer(msgspec.Struct, frozen=True, tag="answer"):
    """Rank → node. `ok` false carries `error`; `digests` belongs to the verb digests, `port` to group, as does
    `reason`: the word that a client is told where the group is refused.
    """

    id: int
    ok: bool
    error: str | None = None
    digests: list[tuple[RankIdentity, DigestTable]] = []
    port: int = 0
    reason: str = ""


RankMessage = (
    Hello | Seeking | Told | Loaded | Published | Changing | Refused | Answer | GroupEnded | Elsewhere | Healthy
)
NodeMessage = Ask
