"""The node's side of collective transfers: what SGLang's two POST end-points mean, and who gets a group.

A client with R-Fork brings its lease, which names the shard; each of its ranks asks for itself. SGLang's own client
asks once for all its TP ranks and names nothing that could be compared: it is served only where the operator vouches
for it (`stock_nccl_clients: on`) and this side is sure that named parameters are all there is.

A seed listens for its client and dials nobody that a POST names. Once the client has joined, under a name that it alone
was told, gloo and NCCL connect the two members both ways, to addresses that the members tell each other: with a fleet
key to any, since its holders are trusted; else `group_clients` says where to, and who is refused.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import TYPE_CHECKING, NamedTuple, Protocol
from urllib.parse import urlsplit

from rfork.seed.admission import STATUS_CODES, refuse
from rfork.seed.group_clients import peers_of
from rfork.wire.collective import GroupEnded, GroupOrder, InitGroup, InitReply, SendReply, SendWeights
from rfork.wire.seed import Refusal

if TYPE_CHECKING:
    from rfork.auth import Guard
    from rfork.config import Config
    from rfork.seed.control import RankPeer
    from rfork.seed.leases import ShardRef
    from rfork.seed.shards import ShardRecord

logger = logging.getLogger(__name__)

ASK_TIMEOUT_S = 10.0
LOOPBACK = "127.0.0.1"
MAX_PORTS = 1024
MAX_REMEMBERED = 256
Peers = tuple[str, ...] | None
_STORE_DEVICE = {"nccl": "cuda", "gloo": "cpu", "hccl": "npu"}
VOUCH = (
    "SGLang's own client names neither its tensors nor their order, so that nothing proves that they are ours. Install "
    "sglang-rfork there, or use its transfer_engine backend; or, if its command line is this seed's, say so here with "
    "`stock_nccl_clients: on`"
)


class Node(Protocol):
    """What a desk needs of `NodeService`."""

    config: Config
    guard: Guard | None

    @property
    def listener_url(self) -> str | None: ...

    @property
    def bound_host(self) -> str: ...

    def closed(self) -> Refusal | None: ...

    def leased(self, lease_id: str) -> ShardRecord | Refusal: ...

    def shard_of_rank(self, rank: int) -> ShardRecord | None: ...

    def peer_of(self, ref: ShardRef) -> RankPeer | None: ...


class Opened(NamedTuple):
    """Groups of one POST, by the rank that holds each, and how each of them will have ended."""

    groups: tuple[tuple[RankPeer, str], ...]
    ends: tuple[Future[GroupEnded], ...]


class GroupDesk:
    """One for each node. Its calls wait for ranks, so they are not for an event loop."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._open: OrderedDict[str, Opened] = OrderedDict()
        self._ends: dict[str, Future[GroupEnded]] = {}
        self._lock = threading.Lock()

    def init(self, body: InitGroup, caller: str | None) -> InitReply | Refusal:
        """Have the ranks concerned listen, all of them or none. `caller` is the address of who asks, if known."""
        problem = _problem_with(body)
        if problem is not None:
            return problem
        peers = None
        if self._node.guard is None:
            found = peers_of(body, caller, self._node.config.group_clients)
            if isinstance(found, Refusal):
                return found
            peers = found
        return self._init_leased(body, body.lease, peers) if body.lease else self._init_stock(body, peers)

    def send(self, body: SendWeights) -> SendReply | Refusal:
        """Let what `init` opened be sent. A leased client is answered at once, SGLang's own when all is over."""
        key = body.lease or _stock_key(body.group_name, body.ports)
        with self._lock:
            opened = self._open.pop(key, None)
        if opened is None:
            return refuse("unknown_lease", "no group was set up under this name, or it has ended: POST init first")
        for peer, group in opened.groups:
            answer = peer.ask("send", ASK_TIMEOUT_S, group=group)
            if not answer.ok:
                return refuse("unknown_lease", f"rank {peer.hello.rank}: {answer.error}")
        return SendReply(success=True, message="Sending.") if body.lease else self._wait(opened)

    def ended(self, report: GroupEnded) -> None:
        """A rank's group is over; called in that rank's connection thread."""
        with self._lock:
            future = self._ends.pop(report.group, None)
        if future is not None:
            future.set_result(report)

    def _init_leased(self, body: InitGroup, lease: str, peers: Peers) -> InitReply | Refusal:
        ports = _ports(body.ports)
        if ports is None or len(ports) != 1:
            return refuse("bad_request", f"ports: expected one with a lease (0: any free one), got {body.ports[:80]!r}")
        record = self._node.leased(lease)
        if isinstance(record, Refusal):
            return record
        name = secrets.token_hex(16)
        found = self._order([record], ports, body, [name], peers)
        if isinstance(found, Refusal):
            return found
        opened, bound = found
        self._remember(lease, opened)
        return InitReply(success=True, message="Listening.", ports=str(bound[0]), group_name=name)

    def _init_stock(self, body: InitGroup, peers: Peers) -> InitReply | Refusal:
        closed = self._node.closed()
        if closed is not None:
            return closed
        if self._node.config.stock_nccl_clients != "on":
            return refuse("not_for_stock_clients", VOUCH)
        ports = _ports(body.ports)
        if ports is None or 0 in ports:
            return refuse("bad_request", f"ports: expected one from 1 to 65535 for each rank, got {body.ports[:80]!r}")
        records = self._stock_shards(len(ports))
        if isinstance(records, Refusal):
            return records
        device = _STORE_DEVICE[body.backend]
        names = [f"{body.group_name}_{port}_{rank}" for rank, port in enumerate(ports)]
        stores = [f"{name}/{name}//{device}/" for name in names]  # the prefixes that torch puts before a group's keys
        found = self._order(records, ports, body, stores, peers, stock=True)
        if isinstance(found, Refusal):
            return found
        self._remember(_stock_key(body.group_name, body.ports), found[0])
        return InitReply(success=True, message="Succeeded to init group: listening.", ports=body.ports)

    def _stock_shards(self, num_ports: int) -> list[ShardRecord] | Refusal:
        records = []
        for rank in range(num_ports):
            record = self._node.shard_of_rank(rank)
            if record is None:
                return refuse("bad_request", f"ports for {num_ports} ranks, but rank {rank} is not on this node")
            records.append(record)
        target = records[0].published.shard
        if target.pp_size > 1 or target.attn_dp_size > 1 or (peer := self._node.peer_of(records[0].ref)) is None:
            return refuse("bad_request", "pipeline or data parallel ranks: SGLang's own client asks by TP rank alone")
        if peer.hello.num_replicas > 1:
            return refuse("bad_request", "data parallel replicas: SGLang's own client can't say which of them it means")
        if target.tp_size != num_ports:
            return refuse("bad_request", f"ports: expected {target.tp_size}, one for each TP rank, got {num_ports}")
        return records

    def _order(
        self,
        records: Sequence[ShardRecord],
        ports: Sequence[int],
        body: InitGroup,
        stores: Sequence[str],
        peers: Peers,
        *,
        stock: bool = False,
    ) -> tuple[Opened, list[int]] | Refusal:
        """Ask every rank to listen. Where one refuses, those before it end by themselves: nobody comes."""
        host = urlsplit(self._node.listener_url or "").hostname or LOOPBACK
        groups, ends, bound = [], [], []
        for record, port, store in zip(records, ports, stores, strict=True):
            peer = self._node.peer_of(record.ref)
            if peer is None:
                return refuse("not_ready", "the rank is gone")
            order = GroupOrder(
                group=secrets.token_hex(8),
                store_name=store,
                shard=record.published.shard,
                generation=record.generation,
                bind_host=self._node.bound_host,
                port=port,
                interface=host,
                backend=body.backend,
                parameters_only=stock,
                peers=peers,
                limit_gbps=body.limit_gbps,
            )
            end: Future[GroupEnded] = Future()
            with self._lock:
                self._ends[order.group] = end
            answer = peer.ask("group", ASK_TIMEOUT_S, order=order)
            if not answer.ok:
                with self._lock:
                    self._ends.pop(order.group, None)
                return _refusal_of_rank(answer.reason, answer.error or "", self._node.config.lease_ttl_s)
            groups.append((peer, order.group))
            ends.append(end)
            bound.append(answer.port)
        return Opened(tuple(groups), tuple(ends)), bound

    def _remember(self, key: str, opened: Opened) -> None:
        with self._lock:
            self._open[key] = opened
            while len(self._open) > MAX_REMEMBERED:
                self._open.popitem(last=False)

    def _wait(self, opened: Opened) -> SendReply | Refusal:
        for end in opened.ends:
            try:
                report = end.result(self._node.config.publish_timeout_s)
            except (FutureTimeout, TimeoutError):
                return refuse("error", "the weights are still being sent; nobody waits for them here any more")
            if report.why:
                return refuse("error", f"Failed to send weights: {report.why}")
        return SendReply(success=True, message="Succeeded to send weights.")


