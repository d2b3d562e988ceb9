"""Every metric of an instance, once.

One writer: the node's main process. `prometheus_client` chooses between memory and files (PROMETHEUS_MULTIPROC_DIR)
when it is first imported, and SGLang sets that variable late; so `open()` imports it, once the server is healthy and
never before. With the variable set, the values show on SGLang's own /metrics too; always on rfork's listener.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from rfork.wire.seed import StatusReply, WeightsReport

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
STATES = ("starting", "serving", "paused", "draining", "stopped")


class Spec(NamedTuple):
    """A metric: counters end in `_total`, everything else is a gauge."""

    name: str
    labels: tuple[str, ...]
    help: str


SPECS = (
    Spec("rfork_weights_source", ("rank", "role", "source", "protocol", "verify"), "1 for where weights came from"),
    Spec("rfork_weights_bytes", ("rank", "role"), "bytes of weights that were read from a seed"),
    Spec("rfork_weights_seconds", ("rank", "role"), "seconds from the start of loading to weights in place"),
    Spec("rfork_weights_gbps", ("rank", "role"), "GB/s while the weights were read"),
    Spec("rfork_phase_seconds", ("rank", "role", "phase"), "seconds that a phase of loading took"),
    Spec("rfork_fallbacks_total", ("reason",), "shards whose weights another loader had to load"),
    Spec("rfork_seed_state", ("state",), "1 for the state that this seed is in"),
    Spec("rfork_seed_generation", (), "generation of the weights that this seed offers"),
    Spec("rfork_seed_readers", (), "clients that read now"),
    Spec("rfork_leases_granted_total", (), "leases granted"),
    Spec("rfork_leases_refused_total", ("reason",), "leases refused"),
)


class Facts(NamedTuple):
    """What is shown: read from the node when it is asked for, so nothing is counted twice."""

    status: StatusReply
    num_readers: int
    num_granted: int
    refused: dict[str, int]


class InstanceMetrics:
    """Thread-safe. `read` is called at each update; it must not wait."""

    def __init__(self, read: Callable[[], Facts]) -> None:
        self._read = read
        self._lock = threading.Lock()
        self._registry: Any = None
        self._metrics: dict[str, Any] = {}
        self._counted: dict[tuple[str, tuple[str, ...]], float] = {}

    def open(self) -> None:
        """Make the metrics. Does nothing where prometheus_client is not installed."""
        with self._lock:
            if self._registry is None:
                self._registry = self._make()
        self.update()

    def update(self) -> None:
        """Take the facts over, from `open()` on."""
        facts = self._read()  # not under our lock: the owner of the facts has one of its own
        with self._lock:
            if self._registry is not None:
                self._set(facts)

    def render(self) -> bytes:
        """This process's metrics as text for a scraper."""
        self.update()
        if self._registry is None:
            return b"# no metrics: the server is not healthy yet, or prometheus_client is not installed\n"
        from prometheus_client import generate_latest

        return bytes(generate_latest(self._registry))

    def _make(self) -> Any:
        try:
            import prometheus_client
        except ImportError:
            return None
        registry = prometheus_client.CollectorRegistry()
        for spec in SPECS:
            if spec.name.endswith("_total"):
                metric: Any = prometheus_client.Counter(spec.name, spec.help, spec.labels, registry=registry)
            else:
                metric = prometheus_client.Gauge(
                    spec.name, spec.help, spec.labels, registry=registry, multiprocess_mode="mostrecent"
                )
            self._metrics[spec.name] = metric
        return registry

    def _set(self, facts: Facts) -> None:
        fallbacks: dict[str, int] = {}
        for report in facts.status.ranks:
            where = (str(report.rank), report.role)
            self._weights(where, report.weights)
            reason = report.weights.fallback_reason
            if reason is not None:
                fallbacks[reason] = fallbacks.get(reason, 0) + 1
        for state in STATES:
            self._gauge("rfork_seed_state", float(state == facts.status.state), state)
        self._gauge("rfork_seed_generation", facts.status.generation)
        self._gauge("rfork_seed_readers", facts.num_readers)
        self._count("rfork_leases_granted_total", facts.num_granted)
        for reason, count in facts.refused.items():
            self._count("rfork_leases_refused_total", count, reason)
        for reason, count in fallbacks.items():
            self._count("rfork_fallbacks_total", count, reason)

    def _weights(self, where: tuple[str, str], weights: WeightsReport) -> None:
        origin = (weights.source, weights.protocol or "", weights.verify or "")
        self._gauge("rfork_weights_source", 1, *where, *origin)
        self._gauge("rfork_weights_bytes", weights.nbytes, *where)
        self._gauge("rfork_weights_seconds", weights.seconds, *where)
        self._gauge("rfork_weights_gbps", weights.gbps, *where)
        for phase, seconds in weights.phases_s.items():
            self._gauge("rfork_phase_seconds", seconds, *where, phase)

    def _gauge(self, name: str, value: float, *labels: str) -> None:
        metric = self._metrics[name]
        (metric.labels(*labels) if labels else metric).set(value)

    def _count(self, name: str, total: float, *labels: str) -> None:
        """Bring a counter up to `total`, a number that never goes down."""
        more = total - self._counted.get((name, labels), 0)
        if more > 0:
            metric = self._metrics[name]
            (metric.labels(*labels) if labels else metric).inc(more)
            self._counted[name, labels] = total
