"""A seed without an engine: a set of tensors behind the product's own seed service, in a process of its own."""

from __future__ import annotations

import multiprocessing
import time
from contextlib import ExitStack
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from rfork.config import Config
from rfork.digest import DEFAULT_CHUNK_NBYTES
from rfork.fence import FencePage
from rfork.identity import RankIdentity
from rfork.seed.node import NodeService
from rfork.seed.offer import SeedShard
from rfork.seed.rank import RankAgent
from rfork.transports.select import gather_facts, serving_transports
from rfork.wire.control import Hello
from rfork.wire.seed import WeightsReport

from . import clientside, sets

READY_S = 120.0


class SeedPlan(NamedTuple):
    """What a seed process does. `fork_from`: take the weights from that seed's listener instead of making them."""

    name: str
    device: str
    protocol: str
    host: str
    fork_from: str | None = None


class SeedProcess:
    """Starts when made; `url` is its listener once `wait()` has returned."""

    def __init__(self, plan: SeedPlan) -> None:
        self.plan = plan
        context = multiprocessing.get_context("forkserver")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_run, args=(there, plan), daemon=True)
        self._process.start()

    def wait(self) -> dict[str, Any]:
        """Facts about the seed: url, bytes, groups, regions and the seconds of its steps. Raises RuntimeError."""
        if not self._pipe.poll(READY_S):
            raise RuntimeError(f"the seed of {self.plan.name} is not ready after {READY_S:g} s")
        facts: dict[str, Any] = self._pipe.recv()
        if "error" in facts:
            raise RuntimeError(f"the seed of {self.plan.name}: {facts['error']}")
        self.url = str(facts["url"])
        return facts

    def stop(self) -> None:
        self._pipe.send("stop")
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _run(pipe: Connection, plan: SeedPlan) -> None:
    try:
        with ExitStack() as stack:
            pipe.send(_serve(stack, plan))
            pipe.recv()
    except Exception as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def _serve(stack: ExitStack, plan: SeedPlan) -> dict[str, Any]:
    device = torch.device(plan.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = Config(protocol=plan.protocol, advertise_host=plan.host)
    facts = gather_facts(device.type, device.index, config)
    node = NodeService(config)
    stack.callback(node.stop)
    node.start(num_local_ranks=1)
    steps_s: dict[str, float] = {}
    started_s = time.perf_counter()
    shapes = sets.shapes_of(plan.name)
    if plan.fork_from is None:
        model = sets.allocate(shapes, device, fill=True)
        inventory, table = sets.inventory_of(model, device), None
    else:
        built = clientside.Built(shapes, device)
        outcome = clientside.make_fork(plan.name, plan.fork_from, config, facts, built).run(built)
        inventory, table = built.inventory, outcome.origin_digests
    steps_s["load"] = time.perf_counter() - started_s
    agent = RankAgent(
        node.environment()["RFORK_CONTROL"],
        Hello(1, 0, 1, 0, 1),
        node.instance_id,
        is_on=True,
        transports=lambda: serving_transports(config, facts),
        make_fence=lambda: FencePage(node.instance_id, device),
        chunk_nbytes=DEFAULT_CHUNK_NBYTES,
    )
    stack.callback(agent.close)
    agent.loaded(RankIdentity(), WeightsReport(source="checkpoint"))
    started_s = time.perf_counter()
    published = agent.publish(
        [SeedShard(inventory.resolve, clientside.identity_of(plan.name), clientside.CONTENT, origin_digests=table)]
    )
    steps_s["publish"] = time.perf_counter() - started_s
    node.ready()
    deadline_s = time.monotonic() + READY_S
    while node.state.value != "serving":
        if not published or time.monotonic() > deadline_s:
            raise RuntimeError(f"the node is {node!r}")
        time.sleep(0.01)
    shard = inventory.resolve()
    return {
        "url": node.listener_url,
        "nbytes": shard.manifest.nbytes,
        "groups": len(shard.addresses),
        "regions": len(shard.regions),
        "steps_s": steps_s,
    }
