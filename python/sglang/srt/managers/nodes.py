"""Several nodes, one instance: who grants leases of which shard, and when the server as a whole is healthy.

Each node has a service of its own, which knows the ranks of that node alone. What it can't know, its ranks hear over
the WORLD's store; a thread of each asks there, without waiting inside the store, which other threads use too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from typing import TYPE_CHECKING

import msgspec
import torch.distributed as dist

from rfork.config import LISTENER_ENV
from sglang_rfork.srt.managers.board import StoreBoard, world_board

if TYPE_CHECKING:
    from sglang_rfork.srt.managers.rank import RankState

log = logging.getLogger("rfork")

POLL_S = 0.2
HEALTH_WAIT_S = 24 * 3600.0
"""Warm-up and graph capture may take long; a server that is never healthy ends, and its ranks with it."""


class RankPlace(msgspec.Struct, frozen=True):
    """Where the shards of one rank are to be had."""

    listener: str
    shards: tuple[str, ...]


def join(state: RankState) -> None:
    """Tell the other nodes what this rank holds, and its own node what they hold. Returns at once."""
    if state.num_nodes > 1:
        threading.Thread(target=_exchange, args=(state,), name="rfork-nodes", daemon=True).start()


def tell_healthy(state: RankState) -> None:
    """Called in a rank whose node is healthy: pass it on to the nodes that nobody asks for their health."""
    if state.num_nodes > 1 and dist.get_rank() == 0:
        world_board("rfork").set("healthy", b"1")


def _exchange(state: RankState) -> None:
    board = world_board("rfork")
    mine = RankPlace(os.environ.get(LISTENER_ENV, ""), tuple(shard.rank.key for shard in state.shards))
    try:
        board.set(f"place/{dist.get_rank()}", msgspec.msgpack.encode(mine))
        elsewhere: dict[str, str] = {}
        for rank in range(dist.get_world_size()):
            data = _poll(board, f"place/{rank}", state.settings.agree_timeout_s)
            place = msgspec.msgpack.decode(data, type=RankPlace)
            if place.listener and place.listener != mine.listener:
                elsewhere |= dict.fromkeys(place.shards, place.listener)
        state.agent.elsewhere(elsewhere)
        if state.node_rank > 0:
            _poll(board, "healthy", HEALTH_WAIT_S)
            state.agent.healthy()
    except (TimeoutError, RuntimeError) as error:  # torch raises RuntimeErrors where rank 0, whose store it is, is gone
        log.warning("rfork: this node does not know what the others hold: %s", error)


def _poll(board: StoreBoard, key: str, timeout_s: float) -> bytes:
    deadline = time.monotonic() + timeout_s
    while (value := board.poll(key)) is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"nobody set {key!r} within {timeout_s:.0f} s")
        time.sleep(POLL_S)
    return value
