"""What a node has been told: one record for each rank, one for each shard that it publishes. No sockets, no clock.

Everything that a client may ask for is encoded and compressed once, when it is published, in the thread of the rank's
connection; requests only hand out bytes.
"""

from __future__ import annotations

import gzip
import hashlib
import threading
from dataclasses import dataclass, field

import msgspec

from rfork.identity import Content, InstanceKey, ModelIdentity, RankIdentity, instance_key
from rfork.manifest import decode_manifest
from rfork.seed.control import RankPeer
from rfork.seed.leases import ShardRef
from rfork.wire.control import Changing, Hello, Loaded, Published, Refused
from rfork.wire.seed import DigestTable, RankReport, WeightsReport

GZIP_LEVEL = 1
"""Names repeat so much that the fastest level already gets a manifest below a tenth."""


class Blob:
    """Bytes ready to be sent, plain and gzipped; `etag` names them."""

    def __init__(self, raw: bytes, etag: str | None = None) -> None:
        self.raw = raw
        self.gzipped = gzip.compress(raw, GZIP_LEVEL, mtime=0)
        self.etag = etag or hashlib.sha256(raw).hexdigest()

    def choose(self, accepts_gzip: bool) -> tuple[bytes, dict[str, str]]:
        headers = {"Vary": "Accept-Encoding", "ETag": f'"{self.etag}"'}
        if not accepts_gzip:
            return self.raw, headers
        return self.gzipped, {**headers, "Content-Encoding": "gzip"}


class ShardRecord:
    """One publication of one shard. Raises ValueError if its manifest and binding do not belong together.

    What an update leaves as it was is taken over from the `previous` publication: updates come often, layouts stay.
    """

    published: Published
    manifest: Blob
    manifest_digest: str

    def __init__(self, published: Published, replica: int, previous: ShardRecord | None = None) -> None:
        if previous is not None and previous.published.manifest == published.manifest:
            self.manifest, self.manifest_digest = previous.manifest, previous.manifest_digest
            rank, group_nbytes = previous.published.shard, previous.published.binding.group_nbytes
        else:
            manifest = decode_manifest(published.manifest)
            # Carried values and inline bytes are outside the manifest's digest, so the ETag is that of the bytes.
            self.manifest, self.manifest_digest = Blob(published.manifest), manifest.digest
            rank, group_nbytes = manifest.rank, manifest.group_nbytes
        binding = published.binding
        if self.manifest_digest != binding.manifest_digest or group_nbytes != binding.group_nbytes:
            raise ValueError(f"{published.shard.key}: manifest and binding do not describe the same tensors")
        if rank != published.shard or binding.generation != published.generation:
            raise ValueError(f"{published.shard.key}: manifest, binding and publication contradict each other")
        self.published = published
        self.ref = ShardRef(published.shard.key, replica)
        self.identity = ModelIdentity(published.engine, published.identity)
        self.content = Content.parse(published.content)
        self.key: InstanceKey = instance_key(self.identity, self.content)
        self.generation = published.generation
        self.digests = Blob(msgspec.msgpack.encode(published.digests)) if published.digests else None
        self.digesting = threading.Lock()
        self.stock = _stock_blob(published)

    def take_digests(self, table: DigestTable) -> Blob:
        self.digests = Blob(msgspec.msgpack.encode(table))
        return self.digests

    def __repr__(self) -> str:
        return f"<ShardRecord {self.ref.key} replica={self.ref.replica} generation={self.generation} {self.content}>"


def _stock_blob(published: Published) -> Blob | None:
    """The stock end-point's exact body, or None where a stock client is refused."""
    if published.parameters is None or not published.binding.endpoints:
        return None
    info = [published.binding.endpoints[0].session_id, published.parameters]
    return Blob(msgspec.json.encode({"rank": published.rank, "remote_instance_transfer_engine_info": info}))


