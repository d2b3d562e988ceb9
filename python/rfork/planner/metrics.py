"""Prometheus metrics of a planner: counters fed by what happens, gauges read from the state when scraped."""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from rfork.planner.records import Instance
from rfork.planner.service import PlannerService
from rfork.wire.planner import Report

KNOWN_REASONS = frozenset(
    """unreachable refused busy draining paused not_ready not_a_seed other_instance other_node key_mismatch
    unknown_shard live_content unverified manifest_mismatch seed_lost fence digest_mismatch stale_generation timeout
    unauthorized not_understood no_seed no_listener stock_seed self bound transport unsupported cancelled io_error
    planner_unavailable planner_refused planner_full rank_failed seed_off error""".split()  # noqa: SIM905
)
KNOWN_PHASES = frozenset(
    """seek lease build inventory register pair connect read verify finish fallback disk
    warmup total""".split()  # noqa: SIM905
)
SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1280)


class PlannerMetrics:
    """All metrics of one planner, in a registry of its own. Labels come from bounded sets, whatever clients say."""

    def __init__(self, service: PlannerService) -> None:
        self.registry = CollectorRegistry()
        self.asks = Counter("rfork_planner_asks", "Asks by answer", ["answer"], registry=self.registry)
        self.heartbeats = Counter("rfork_planner_heartbeats", "Heartbeats taken", registry=self.registry)
        self.errors = Counter("rfork_planner_errors", "Requests refused, by code", ["code"], registry=self.registry)
        self.events = Counter("rfork_planner_events", "Events by kind", ["kind"], registry=self.registry)
        self.forks = Counter(
            "rfork_planner_forks",
            "Attempts by source, outcome and reason",
            ["source", "outcome", "reason"],
            registry=self.registry,
        )
        self.nbytes = Counter(
            "rfork_planner_forked_bytes", "Bytes read from seeds, as reported", registry=self.registry
        )
        self.phases = Histogram(
            "rfork_planner_phase_seconds", "Seconds by phase", ["phase"], buckets=SECONDS, registry=self.registry
        )
        self.waits = Histogram(
            "rfork_planner_ask_seconds", "How long asks were held open", buckets=SECONDS, registry=self.registry
        )
        self.registry.register(_StateCollector(service))
        service.on_note = lambda note: self.events.labels(note.kind).inc()

    def report(self, report: Report) -> None:
        source = "seed" if report.seed else "disk"
        reason = report.reason if report.reason in KNOWN_REASONS or not report.reason else "other"
        self.forks.labels(source, report.outcome.value, reason).inc()
        if report.seed:
            self.nbytes.inc(report.nbytes)
        for phase, seconds in report.phases_s.items():
            self.phases.labels(phase if phase in KNOWN_PHASES else "other").observe(seconds)

    def text(self) -> bytes:
        text: bytes = generate_latest(self.registry)
        return text


class _StateCollector:
    """Gauges: instances, leases, capacity, waiting clients, heartbeat ages."""

    def __init__(self, service: PlannerService) -> None:
        self._service = service

    def collect(self) -> Iterable[Metric]:
        service = self._service
        state, now = service.state, service.clock.now()
        beats = state.instances.values()
        by_state = GaugeMetricFamily("rfork_planner_instances", "Registered instances", labels=["state"])
        for name, num in Tally(inst.beat.state.value for inst in beats).items():
            by_state.add_metric([name], num)
        yield by_state
        ages = sorted(now - inst.seen_at for inst in beats)
        age = GaugeMetricFamily("rfork_planner_heartbeat_age_seconds", "Age of heartbeats", labels=["quantile"])
        for quantile in (0.5, 0.99, 1.0):
            age.add_metric([f"{quantile:g}"], ages[min(int(quantile * len(ages)), len(ages) - 1)] if ages else 0.0)
        yield age
        oldest = max((now - w.since for p in state.pools.values() for w in p.waiters.values()), default=0.0)
        values = {
            "leases_active": ("Leases and reservations", sum(i.load for i in beats)),
            "offered": ("Instances that are offered", sum(i.offered(now) for i in beats)),
            "capacity_free": ("Further clients that seeds would take", _free(state.instances.values(), now)),
            "set_aside": ("Instances set aside", sum(i.aside_until > now for i in beats)),
            "waiting_clients": ("Clients that wait", len(state.pool_of_waiter)),
            "longest_wait_seconds": ("Longest wait so far", oldest),
            "disk_claims": ("Claims to read the disk", sum(len(p.claims) for p in state.pools.values())),
            "store_up": ("1 if the store answers", float(service.store.healthy)),
        }
        for name, (text, value) in values.items():
            yield GaugeMetricFamily(f"rfork_planner_{name}", text, value=float(value))


def _free(instances: Iterable[Instance], now: float) -> int:
    return sum(max(i.beat.capacity - i.load, 0) for i in instances if i.offered(now))
