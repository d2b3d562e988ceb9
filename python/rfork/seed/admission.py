"""Who may read: one decision on a lease request, before the book of leases looks for a free place. Pure.

Cases, in this order; the first that applies is the answer:
 1 the request needs something that this build does not know            not_understood
 2 it was meant for another instance that had our address               other_instance
 3 the node does not grant now                                          not_ready, paused, draining, not_a_seed
 4 another model, or another layout of it                               key_mismatch
 5 no such shard here, but on another node of this instance             other_node
   no such shard                                                        unknown_shard
 6 a checkpoint is wanted, and the weights were updated in memory       live_content
 7 other content, or another key than its own fields give               key_mismatch
 8 the generation that it wants is not the one here                     stale_generation
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from rfork import wire
from rfork.identity import ModelIdentity
from rfork.seed.lifecycle import SeedState
from rfork.seed.shards import ShardRecord
from rfork.wire.seed import LeaseRequest, Refusal

STATUS_CODES = {
    "bad_request": 400,
    "unauthorized": 401,
    "not_for_this_address": 403,
    "not_found": 404,
    "unknown_lease": 404,
    "key_mismatch": 409,
    "live_content": 409,
    "not_a_seed": 409,
    "not_for_stock_clients": 409,
    "not_understood": 409,
    "stale_generation": 409,
    "unknown_shard": 409,
    "unverified": 409,
    "too_large": 413,
    "other_instance": 421,
    "other_node": 421,
    "busy": 429,
    "error": 500,
    "draining": 503,
    "not_ready": 503,
    "paused": 503,
}
MAX_CLIENT_NCHARS = 200
TRANSPORTS = ("pull", "collective")
_RETRY_AFTER_S = {SeedState.STARTING: 2.0, SeedState.PAUSED: 1.0, SeedState.DRAINING: 30.0}


@dataclass(frozen=True)
class NodeView:
    """What the decision looks at. `why` tells how the node got into its state; `elsewhere` is where other nodes of this
    instance grant leases, by shard key.
    """

    instance_id: str
    state: SeedState
    why: str
    shards: Sequence[ShardRecord]
    elsewhere: Mapping[str, str] = field(default_factory=dict)


def refuse(reason: str, message: str, *, retry_after_s: float | None = None) -> Refusal:
    return Refusal(reason=reason, message=message, retry_after_s=retry_after_s)


def not_granting(state: SeedState, why: str) -> Refusal | None:
    """Why a node in this state grants nothing; None while it serves."""
    detail = f": {why}" if why else ""
    retry_after_s = _RETRY_AFTER_S.get(state)
    match state:
        case SeedState.SERVING:
            return None
        case SeedState.STARTING:
            return refuse("not_ready", f"this seed is not ready yet{detail}", retry_after_s=retry_after_s)
        case SeedState.PAUSED:
            return refuse("paused", f"this seed's weights are changing{detail}", retry_after_s=retry_after_s)
        case SeedState.DRAINING:
            return refuse("draining", f"this seed is shutting down{detail}", retry_after_s=retry_after_s)
        case SeedState.STOPPED:
            return refuse("not_a_seed", f"this instance serves no weights{detail}")


def admit(request: LeaseRequest, node: NodeView) -> list[ShardRecord] | Refusal:
    """The replicas that hold the shard asked for, or the refusal."""
    unknown = wire.not_understood(request.requires)
    if unknown or request.transport not in TRANSPORTS:
        return refuse("not_understood", f"this seed does not know {unknown or [request.transport]}; is it older?")
    if not 0 < len(request.client) <= MAX_CLIENT_NCHARS:
        return refuse("bad_request", f"client: expected 1 to {MAX_CLIENT_NCHARS} characters, got {len(request.client)}")
    if request.weights not in ("checkpoint", "live"):
        return refuse("bad_request", f"weights: expected checkpoint or live, got {request.weights!r}")
    if request.seed is not None and request.seed != node.instance_id:
        return refuse("other_instance", f"{request.seed[:64]} is not here any more; this is {node.instance_id}")
    closed = not_granting(node.state, node.why)
    if closed is not None:
        return closed
    return _match(request, node)


def _match(request: LeaseRequest, node: NodeView) -> list[ShardRecord] | Refusal:
    shards = node.shards
    exact = [s for s in shards if s.published.shard == request.rank]
    alike = exact or [s for s in shards if s.published.shard.role == request.rank.role]
    identity = ModelIdentity(request.engine, request.identity)
    if alike and (differing := identity.diff(alike[0].identity)):
        names = ", ".join(name for name, *_ in differing[:6])
        return Refusal(reason="key_mismatch", message=f"another model or layout: {names}", differing=differing)
    if not exact and (listener := node.elsewhere.get(request.rank.key)):
        message = f"{request.rank.key} is on another node of this instance, at {listener}"
        return Refusal(reason="other_node", message=message, listener=listener)
    if not exact:
        held = ", ".join(sorted({s.ref.key for s in shards}))
        return refuse("unknown_shard", f"{request.rank.key} is not on this node, which holds {held}")
    content = str(exact[0].content)
    if request.weights == "checkpoint" and exact[0].content.kind == "live":
        return refuse("live_content", f"a checkpoint was asked for; these weights were updated in memory ({content})")
    # A client of live weights can't know their content before it has them: the identity decides, which is equal by now.
    if request.weights == "checkpoint" and request.content != content:
        differing = [("content", request.content, content)]
        return Refusal(reason="key_mismatch", message="other weights of the same model", differing=differing)
    if request.weights == "checkpoint" and request.instance_key != exact[0].key:
        differing = [("instance_key", request.instance_key, exact[0].key)]
        return Refusal(reason="key_mismatch", message="the instance key is not that of its fields", differing=differing)
    current = [s for s in exact if request.generation in (None, s.generation)]
    if not current:
        have = sorted({s.generation for s in exact})
        return refuse("stale_generation", f"generation {request.generation} was asked for, this seed is at {have}")
    return current
