"""R-Fork's state of one scheduler process: its shards, and the agent that publishes them.

Made when the scheduler starts, in a process of a server where R-Fork was asked for; anywhere else there is none.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable
from typing import Any

import torch

from rfork.binding import Binding
from rfork.client.agreement import Agreement
from rfork.client.receive import Receiver
from rfork.client.sources import signer_of, tls_of
from rfork.client.warm import warm_up_in_background
from rfork.config import CONTROL_ENV, INSTANCE_ENV, Config
from rfork.digest import DEFAULT_CHUNK_NBYTES
from rfork.fence import FencePage
from rfork.identity import Content, InstanceId, ModelIdentity, RankIdentity
from rfork.inventory import ResolvedShard
from rfork.seed.broadcast import Broadcasts, Limits
from rfork.seed.rank import RankAgent
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.select import Facts, gather_facts, serving_transports
from rfork.wire.control import Hello
from rfork.wire.seed import DigestTable, WeightsReport
from sglang_rfork.srt.compat import Placement, Release, installed_release
from sglang_rfork.srt.managers import nodes
from sglang_rfork.srt.managers.board import world_board
from sglang_rfork.srt.model_loader.identity import parallel_sizes, rank_identity
from sglang_rfork.srt.server_args import ForkRequest, request_of, settings_of

log = logging.getLogger("rfork")


@dataclasses.dataclass
class LoadedShard:
    """One model of this rank as its loader left it. `origin_digests` are those that a fork was verified against,
    `there` is where its seed has it. `model` is asked as long as it may live.
    """

    rank: RankIdentity
    identity: ModelIdentity
    content: Content
    resolve: Callable[[], ResolvedShard]
    report: WeightsReport
    layout_is_raw: bool
    origin_digests: DigestTable | None = None
    there: Binding | None = None
    model: Callable[[], torch.nn.Module | None] = lambda: None


@dataclasses.dataclass
class RankState:
    """Everything that R-Fork keeps in a scheduler process."""

    release: Release
    request: ForkRequest
    settings: Config
    server_args: Any
    placement: Placement
    device: torch.device
    facts: Facts
    shards: list[LoadedShard] = dataclasses.field(default_factory=list)
    num_agreements: int = 0
    weight_version: str | None = None
    """The label that the last update brought."""

    @functools.cached_property
    def num_nodes(self) -> int:
        return int(self.release.arguments(self.server_args).nnodes or 1)

    @functools.cached_property
    def node_rank(self) -> int:
        return int(self.release.arguments(self.server_args).node_rank or 0)

    @functools.cached_property
    def instance_id(self) -> InstanceId:
        """That of the node of rank 0, for all ranks; the WORLD is there by the time that somebody asks."""
        own = InstanceId(os.environ[INSTANCE_ENV])
        if self.num_nodes == 1:
            return own
        board = world_board("rfork")
        if world_rank()[0] == 0:
            board.set("instance", own.encode())
            return own
        try:
            return InstanceId(board.get("instance", self.settings.agree_timeout_s).decode())
        except TimeoutError:
            log.warning("rfork: rank 0 has not said which instance this is; was its node started with R-Fork too?")
            return own

    @functools.cached_property
    def sizes(self) -> dict[str, int]:
        """Sizes of the deployment's parallel groups, first asked when the target loads: a draft's may look narrower."""
        return parallel_sizes(self.release)

    @functools.cached_property
    def place(self) -> RankIdentity:
        """Coordinates of this rank in the deployment, first asked when the target loads, for the same reason."""
        return rank_identity(self.release)

    @functools.cached_property
    def agent(self) -> RankAgent:
        """The seed's part, joined to the node on first use: ranks of the WORLD are known by then."""
        rank, num_ranks = world_rank()
        return RankAgent(
            os.environ.get(CONTROL_ENV),
            Hello(os.getpid(), rank, num_ranks, self.placement.replica, self.placement.num_replicas, self.instance_id),
            self.instance_id,
            is_on=self.settings.seed == "on",
            transports=self.transports,
            make_fence=lambda: FencePage(self.instance_id, self.device),
            chunk_nbytes=DEFAULT_CHUNK_NBYTES,
            close_timeout_s=self.settings.close_timeout_s,
            broadcasts=self.broadcasts(),
            on_healthy=functools.partial(nodes.tell_healthy, self),
        )

    def transports(self) -> list[MooncakeTransport]:
        """What one-sided readers may use: nothing with the nccl backend, which needs no other library."""
        return [] if self.request.backend == "nccl" else serving_transports(self.settings, self.facts)

    def broadcasts(self) -> Broadcasts:
        """Collective transfers, which every seed offers."""
        settings = self.settings
        limits = Limits(
            *(settings.connect_timeout_s, settings.read_timeout_s, settings.close_timeout_s),
            max_groups=settings.capacity,
        )
        return Broadcasts(self.device, limits, port_range=settings.port_range)

    def receiver(self) -> Receiver:
        """How this rank takes part in a collective transfer, at the seed's port that the user set aside for it."""
        ports = self.request.group_ports
        port = ports[world_rank()[0] % len(ports)] if ports else 0
        return Receiver(
            self.device,
            port,
            tls_of(self.settings),
            self.settings.seek_timeout_s,
            signer_of(self.settings, self.instance_id),
        )

    def next_role(self, is_draft: bool) -> str:
        """`target`, or `draft-N` by the order in which drafts load, which is the same on every instance."""
        num_drafts = sum(s.rank.role != "target" for s in self.shards)
        return f"draft-{num_drafts}" if is_draft else "target"

    def agreement(self, who: RankIdentity) -> Agreement:
        """Agreement about one load: of this replica's WORLD, for a draft of the ranks of one pipeline stage.

        SGLang gives a draft to the last stage, or to each stage its own.
        """
        rank, num_ranks = world_rank()
        self.num_agreements += 1
        name = f"{who.role}/{self.num_agreements}"
        if who.role != "target" and who.pp_size > 1:
            num_ranks //= who.pp_size
            rank, name = rank % num_ranks, f"{name}/stage-{who.pp_rank}"
        board = world_board("rfork") if num_ranks > 1 else None
        return Agreement(board, rank=rank, num_ranks=num_ranks, name=name, timeout_s=self.settings.agree_timeout_s)

    def loaded(self, shard: LoadedShard) -> None:
        """Remember a loaded model and tell the node where its weights came from."""
        self.shards.append(shard)
        self.agent.loaded(shard.rank, shard.report)


def world_rank() -> tuple[int, int]:
    """(rank, size) of this process in its WORLD."""
    dist = torch.distributed
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


_state: RankState | None = None


def current() -> RankState | None:
    """The state of this process, or None where R-Fork has nothing to do."""
    return _state


def start(scheduler: Any) -> RankState | None:
    """Make the state of this scheduler process. None where R-Fork was not asked for. Raises ConfigError."""
    global _state
    server_args = scheduler.server_args
    request = request_of(server_args)
    if request is None:
        return None
    release = installed_release()
    placement = release.placement(scheduler)
    device_type = torch.device(str(release.arguments(server_args).device)).type
    index = placement.device_index if device_type != "cpu" else None
    settings = settings_of(server_args)
    _state = RankState(
        release=release,
        request=request,
        settings=settings,
        server_args=server_args,
        placement=placement,
        device=torch.device(device_type, index) if index is not None else torch.device(device_type),
        facts=gather_facts(device_type, index, settings),
    )
    warm_up_in_background(_state.device)
    return _state
