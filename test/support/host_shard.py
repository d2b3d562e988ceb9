"""Two ends of a pull in host memory, without a model: a seed that publishes, and a shard to fill."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
import xxhash

from rfork.binding import Binding, Endpoint, Region
from rfork.errors import SeedError
from rfork.fence import FencePage
from rfork.identity import RankIdentity
from rfork.manifest import InlineEntry, Manifest, StateEntry, TensorEntry
from rfork.transports.base import Engine, Transport
from rfork.wire.seed import DigestTable, LeaseReply
from support.buffers import Buffer

CPU = torch.device("cpu")
CHUNK_NBYTES = 64 << 10
SCRATCH_NBYTES = 4096


def manifest_of(sizes: dict[str, int], states: Sequence[StateEntry] = ()) -> Manifest:
    """One dense uint8 tensor per name."""
    names = sorted(sizes)
    return Manifest(
        rank=RankIdentity(),
        tensors=tuple(TensorEntry(n, "uint8", (sizes[n],), (1,), g, 0, "parameter") for g, n in enumerate(names)),
        group_nbytes=tuple(sizes[n] for n in names),
        states=tuple(states),
    )


class HostShard:
    """A LocalShard whose groups lie one after another, `gap` bytes apart, in one buffer."""

    def __init__(self, manifest: Manifest, *, gap: int = 0) -> None:
        self.manifest = manifest
        self.buffer = Buffer(max(1, sum(n + gap for n in manifest.group_nbytes)))
        starts, at = [], 0
        for nbytes in manifest.group_nbytes:
            starts.append(self.buffer.address + at)
            at += nbytes + gap
        self.addresses = tuple(starts)
        self.scratch = Buffer(SCRATCH_NBYTES)
        self.applied: list[StateEntry | InlineEntry] = []
        self.num_synchronized = 0

    @property
    def slack(self) -> tuple[int, ...]:
        return (0,) * len(self.addresses)

    @property
    def regions(self) -> tuple[Region, ...]:
        return tuple(sorted([self.buffer.region, self.scratch.region]))

    def scratch_page(self) -> tuple[int, int]:
        self.scratch.view[:] = bytes(SCRATCH_NBYTES)
        return self.scratch.address, SCRATCH_NBYTES

    def read_scratch(self) -> bytes:
        return bytes(self.scratch.view)

    def synchronize(self) -> None:
        self.num_synchronized += 1

    def digests(self, chunk_nbytes: int, groups: Sequence[int]) -> DigestTable:
        rows = [self._row(g, chunk_nbytes) if g in set(groups) else () for g in range(len(self.addresses))]
        return DigestTable("xxh3-64", chunk_nbytes, tuple(rows))

    def begin_digests(self, chunk_nbytes: int) -> ArrivingDigests:
        return ArrivingDigests(self, chunk_nbytes)

    def _row(self, group: int, chunk_nbytes: int) -> tuple[int, ...]:
        data = self.group(group)
        return tuple(xxhash.xxh3_64_intdigest(data[at : at + chunk_nbytes]) for at in range(0, len(data), chunk_nbytes))

    def group(self, group: int) -> memoryview:
        """The bytes of one group."""
        start = self.addresses[group] - self.buffer.address
        return self.buffer.view[start : start + self.manifest.group_nbytes[group]]

    def group_bytes(self, group: int) -> memoryview:
        return self.group(group)

    def copy_in(self, group: int, source: memoryview) -> None:
        self.group(group)[:] = source

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        self.applied += [*states, *inline]

    def same_bytes(self, other: HostShard) -> bool:
        return all(self.group(g) == other.group(g) for g in range(len(self.addresses)))

    @property
    def is_untouched(self) -> bool:
        return self.buffer.num_nonzero_tail(0) == 0


class ArrivingDigests:
    """Takes each group's digests the moment it is fed: a group that is fed too early is digested wrong."""

    def __init__(self, shard: HostShard, chunk_nbytes: int) -> None:
        self._shard = shard
        self._table = shard.digests(chunk_nbytes, ())

    def feed(self, groups: Sequence[int]) -> None:
        now = self._shard.digests(self._table.chunk_nbytes, groups).values
        rows = tuple(new or old for new, old in zip(now, self._table.values, strict=True))
        self._table = msgspec.structs.replace(self._table, values=rows)

    def table(self) -> DigestTable:
        return self._table


class HostSeed:
    """A published shard with filled memory, its fence, and one serving engine per transport."""

    def __init__(self, manifest: Manifest, transports: Sequence[Transport], *, gap: int = 0) -> None:
        self.shard = HostShard(manifest, gap=gap)
        self.shard.buffer.fill()
        self.instance_id = "i-seed"
        self.fence = FencePage(self.instance_id, CPU)
        self.generation = self.fence.open()
        self.engines: list[Engine] = [t.open() for t in transports]
        self.regions = tuple(sorted([self.shard.buffer.region, Region(self.fence.address, self.fence.nbytes)]))
        for engine in self.engines:
            engine.register(self.regions)
        self.endpoints = tuple(
            Endpoint(e.protocol, e.session_id, t.scope) for e, t in zip(self.engines, transports, strict=True)
        )
        self.table = self.shard.digests(CHUNK_NBYTES, range(len(manifest.group_nbytes)))

    def close(self) -> None:
        for engine in self.engines:
            engine.close(10)

    def lease(self, **changes: object) -> HostLease:
        """A lease on it; `changes` replace fields of the reply."""
        manifest = self.shard.manifest
        binding = Binding(
            manifest_digest=manifest.digest,
            generation=self.generation,
            regions=self.regions,
            addresses=self.shard.addresses,
            group_nbytes=manifest.group_nbytes,
            fence_address=self.fence.address,
            fence_nbytes=self.fence.nbytes,
            endpoints=self.endpoints,
        )
        reply = LeaseReply(
            lease="l-1",
            ttl_s=30,
            instance_id=self.instance_id,
            generation=self.generation,
            content="checkpoint:1",
            weight_version=None,
            manifest_digest=manifest.digest,
            manifest_path="/manifest",
            digests_path="/digests",
            binding=binding,
        )
        return HostLease(msgspec.structs.replace(reply, **changes), manifest, self.table)


class HostLease:
    """A lease whose manifest and digests are at hand; `lost` ends it early."""

    address = "http://127.0.0.1:1"

    def __init__(self, reply: LeaseReply, manifest: Manifest, table: DigestTable) -> None:
        self.reply = reply
        self.the_manifest = manifest
        self.table = table
        self.lost: SeedError | None = None
        self.num_digest_requests = 0

    def manifest(self) -> Manifest:
        return self.the_manifest

    def digests(self) -> DigestTable:
        self.num_digest_requests += 1
        return self.table

    def check(self) -> None:
        if self.lost is not None:
            raise self.lost