@dataclass
class RankRecord:
    """A rank process from its Hello on. `changing`, `refused` and `gone` carry the reason."""

    peer: RankPeer
    loaded: dict[RankIdentity, Loaded] = field(default_factory=dict)
    shards: dict[RankIdentity, ShardRecord] = field(default_factory=dict)
    changing: str | None = None
    refused: str | None = None
    gone: str | None = None

    @property
    def hello(self) -> Hello:
        return self.peer.hello

    @property
    def is_complete(self) -> bool:
        """Every shard that it loaded is published, all at one generation, and nothing changes."""
        if self.changing or self.refused or self.gone or not self.shards:
            return False
        return self.loaded.keys() <= self.shards.keys() and len({s.generation for s in self.shards.values()}) == 1

    @property
    def refs(self) -> frozenset[ShardRef]:
        return frozenset(shard.ref for shard in self.shards.values())

    @property
    def state(self) -> str:
        if self.gone or self.refused:
            return f"gone: {self.gone}" if self.gone else f"refused: {self.refused}"
        if self.changing:
            return f"changing: {self.changing}"
        return "published" if self.is_complete else "loaded"

    def __repr__(self) -> str:
        return f"<Rank {self.hello.rank} replica={self.hello.replica} {self.state} shards={len(self.shards)}>"


class ShardTable:
    """All ranks of one node. Not thread-safe: its owner holds a lock."""

    def __init__(self) -> None:
        self.ranks: dict[tuple[int, int], RankRecord] = {}

    def hello(self, peer: RankPeer) -> RankRecord | None:
        """Take a rank in; returns the record that it displaces (a process that took another's place)."""
        place = (peer.hello.replica, peer.hello.rank)
        displaced = self.ranks.get(place)
        self.ranks[place] = RankRecord(peer)
        return displaced

    def of(self, peer: RankPeer) -> RankRecord | None:
        record = self.ranks.get((peer.hello.replica, peer.hello.rank))
        return record if record is not None and record.peer is peer else None

    def apply(self, rank: RankRecord, message: Loaded | Changing | Refused | ShardRecord) -> None:
        match message:
            case Loaded():
                rank.loaded[message.shard] = message
            case Changing():
                rank.changing = message.why
            case Refused():
                rank.refused = message.why
            case ShardRecord():
                rank.shards[message.published.shard] = message
                rank.changing = None

    def is_complete(self, num_expected: int | None) -> bool:
        """All ranks that this node should have are published. Without a number, the ranks' own word counts."""
        if not self.ranks:
            return False
        hello = next(iter(self.ranks.values())).hello
        num_expected = hello.num_ranks * hello.num_replicas if num_expected is None else num_expected
        return len(self.ranks) >= num_expected and all(r.is_complete for r in self.ranks.values())

    def shards(self) -> list[ShardRecord]:
        return [s for r in self.ranks.values() if not r.gone for s in r.shards.values()]

    def find(self, ref: ShardRef) -> ShardRecord | None:
        return next((s for s in self.shards() if s.ref == ref), None)

    def rank_of(self, ref: ShardRef) -> RankRecord | None:
        return next((r for r in self.ranks.values() if ref in r.refs), None)

    def target(self) -> ShardRecord | None:
        """The shard that stands for the instance in status and planner."""
        return min((s for s in self.shards() if s.published.shard.role == "target"), key=_order, default=None)

    def reports(self) -> list[RankReport]:
        out = []
        for rank in sorted(self.ranks.values(), key=lambda r: (r.hello.replica, r.hello.rank)):
            for shard, loaded in sorted(rank.loaded.items()):
                record = rank.shards.get(shard)
                generation = record.generation if record else 0
                out.append(
                    RankReport(
                        shard=shard.key,
                        rank=loaded.rank,
                        role=shard.role,
                        state=rank.state,
                        generation=generation,
                        weights=loaded.report,
                    )
                )
        return out


def summary(reports: list[RankReport]) -> WeightsReport | None:
    """The report that stands for the instance: of its target shards one that fell back, else the slowest."""
    targets = [r.weights for r in reports if r.role == "target"]
    return max(targets, key=lambda w: (w.fallback_reason is not None, w.seconds), default=None)


def _order(shard: ShardRecord) -> tuple[int, int]:
    return shard.ref.replica, shard.published.rank
