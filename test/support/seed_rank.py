"""A rank without a model: real memory, a real fence, the memory transport, and the product's own `RankAgent`.

As a program, `python -m support.seed_rank CONTROL INSTANCE RANK NUM_RANKS`, it publishes one shard and waits.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch

from rfork.binding import Region
from rfork.digest import digest_groups
from rfork.fence import FencePage
from rfork.identity import Content, ModelIdentity, RankIdentity
from rfork.manifest import Manifest, TensorEntry
from rfork.seed.offer import SeedShard
from rfork.seed.rank import RankAgent
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.wire.control import Hello
from rfork.wire.seed import DigestTable, WeightsReport
from support.buffers import Buffer

CPU = torch.device("cpu")
CHUNK_NBYTES = 1 << 16
SIZES = (64, 4096, 100_000)
CHECKPOINT = Content("checkpoint", "c0ffee")
IDENTITY = ModelIdentity("test", {"model.architecture": "Tiny", "dtype": "uint8", "parallel.tp_size": 1})
STOCK_TABLE = {"layers.0.weight": (4096, 64, 1)}


class BufferShard:
    """A shard in one buffer: tensors of the sizes given, one alias group each. Change `buffer` or `names` at will."""

    def __init__(self, rank: RankIdentity | None = None, sizes: Sequence[int] = SIZES, seed: int = 1) -> None:
        self.rank = rank or RankIdentity()
        self.sizes = tuple(sizes)
        self.names = [f"layers.{i}.weight" for i in range(len(self.sizes))]
        self.buffer = Buffer(sum(self.sizes)).fill(seed)

    def move(self, seed: int) -> None:
        """The same tensors at another place, with other bytes."""
        self.buffer = Buffer(sum(self.sizes)).fill(seed)

    def resolve(self) -> ResolvedBuffer:
        return ResolvedBuffer(self)


class ResolvedBuffer:
    def __init__(self, shard: BufferShard) -> None:
        self.buffer = shard.buffer
        entries = [
            TensorEntry(name, "uint8", (nbytes,), (1,), group, 0, "parameter")
            for group, (name, nbytes) in enumerate(zip(shard.names, shard.sizes, strict=True))
        ]
        self.manifest = Manifest(shard.rank, tuple(entries), shard.sizes)
        starts = itertools.accumulate(shard.sizes[:-1], initial=0)
        self.addresses = tuple(self.buffer.address + start for start in starts)

    def regions_for(self, extra_tensors: Sequence[Any] = ()) -> tuple[Region, ...]:
        extra = [Region(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in extra_tensors]
        return (self.buffer.region, *extra)

    def digests(self, chunk_nbytes: int = CHUNK_NBYTES) -> DigestTable:
        return digest_groups(self.addresses, self.manifest.group_nbytes, CPU, chunk_nbytes, None)

    def synchronize(self) -> None:
        pass


def seed_shard(shard: BufferShard, **overrides: Any) -> SeedShard:
    fields = {"content": CHECKPOINT, "identity": IDENTITY, "stock_table": lambda: STOCK_TABLE}
    return SeedShard(resolve=shard.resolve, **{**fields, **overrides})


def report(**overrides: Any) -> WeightsReport:
    fields = {"source": "checkpoint", "nbytes": 7, "seconds": 1.5, "phases_s": {"build": 1.0}}
    return WeightsReport(**{**fields, **overrides})


def make_agent(
    environment: dict[str, str],
    fabric: MemoryFabric | None = None,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    replica: int = 0,
    num_replicas: int = 1,
    is_on: bool = True,
    pid: int = 4242,
    **overrides: Any,
) -> RankAgent:
    """An agent that is connected to the node whose `environment()` is given."""
    instance = environment["RFORK_INSTANCE_ID"]
    transports = [MemoryTransport(fabric or MemoryFabric())]
    fields = {"transports": lambda: transports, "make_fence": lambda: FencePage(instance, CPU)}
    return RankAgent(
        environment["RFORK_CONTROL"],
        Hello(pid, rank, num_ranks, replica, num_replicas),
        instance,
        is_on=is_on,
        chunk_nbytes=CHUNK_NBYTES,
        **{**fields, **overrides},
    )


def main() -> None:
    control, instance, rank, num_ranks = sys.argv[1:]
    shard = BufferShard(RankIdentity(tp_rank=int(rank), tp_size=int(num_ranks)))
    agent = make_agent(
        {"RFORK_CONTROL": control, "RFORK_INSTANCE_ID": instance}, rank=int(rank), num_ranks=int(num_ranks)
    )
    agent.loaded(shard.rank, report())
    print("published" if agent.publish([seed_shard(shard)]) else "refused", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
