"""An instance at the planner: one thread that looks at the ranks, one that sends heartbeats.

The planner's loss is felt by nobody here: heartbeats back off and come back by themselves.
"""

from __future__ import annotations

import logging
import threading

from rfork.config import Config
from rfork.identity import ANY_LIVE, Content, ModelIdentity, instance_key
from rfork.planner.client import Heartbeater, PlannerClient
from rfork.seed.lifecycle import SeedState
from rfork.seed.node import NodeService
from rfork.wire.planner import Heartbeat, InstanceState, LeaseView, Report

log = logging.getLogger("rfork")

PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 5.0


class Registration:
    """Keeps `node` registered from `start()` to `stop()`. Thread-safe."""

    def __init__(self, node: NodeService, planner: PlannerClient) -> None:
        self._node = node
        self._config: Config = node.config
        self._stopping = threading.Event()
        self._alive = False
        self._beats = Heartbeater(planner, self.describe, on_drain=lambda: node.drain("asked for at the planner"))
        self._watcher = threading.Thread(target=self._watch, name="rfork-ranks", daemon=True)
        node.subscribe(lambda state: self._beats.poke())

    def start(self) -> None:
        self._watcher.start()
        self._beats.start()

    def stop(self, why: str) -> None:
        """Withdraw for good; bounded, and never raises."""
        self._stopping.set()
        self._beats.stop(why)

    def report(self, report: Report) -> None:
        self._beats.report(report)

    def describe(self) -> Heartbeat | None:
        """The instance as it is now; None while there is nothing to say or a rank is silent."""
        seen = self._node.snapshot()
        if seen is None or seen.state is SeedState.STOPPED:
            return None
        if seen.state is not SeedState.STARTING and not self._alive:
            return None
        identity = ModelIdentity(seen.what.engine, seen.what.identity)
        content = Content.parse(seen.what.content)
        return Heartbeat(
            instance_id=self._node.instance_id,
            instance_key=instance_key(identity, content),
            live_key=instance_key(identity, ANY_LIVE) if content.kind == "live" else "",
            state=InstanceState(seen.state.value),
            listener=self._node.listener_url or "",
            content=str(content),
            generation=seen.generation,
            weight_version=seen.weight_version,
            capacity=self._config.capacity,
            ranks=seen.num_ranks,
            ranks_ready=min(seen.num_ready, seen.num_ranks),
            leases=[LeaseView(client) for client in seen.readers],
            labels=self._config.labels,
            parent=seen.seed or ("disk" if seen.is_loaded else ""),
            model=str(seen.what.identity.get("model.architecture", "")),
            identity=identity.fields,
        )

    def _watch(self) -> None:
        while not self._stopping.wait(PING_INTERVAL_S):
            alive = self._node.ranks_answer(PING_TIMEOUT_S)
            if alive != self._alive:
                self._alive = alive
                if not alive:
                    log.warning("rfork: a rank does not answer; no heartbeats until it does")
                self._beats.poke()
