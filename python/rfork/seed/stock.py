"""The stock end-point's body, so that an SGLang without R-Fork can read this instance where that is right.

`GET /get_remote_instance_transfer_engine_info?rank=N` answers
`{"rank": N, "remote_instance_transfer_engine_info": [session_id, {name: [address, num_elements, element_nbytes]}]}`.
A stock client compares names and sizes only and has no fence: where it would misread, it gets 409 and the reason.
"""

from __future__ import annotations

import math
import re

import msgspec

from rfork.seed.node import NodeService
from rfork.wire.seed import Refusal

_JSON = "application/json"
_MAX_RANK = 1 << 31
Reply = tuple[int, dict[str, str], bytes]


def stock_reply(node: NodeService, rank_text: str | None, accepts_gzip: bool) -> Reply:
    """Status, headers and body for a rank as it stands in the URL. Never waits: the body was encoded at publication."""
    rank, problem = _parse(rank_text)
    if problem:
        return _error(400, "bad_rank", problem)
    if node.guard is not None:
        return _error(403, "ticket_wanted", "this fleet has a key: a client without R-Fork can't carry a ticket")
    closed = node.closed()
    if closed is not None:
        return _closed(closed)
    shard = node.shard_of_rank(rank)
    if shard is None:
        return _error(404, "unknown_rank", f"rank {rank} is not on this node")
    if shard.stock is None:
        why = shard.published.parameters_refusal or "this rank publishes no table for stock clients"
        return _error(409, "not_for_stock_clients", f"a client without R-Fork would misread rank {rank}: {why}")
    body, headers = shard.stock.choose(accepts_gzip)
    return 200, {"Content-Type": _JSON, **headers}, body


def stock_tables(node: NodeService) -> dict[int, list[object]]:
    """The same for every target rank of this node that a stock client may read, by rank: for programs."""
    if node.closed() is not None:
        return {}
    ranks = {report.rank for report in node.status_reply().ranks if report.role == "target"}
    found = {rank: node.shard_of_rank(rank) for rank in sorted(ranks)}
    return {rank: _info(shard.stock.raw) for rank, shard in found.items() if shard is not None and shard.stock}


def _info(body: bytes) -> list[object]:
    return list(msgspec.json.decode(body)["remote_instance_transfer_engine_info"])


def _parse(text: str | None) -> tuple[int, str]:
    if text is None or not text:
        return 0, "missing query parameter: rank, a non-negative integer"
    if not re.fullmatch(r"[0-9]{1,10}", text) or int(text) >= _MAX_RANK:
        return 0, f"rank: expected a non-negative integer, got {text[:40]!r}"
    return int(text), ""


def _closed(refusal: Refusal) -> Reply:
    # To a stock client an instance that never serves is as absent as one that is not up yet, but waiting won't help.
    status = 409 if refusal.retry_after_s is None else 503
    code, headers, body = _error(status, refusal.reason, refusal.message)
    if refusal.retry_after_s is not None:
        headers["Retry-After"] = str(max(1, math.ceil(refusal.retry_after_s)))
    return code, headers, body


def _error(status: int, reason: str, message: str) -> Reply:
    body = {"error": {"reason": reason, "message": message}}
    return status, {"Content-Type": _JSON}, msgspec.json.encode(body)
