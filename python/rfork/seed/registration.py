"""An instance at the planner: one thread that looks at the ranks, one that sends heartbeats and reports.

The planner's loss is felt by nobody here: heartbeats back off and come back by themselves. Changes of state go out at
once and nobody waits for them, as the planner chooses by what it heard last and a seed that has closed refuses. Only
memory that is about to go waits until the planner has heard, for a second at most.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from urllib.parse import urlsplit

import msgspec

from rfork.config import Config
from rfork.identity import ANY_LIVE, Content, ModelIdentity, instance_key
from rfork.planner.client import PlannerClient
from rfork.planner.heartbeat import Heartbeater
from rfork.seed import door
from rfork.seed.lifecycle import SeedState
from rfork.seed.node import NodeService
from rfork.seed.snapshot import Snapshot
from rfork.transports.addresses import is_loopback
from rfork.wire.control import WITHDRAWAL_S
from rfork.wire.planner import (
    MAX_LEASES,
    Heartbeat,
    InstanceState,
    LeaseView,
    shown_id,
    shown_identity,
    shown_labels,
)

log = logging.getLogger("rfork")

PING_INTERVAL_S = 2.0
PING_TIMEOUT_S = 5.0
MAX_NODES = 64


class Registration:
    """Keeps `node` registered from `start()` to `stop()`, and delivers what its ranks report. Thread-safe."""

    def __init__(self, node: NodeService, planner: PlannerClient) -> None:
        self._node = node
        self._stopping = threading.Event()
        self._look = threading.Event()
        self._alive = False
        self._told: tuple[str, ...] | None = None
        self._others_serve = True
        self._readers_elsewhere: set[str] = set()
        self._planner_is_local = all(is_loopback(urlsplit(url).hostname or "") for url in planner.urls)
        self._told_of_loopback = False
        self._beats = Heartbeater(
            planner,
            self.describe,
            on_drain=lambda: node.drain("asked for at the planner"),
            instance_id=node.instance_id,
        )
        self._watcher = threading.Thread(target=self._watch, name="rfork-ranks", daemon=True)
        node.on_report = self._beats.report
        node.on_unmapping = lambda: self._beats.beat_now(WITHDRAWAL_S)
        node.subscribe(self._changed)

    def start(self) -> None:
        self._watcher.start()
        self._beats.start()

    def stop(self, why: str) -> None:
        """Withdraw for good; bounded, and never raises."""
        self._stopping.set()
        self._look.set()
        self._beats.stop(why)

    def describe(self) -> Heartbeat | None:
        """The instance as it is now; None while there is nothing to say or a rank is silent.

        While it starts, its ranks are busy loading and nobody is sent to it: then its process speaks for it, which
        keeps its claim to read the disk.
        """
        seen = self._node.snapshot()
        if seen is None or seen.state is SeedState.STOPPED:
            return None
        if seen.state is not SeedState.STARTING and not self._alive:
            return None
        seen = dataclasses.replace(seen, readers=self._readers(seen))
        listener, node = self._listener(), self._node
        beat = heartbeat_of(seen, node.config, node.instance_id, listener)
        if not self._others_serve:
            beat = msgspec.structs.replace(beat, ranks_ready=0)
        word = door.word_for(node.config, node.instance_id, [beat.listener, *beat.nodes])
        return msgspec.structs.replace(beat, ticket=word)

    def _readers(self, seen: Snapshot) -> tuple[str, ...]:
        """Of the whole instance: a client may have finished here and still read from another node."""
        return tuple(sorted({*seen.readers, *self._readers_elsewhere}))

    def _changed(self, state: SeedState) -> None:
        if state is SeedState.STOPPED:
            closed = self._node.closed()
            self._beats.leave(closed.message if closed else "stopped")
        self._look.set()
        self._beats.poke()

    def _listener(self) -> str:
        """What the planner may tell others: loopback only where the planner itself can't be reached from elsewhere."""
        url = self._node.listener_url or ""
        if not is_loopback(urlsplit(url).hostname or "") or self._planner_is_local:
            return url
        if not self._told_of_loopback:
            self._told_of_loopback = True
            log.warning(
                "rfork: no other host can fork from this instance: its listener is %s. Start it with `listen` or "
                "SGLang's --host on an address of its network",
                url,
            )
        return ""

    def _watch(self) -> None:
        failed = False
        while not self._stopping.is_set() and self._node.state is not SeedState.STOPPED:
            self._look.clear()
            try:
                self._look_once()
                failed = False
            except Exception:
                self._alive = False
                if not failed and not self._stopping.is_set():
                    log.exception("rfork: could not look at the ranks; no heartbeats until that works")
                failed = True
            self._look.wait(PING_INTERVAL_S)

    def _look_once(self) -> None:
        alive, seen = self._node.ranks_answer(PING_TIMEOUT_S), self._node.snapshot()
        found = self._node.others.statuses(PING_TIMEOUT_S)
        others = all(status is not None and status.state == SeedState.SERVING.value for status in found)
        self._readers_elsewhere = {reader for status in found if status is not None for reader in status.readers}
        if others != self._others_serve:
            self._others_serve = others
            log.info("rfork: the other nodes of this instance %s", "serve" if others else "do not all serve")
            self._beats.poke()
        if self._alive and not alive and not self._stopping.is_set():
            log.warning("rfork: a rank does not answer; no heartbeats until it does")
        readers = self._readers(seen) if seen is not None else None
        if alive != self._alive or readers != self._told:
            self._alive, self._told = alive, readers
            self._beats.poke()


def heartbeat_of(seen: Snapshot, config: Config, instance_id: str, listener: str) -> Heartbeat:
    """A heartbeat within the bounds of the protocol, whatever clients and users call themselves."""
    identity, content = ModelIdentity(seen.what.engine, seen.what.identity), Content.parse(seen.what.content)
    return Heartbeat(
        instance_id=instance_id,
        instance_key=instance_key(identity, content),
        live_key=instance_key(identity, ANY_LIVE) if content.kind == "live" else "",
        state=InstanceState(seen.state.value),
        listener=listener,
        nodes=list(seen.nodes[:MAX_NODES]),
        content=str(content)[:256],
        generation=seen.generation,
        weight_version=seen.weight_version[:256],
        capacity=config.capacity,
        ranks=seen.num_ranks,
        ranks_ready=min(seen.num_ready, seen.num_ranks),
        leases=[LeaseView(shown_id(client), ttl_s=config.lease_ttl_s) for client in seen.readers[:MAX_LEASES]],
        labels=shown_labels(config.labels),
        parent=shown_id(seen.seed) if seen.seed else ("disk" if seen.is_loaded else ""),
        model=str(seen.what.identity.get("model.architecture", ""))[:256],
        identity=shown_identity(identity.fields),
        reads_disk=seen.what.reads_disk and seen.state is SeedState.STARTING,
    )