def reply_body(found: InitReply | SendReply | Refusal) -> tuple[int, dict[str, object]]:
    """Status and body as SGLang's clients know them: `success` and `message`, with our reason beside them."""
    if isinstance(found, Refusal):
        extra = {} if found.retry_after_s is None else {"retry_after_s": found.retry_after_s}
        return STATUS_CODES[found.reason], {"success": False, "message": found.message, "reason": found.reason, **extra}
    if isinstance(found, SendReply):
        return 200, {"success": True, "message": found.message}
    return 200, {"success": True, "message": found.message, "ports": found.ports, "group_name": found.group_name}


def _problem_with(body: InitGroup) -> Refusal | None:
    if body.group_rank != 0 or body.world_size != 2:
        got = f"group_rank {body.group_rank} of world_size {body.world_size}"
        return refuse("bad_request", f"a seed is group rank 0 of a group of two, got {got}")
    if body.backend not in _STORE_DEVICE:
        return refuse("bad_request", f"backend: expected {', '.join(_STORE_DEVICE)}, got {body.backend[:40]!r}")
    if body.limit_gbps is not None and not body.limit_gbps > 0:
        return refuse("bad_request", f"limit_gbps: expected GB/s above 0, got {body.limit_gbps}")
    if not re.fullmatch(r"[\w.:\[\]-]{1,200}", body.group_name):
        return refuse("bad_request", "group_name: expected 1 to 200 letters, digits or . : - _")
    return None


def _ports(text: str) -> list[int] | None:
    parts = text.split(",")
    if len(parts) > MAX_PORTS or not all(re.fullmatch(r" *[0-9]{1,5} *", p) for p in parts):
        return None
    ports = [int(p) for p in parts]
    return ports if all(p < 65536 for p in ports) else None


def _stock_key(group_name: str, ports: str) -> str:
    return f"stock {group_name} {ports}"


def _refusal_of_rank(reason: str, message: str, ttl_s: float) -> Refusal:
    if reason not in STATUS_CODES:
        reason = "not_ready"
    waits = {"busy": 1.0, "paused": 1.0, "not_ready": min(2.0, ttl_s)}
    return refuse(reason, message, retry_after_s=waits.get(reason))
