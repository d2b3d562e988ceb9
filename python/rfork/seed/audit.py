"""An audit: weights that serve now, digested again and compared with the table that was published.

For the operator who wants to know, not for a hostile seed: who can change the weights can change the answer.
"""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import msgspec

from rfork.client.verify import describe, differing_chunks
from rfork.manifest import decode_manifest
from rfork.seed.admission import refuse
from rfork.wire.seed import AuditReply, DigestTable, Refusal, ShardAudit

if TYPE_CHECKING:
    from rfork.seed.control import RankPeer
    from rfork.seed.node import NodeService
    from rfork.seed.shards import ShardRecord

MAX_NAMED = 20


class Auditor:
    """One for each node. A shard that differs is offered to nobody any more; the server serves on."""

    def __init__(self, node: NodeService) -> None:
        self._node = node
        self._running = threading.Lock()

    def run(self) -> AuditReply | Refusal:
        """Audit every shard of this node. Waits for as long as digests take: not for an event loop."""
        if not self._running.acquire(blocking=False):
            return refuse("busy", "an audit is under way", retry_after_s=10.0)
        try:
            started_s = time.monotonic()
            shards, elsewhere = self._node.published()
            if not shards:
                return self._node.closed() or refuse("not_a_seed", "this instance has published nothing")
            with ThreadPoolExecutor(len(shards), thread_name_prefix="rfork-audit") as pool:
                found = list(pool.map(lambda pair: self._audit(*pair), shards))
            return AuditReply(
                instance_id=self._node.instance_id,
                seconds=time.monotonic() - started_s,
                shards=sorted(found, key=lambda s: (s.replica, s.rank, s.shard)),
                elsewhere=sorted(elsewhere),
            )
        finally:
            self._running.release()

    def _audit(self, record: ShardRecord, peer: RankPeer) -> ShardAudit:
        published = record.published
        plain = ShardAudit(
            shard=record.ref.key,
            rank=published.rank,
            replica=record.ref.replica,
            generation=record.generation,
            verdict="not_checked",
        )
        table = self._node.digests(record)  # of an update: taken now, if nobody has asked for them before
        if isinstance(table, Refusal):
            return msgspec.structs.replace(plain, why=table.message)
        theirs = msgspec.msgpack.decode(table.raw, type=DigestTable)
        answer = peer.ask("audit", self._node.config.publish_timeout_s)
        mine = dict(answer.digests).get(published.shard)
        if not answer.ok or mine is None:
            return msgspec.structs.replace(plain, why=f"no digests: {answer.error}")
        manifest = decode_manifest(published.manifest)
        if (mine.algorithm, mine.chunk_nbytes) != (theirs.algorithm, theirs.chunk_nbytes):
            return msgspec.structs.replace(plain, why=f"{theirs.algorithm} was published, {mine.algorithm} found")
        wrong = differing_chunks(mine, theirs, manifest, list(range(len(manifest.group_nbytes))))
        named = [describe(chunk, manifest) for chunk in wrong[:MAX_NAMED]]
        if not self._node.condemn(record, f"an audit found other bytes than it published: {named[0]}" if wrong else ""):
            return msgspec.structs.replace(plain, why="the weights changed while they were audited")
        return msgspec.structs.replace(
            plain,
            verdict="differs" if wrong else "equal",
            nbytes=manifest.nbytes,
            num_chunks=sum(map(len, theirs.values)),
            num_differing=len(wrong),
            differing=named,
        )
