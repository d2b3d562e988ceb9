"""Bodies of the two end-points that set up and start a collective transfer, with SGLang's own fields and names, and
what node and rank say to each other about one.

`lease` marks a client with R-Fork. Without it the body is that of SGLang's own client.
"""

from __future__ import annotations

import msgspec

from rfork.identity import RankIdentity

INIT_PATH = "/init_weights_send_group_for_remote_instance"
SEND_PATH = "/send_weights_to_remote_instance"


class InitGroup(msgspec.Struct, frozen=True, kw_only=True):
    """POST INIT_PATH. `ports` are comma-separated, one for each rank; with a lease it is one, and 0 means any free one.

    The seed is group rank 0 and listens; `master_address` is where the client believes it to be. `interface` is where
    the client lets itself be dialled, if it says so; `limit_gbps` what each rank shall send at most, in GB/s.
    """

    master_address: str
    ports: str
    group_rank: int
    world_size: int
    group_name: str = "weight_send_group"
    backend: str = "nccl"
    lease: str | None = None
    interface: str = ""
    limit_gbps: float | None = None


class InitReply(msgspec.Struct, frozen=True, kw_only=True):
    """200: the seed listens. `success` and `message` are SGLang's; the group's store is at `ports`, under `group_name`,

    which nobody else has been told.
    """

    success: bool
    message: str
    ports: str = ""
    group_name: str = ""


class SendWeights(msgspec.Struct, frozen=True, kw_only=True):
    """POST SEND_PATH: what was set up under these names may be sent."""

    master_address: str
    ports: str
    group_name: str = "weight_send_group"
    lease: str | None = None


class SendReply(msgspec.Struct, frozen=True, kw_only=True):
    success: bool
    message: str


class GroupOrder(msgspec.Struct, frozen=True, kw_only=True):
    """Node → rank: offer one group for one shard, on a store of its own, under `store_name`.

    `parameters_only`: for SGLang's own client, which takes the named parameters, one by one, and nothing else. `peers`
    are the networks that gloo may dial the client in; None where a fleet key says who it is.
    """

    group: str
    store_name: str
    shard: RankIdentity
    generation: int
    bind_host: str
    port: int
    interface: str
    backend: str
    parameters_only: bool = False
    peers: tuple[str, ...] | None = None
    limit_gbps: float | None = None


class GroupEnded(msgspec.Struct, frozen=True, tag="group_ended", kw_only=True):
    """Rank → node: a group is gone. `why` is empty where everything was sent and its client had it."""

    group: str
    why: str
    nbytes: int
    seconds: float
