"""A seed whose rank offers collective transfers, and clients that fork from it: real groups over gloo, no servers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from rfork.client.contract import PullSettings
from rfork.client.lease import Lease, take_lease
from rfork.client.receive import Receiver
from rfork.clock import SystemClock
from rfork.fence import check_fence
from rfork.identity import instance_key
from rfork.seed.broadcast import Broadcasts, Limits
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import LeaseRequest, WeightsReport
from support.host_shard import HostShard
from support.seed_node import Seed
from support.seed_rank import CHECKPOINT, IDENTITY, BufferShard

CPU = torch.device("cpu")
LIMITS = Limits(connect_timeout_s=3.0, progress_timeout_s=3.0, close_timeout_s=6.0, max_groups=8)
SETTINGS = PullSettings(connect_timeout_s=3.0, progress_timeout_s=3.0, close_timeout_s=6.0)

_numbers = itertools.count(1)


class GroupSeed(Seed):
    """A node with one rank that serves `shard` by collective transfers."""

    def __init__(
        self, stack: ExitStack, shard: BufferShard | None = None, limits: Limits = LIMITS, **config: Any
    ) -> None:
        super().__init__(stack, **config)
        self.broadcasts = Broadcasts(CPU, limits)
        self.shard = shard or BufferShard()
        self._fields: dict[str, Any] = {}

    def serve(self, **fields: Any) -> GroupSeed:
        self.start()
        self.add(self.shard, agent={"broadcasts": self.broadcasts}, **fields)
        self.node.ready()
        self.wait("serving")
        return self

    def take(self, client: str | None = None, *, signer: Any = None, **changes: Any) -> Lease:
        """A lease for one client's rank."""
        request = LeaseRequest(
            client=client or f"i-client-{next(_numbers)}",
            instance_key=instance_key(IDENTITY, CHECKPOINT),
            identity=IDENTITY.fields,
            engine=IDENTITY.engine,
            content=str(CHECKPOINT),
            rank=self.shard.rank,
            transport="collective",
            **changes,
        )
        return take_lease(self.node.listener_url or "", request, timeout_s=5, signer=signer)

    def target(self) -> HostShard:
        """Empty memory in the shard's layout."""
        return HostShard(self.shard.resolve().manifest, gap=128)

    def fork(self, **how: Any) -> HostShard:
        """One client from lease to release; returns what it holds."""
        target = self.target()
        with self.take() as lease:
            receive(target, lease, **how)
        return target

    def holds(self, target: HostShard) -> bool:
        """Whether a client has this seed's bytes, all of them."""
        return same_bytes(target, self.shard)


def receive(
    target: HostShard,
    lease: Any,
    *,
    settings: PullSettings = SETTINGS,
    port: int = 0,
    queue_timeout_s: float = 5.0,
    signer: Any = None,
    **how: Any,
) -> WeightsReport:
    receiver = Receiver(CPU, port=port, queue_timeout_s=queue_timeout_s, signer=signer)
    fields = {"check_fence": check_fence, "clock": SystemClock(), **how}
    return receiver(target, lease, GivenFabrics(()), settings, **fields)


def same_bytes(target: HostShard, shard: BufferShard) -> bool:
    resolved = shard.resolve()
    start = resolved.buffer.address
    return all(
        bytes(target.group(g)) == bytes(resolved.buffer.view[a - start : a - start + n])
        for g, (a, n) in enumerate(zip(resolved.addresses, resolved.manifest.group_nbytes, strict=True))
    )


class AtShare:
    """An observer that calls `act` once, when this share of the bytes has landed."""

    def __init__(self, share: float, act: Callable[[], None]) -> None:
        self._share, self._act = share, act
        self._total = self._landed = 0
        self.acted = False

    def on_phase(self, name: str) -> None: ...

    def on_total(self, nbytes: int) -> None:
        self._total = nbytes

    def on_bytes(self, nbytes: int) -> None:
        self._landed += nbytes
        if not self.acted and self._landed >= self._share * self._total:
            self.acted = True
            self._act()


def many(sizes: Sequence[int] = (300_000,) * 40) -> BufferShard:
    """A shard that takes dozens of frames."""
    return BufferShard(sizes=sizes)
