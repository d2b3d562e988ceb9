"""A seed's rank on one GPU and clients on another, over NCCL and without servers. On the CPU, over gloo, as well.

python -m support.device_groups LISTENER DEVICE SHARE     a client that stands still at SHARE of the bytes
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.receive import Receiver
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.fence import FencePage, check_fence
from rfork.identity import Content, ModelIdentity, RankIdentity, instance_key
from rfork.inventory import Inventory, ResolvedShard
from rfork.inventory.target import PullTarget
from rfork.seed.broadcast import Broadcasts, Limits
from rfork.seed.node import NodeService
from rfork.seed.offer import SeedShard
from rfork.seed.rank import RankAgent
from rfork.transports.select import GivenFabrics
from rfork.wire.control import Hello
from rfork.wire.seed import LeaseRequest, WeightsReport
from support.groups import AtShare
from support.seed_node import until

IDENTITY = ModelIdentity("test", {"set": "device"})
CONTENT = Content("checkpoint", "device")
SIZES = (*[1 << 24] * 24, *[1000] * 300, 5_000_001, 3)
LIMITS = Limits(connect_timeout_s=30.0, progress_timeout_s=5.0, close_timeout_s=10.0)
SETTINGS = PullSettings(connect_timeout_s=30.0, progress_timeout_s=5.0, close_timeout_s=10.0)
CHUNK_NBYTES = 1 << 20


class Plain:
    """Rules of a model of nothing but parameters."""

    def is_pure(self, module: nn.Module) -> bool:
        return False

    def descend(self, value: object) -> bool:
        return False

    def is_runtime(self, owner: object, name: str) -> bool:
        return False


def make_shard(device: torch.device, *, fill: bool) -> ResolvedShard:
    model = nn.Module()
    for i, nbytes in enumerate(SIZES):
        data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
        if fill:
            data.random_(0, 256)
        model.register_parameter(f"weight_{i}", nn.Parameter(data, requires_grad=False))
    return Inventory.note(model, rank=RankIdentity(), device=device, rules=Plain()).resolve()


class DeviceSeed:
    """A node and its one rank, serving."""

    def __init__(self, stack: ExitStack, device: torch.device) -> None:
        self.shard = make_shard(device, fill=True)
        self.broadcasts = Broadcasts(device, LIMITS)
        node = NodeService(Config(advertise_host="127.0.0.1"))
        stack.callback(node.stop, timeout_s=2.0)
        node.start(num_local_ranks=1)
        environment = node.environment()
        self.agent = RankAgent(
            environment["RFORK_CONTROL"],
            Hello(0, 0, 1, 0, 1),
            environment["RFORK_INSTANCE_ID"],
            is_on=True,
            transports=list,
            make_fence=lambda: FencePage(environment["RFORK_INSTANCE_ID"], device),
            chunk_nbytes=CHUNK_NBYTES,
            broadcasts=self.broadcasts,
        )
        stack.callback(self.agent.close)
        self.agent.loaded(RankIdentity(), WeightsReport(source="checkpoint"))
        self.agent.publish([SeedShard(resolve=lambda: self.shard, identity=IDENTITY, content=CONTENT)])
        node.ready()
        until(lambda: node.closed() is None, 30.0)
        self.listener = node.listener_url or ""

    def holds(self, shard: ResolvedShard) -> bool:
        return all(torch.equal(t.cpu(), shard.tensors[name].cpu()) for name, t in self.shard.tensors.items())


def fork(listener: str, device: torch.device, observer: Any = None) -> tuple[ResolvedShard, WeightsReport]:
    """One client, from lease to release."""
    shard = make_shard(device, fill=False)
    request = LeaseRequest(
        client=f"i-{threading.get_ident()}",
        instance_key=instance_key(IDENTITY, CONTENT),
        identity=IDENTITY.fields,
        engine=IDENTITY.engine,
        content=str(CONTENT),
        rank=RankIdentity(),
        transport="collective",
    )
    with take_lease(listener, request, timeout_s=30) as lease:
        how: dict[str, Any] = {"check_fence": check_fence, "clock": SystemClock(), "observer": observer}
        report = Receiver(device)(PullTarget(shard), lease, GivenFabrics(()), SETTINGS, **how)
    return shard, report


def stand_still(share: float) -> Callable[[], None]:
    def act() -> None:
        print(f"at {share}", flush=True)
        threading.Event().wait(600)

    return act


if __name__ == "__main__":
    place, name, text = sys.argv[1:]
    fork(place, torch.device(name), AtShare(float(text), stand_still(float(text))))
