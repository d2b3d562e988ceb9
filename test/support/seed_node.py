"""A node with its listener, its ranks and a client; and how to wait for other threads. All on 127.0.0.1."""

import json
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import httpx

from rfork.config import load_config
from rfork.identity import InstanceId, instance_key
from rfork.seed.node import NodeService
from rfork.seed.rank import RankAgent
from rfork.transports.memory import MemoryFabric
from support.seed_rank import CHECKPOINT, IDENTITY, BufferShard, make_agent, report, seed_shard


def until(condition: Callable[[], Any], timeout_s: float = 10.0) -> None:
    """Wait for another thread; fails after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)


class Seed:
    """A node, its agents and an HTTP client to its listener."""

    def __init__(self, stack: ExitStack, *, instance_id: InstanceId | None = None, **config: Any) -> None:
        self.node = NodeService(load_config(None, {"RFORK_CONFIG": json.dumps(config)}), instance_id=instance_id)
        stack.callback(self.node.stop, timeout_s=2.0)
        self._stack = stack
        self.fabric = MemoryFabric()
        self.agents: list[RankAgent] = []
        self.shards: list[BufferShard] = []

    def start(self, num_local_ranks: int | None = 1) -> "Seed":
        self.node.start(num_local_ranks=num_local_ranks)
        self.http = self._stack.enter_context(httpx.Client(base_url=self.node.listener_url or "", timeout=20))
        return self

    def add(
        self, shard: BufferShard | None = None, *, publish: bool = True, agent: Any = None, **fields: Any
    ) -> RankAgent:
        """A rank with one shard, loaded and published."""
        shard = shard or BufferShard()
        made = make_agent(self.node.environment(), self.fabric, **(agent or {}))
        self._stack.callback(made.close)
        made.loaded(shard.rank, report())
        self.agents.append(made)
        self.shards.append(shard)
        if publish:
            made.publish([seed_shard(shard, **fields)])
        return made

    def serve(self) -> "Seed":
        """One rank, healthy, serving."""
        self.start()
        self.add()
        self.node.ready()
        self.wait("serving")
        return self

    def wait(self, state: str) -> None:
        until(lambda: self.node.state.value == state)

    def lease(self, **overrides: Any) -> httpx.Response:
        return self.http.post("/rfork/v1/leases", json=lease_body(**overrides))


def lease_body(**overrides: Any) -> dict[str, Any]:
    shard = overrides.pop("shard", None) or BufferShard()
    body = {
        "client": "i-client",
        "instance_key": instance_key(IDENTITY, CHECKPOINT),
        "identity": IDENTITY.fields,
        "engine": IDENTITY.engine,
        "content": str(CHECKPOINT),
        "rank": {f: getattr(shard.rank, f) for f in shard.rank.__struct_fields__},
    }
    return {**body, **overrides}
