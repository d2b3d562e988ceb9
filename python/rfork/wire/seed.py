"""Bodies of the seed service: status, leases. Served by an instance's own listener; `StatusReply` on SGLang's port
too.
"""

from __future__ import annotations

import msgspec

from rfork.binding import Binding
from rfork.identity import RankIdentity, Scalar

STATUS_PATH = "/rfork/v1/status"
LEASES_PATH = "/rfork/v1/leases"
DRAIN_PATH = "/rfork/v1/drain"
AUDIT_PATH = "/rfork/v1/audit"


class SeedRef(msgspec.Struct, frozen=True):
    """The seed that weights came from."""

    instance_id: str
    address: str
    generation: int


class WeightsReport(msgspec.Struct, frozen=True, kw_only=True):
    """Where one shard's weights came from. `verify` is full, sample, off, or null for a checkpoint load.

    `nbytes` crossed the link; `lent_nbytes` did not, as the target of this draft had brought them already. `phases_s`
    maps a phase (lease, build, inventory, register, pair, connect, copy, read, verify, finish, fallback) to seconds.
    `origin_verified` tells whether every pull from the checkpoint to here was verified (I5's lineage).
    """

    source: str
    seed: SeedRef | None = None
    fallback_reason: str | None = None
    fallback_detail: str | None = None
    verify: str | None = None
    protocol: str | None = None
    nbytes: int = 0
    lent_nbytes: int = 0
    seconds: float = 0.0
    gbps: float = 0.0
    phases_s: dict[str, float] = {}
    origin_verified: bool = True


class RankReport(msgspec.Struct, frozen=True, kw_only=True):
    """One shard of one rank."""

    shard: str
    rank: int
    role: str
    state: str
    generation: int
    weights: WeightsReport


class StatusReply(msgspec.Struct, frozen=True, kw_only=True):
    """GET /rfork/v1/status. `weights` sums up the instance (the slowest target shard); `ranks` holds every shard.

    `num_readers` counts the clients with a live lease of this node, `readers` names them; `nodes` are the listeners of
    the instance's other nodes, which count their own.
    `ticket_wanted`: this fleet has a key, and without a ticket addresses are left out.
    """

    version: str
    protocol_version: int
    instance_id: str
    state: str
    generation: int
    listener: str | None
    instance_key: str | None = None
    content: str | None = None
    weights: WeightsReport | None = None
    ranks: list[RankReport] = []
    num_readers: int = 0
    readers: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ()
    ticket_wanted: bool = False


class LeaseRequest(msgspec.Struct, frozen=True, kw_only=True):
    """POST /rfork/v1/leases. A client's ranks take one lease each; they count as one reader."""

    client: str
    instance_key: str
    identity: dict[str, Scalar]
    engine: str
    content: str
    rank: RankIdentity
    weights: str = "checkpoint"
    seed: str | None = None
    generation: int | None = None
    transport: str = "pull"
    requires: tuple[str, ...] = ()


MIN_CHUNK_NBYTES = 4096
"""The least that a digest may stand for."""


class DigestTable(msgspec.Struct, frozen=True):
    """Digests of a shard's bytes: for each alias group, one 64-bit value per chunk of `chunk_nbytes`."""

    algorithm: str
    chunk_nbytes: int
    values: tuple[tuple[int, ...], ...]


class LeaseReply(msgspec.Struct, frozen=True, kw_only=True):
    """201. The manifest and digests are fetched from `manifest_path` and `digests_path` on the same listener.

    `instance_id` is also what the fence page must carry; `verified` is the seed's lineage.
    """

    lease: str
    ttl_s: float
    instance_id: str
    generation: int
    content: str
    weight_version: str | None
    manifest_digest: str
    manifest_path: str
    digests_path: str
    binding: Binding
    verified: bool = True


class ShardAudit(msgspec.Struct, frozen=True, kw_only=True):
    """What an audit found of one shard. `verdict` is equal, differs, or not_checked (then `why` says why).

    `differing` names tensors, the first few of `num_differing` chunks.
    """

    shard: str
    rank: int
    replica: int
    generation: int
    verdict: str
    nbytes: int = 0
    num_chunks: int = 0
    num_differing: int = 0
    differing: list[str] = []
    why: str = ""


class AuditReply(msgspec.Struct, frozen=True, kw_only=True):
    """POST /rfork/v1/audit. `elsewhere` are listeners of other nodes of this instance, which audit their own shards."""

    instance_id: str
    seconds: float
    shards: list[ShardAudit]
    elsewhere: list[str] = []


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """Any 4xx/5xx body. `reason` is a stable word: not_ready, busy, draining, paused, other_instance, other_node,

    key_mismatch, unknown_shard, live_content, unverified, not_understood, bad_request, unauthorized, unknown_lease,
    stale_generation, not_for_stock_clients, not_for_this_address. `listener` comes with other_node: who grants leases
    of that shard of the same instance.
    """

    reason: str
    message: str
    differing: list[tuple[str, Scalar, Scalar]] = []
    retry_after_s: float | None = None
    listener: str | None = None
