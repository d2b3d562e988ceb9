"""With --enable-metrics an instance's own story stands on SGLang's /metrics, beside SGLang's metrics."""

from __future__ import annotations

import re

import pytest
from support.forking import start_fork, start_seed
from support.models import Models
from support.server import STOCK, Fleet, Server

pytestmark = pytest.mark.server

LINE = re.compile(r"^(?P<name>[a-zA-Z_:]+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)$")


def scrape(server: Server) -> dict[tuple[str, str], float]:
    """(name, labels) to value; labels as they stand, without SGLang's own that differ between servers."""
    answer = server.http.get("/metrics", follow_redirects=True)
    assert answer.status_code == 200
    found = [m for m in map(LINE.match, answer.text.splitlines()) if m]
    return {(m["name"], m["labels"] or ""): float(m["value"]) for m in found}


def test_source_fallback_and_phases_stand_beside_sglangs_own(fleet: Fleet, models: Models) -> None:
    path = models.path("llama")
    stock = fleet.start(path, "--enable-metrics", env=STOCK)
    seed = start_seed(fleet, path, "--enable-metrics")
    fork = start_fork(fleet, path, seed.port, "--enable-metrics")
    fallen = start_fork(fleet, path, 1, "--enable-metrics")
    for server in (stock, seed, fork, fallen):
        server.generate()
    assert "sglang:generation_tokens_total" in sglangs_own(stock)
    for server in (seed, fork, fallen):  # some of SGLang's appear after a while only
        server.wait_for("to show all of SGLang's", lambda s=server: sglangs_own(s) == sglangs_own(stock), 60)
    assert not [name for name, _ in scrape(stock) if name.startswith("rfork")]

    seeds, forks, fallens = scrape(seed), scrape(fork), scrape(fallen)
    assert weights_source(seeds) == {"checkpoint"}
    assert weights_source(forks) == {"seed"}
    assert weights_source(fallens) == {"checkpoint"}
    assert value(fallens, "rfork_fallbacks_total", 'reason="unreachable"') == 1
    assert not [name for name, _ in forks if name == "rfork_fallbacks_total"]
    assert value(forks, "rfork_phase_seconds", 'phase="read"') > 0
    assert value(fallens, "rfork_phase_seconds", 'phase="fallback"') > 0
    assert value(seeds, "rfork_leases_granted_total", "") == 1
    assert value(seeds, "rfork_seed_state", 'state="serving"') == 1


def sglangs_own(server: Server) -> set[str]:
    return {name for name, _ in scrape(server) if not name.startswith("rfork")}


def weights_source(metrics: dict[tuple[str, str], float]) -> set[str]:
    found = [labels for (name, labels), v in metrics.items() if name == "rfork_weights_source" and v == 1]
    return {match[1] for labels in found if (match := re.search(r'source="(\w+)"', labels))}


def value(metrics: dict[tuple[str, str], float], name: str, label: str) -> float:
    (found,) = [v for (n, labels), v in metrics.items() if n == name and label in labels]
    return found
