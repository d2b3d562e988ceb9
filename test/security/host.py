"""One end of a fork as a process that a test puts into a network namespace, with Mooncake and no model.

python -m security.host seed HOST CONFIG    serve until stdin ends; HOST is what SGLang's --host would be
python -m security.host client ADDRESS CONFIG    fork from there, and say what came of it
"""

from __future__ import annotations

import json
import socket
import sys
from typing import Any

import msgspec
from support.host_shard import HostShard
from support.seed_node import lease_body
from support.seed_rank import BufferShard, make_agent, report, seed_shard

from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.pull import pull
from rfork.client.resolve import resolve
from rfork.clock import SystemClock
from rfork.config import Config, load_config
from rfork.errors import SeedError
from rfork.fence import check_fence
from rfork.seed.app import make_app
from rfork.seed.lifecycle import SeedState
from rfork.seed.listener import Listener
from rfork.seed.node import NodeService
from rfork.transports.select import MooncakeFabrics, gather_facts, serving_transports
from rfork.wire.seed import LeaseRequest


def seed(host: str, config: Config) -> dict[str, Any]:
    """Start a seed, and beside its listener a port on `host` that answers as SGLang's does."""
    node = NodeService(config)
    node.start(host=host, num_local_ranks=1)
    shard = BufferShard()
    transports = serving_transports(config, gather_facts("cpu", None, config))
    agent = make_agent(node.environment(), transports=lambda: transports)
    agent.loaded(shard.rank, report())
    agent.publish([seed_shard(shard)])
    node.ready()
    clock = SystemClock()
    while node.state is SeedState.STARTING:
        clock.sleep(0.01)
    front = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    Listener(make_app(node), front, "front").start()
    sessions = [e.session_id for e in agent._engines.endpoints]
    return {
        "state": node.state.value,
        "why": getattr(node.closed(), "message", ""),
        "listener": node.listener_url,
        "sessions": sessions,
        "port": front.getsockname()[1],
    }


def client(address: str, config: Config) -> dict[str, Any]:
    """Fork from the seed at `address`."""
    wanted = BufferShard()
    shard = HostShard(wanted.resolve().manifest)
    fabrics = MooncakeFabrics(config, gather_facts("cpu", None, config))
    try:
        found = resolve(address, timeout_s=10)
        request = msgspec.convert(lease_body(seed=found.instance_id), LeaseRequest)
        with take_lease(found.listener, request, timeout_s=10) as lease:
            done = pull(shard, lease, fabrics, PullSettings(), check_fence=check_fence, clock=SystemClock())
    except SeedError as error:
        return {"reason": error.reason, "message": str(error)}
    return {"reason": "", "equal": shard.buffer.view == wanted.buffer.view, "protocol": done.protocol}


def main() -> None:
    role, where, config = sys.argv[1:]
    settings = load_config(None, {"RFORK_CONFIG": config})
    print("\n" + json.dumps((seed if role == "seed" else client)(where, settings)), flush=True)
    if role == "seed":
        sys.stdin.read()


if __name__ == "__main__":
    main()
