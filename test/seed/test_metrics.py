"""Metrics: every one exists once, follows the node, and does not disturb the server's own."""

import os
import subprocess
import sys
from pathlib import Path

from support.seed_node import until

from rfork.metrics import SPECS

SERVER_WITH_ITS_OWN_METRICS = """
import os, sys, tempfile
from contextlib import ExitStack
from support.seed_node import Seed
with ExitStack() as stack:
    seed = Seed(stack).start()
    seed.add()
    assert b"not healthy yet" in seed.http.get("/metrics").content
    assert "prometheus_client" not in sys.modules
    # The server turns to its metrics late, as SGLang does.
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = tempfile.mkdtemp()
    import prometheus_client
    from prometheus_client import multiprocess
    prometheus_client.Counter("sglang_requests", "the server's own").inc()
    seed.node.ready()
    seed.wait("serving")
    seed.lease()
    print(seed.http.get("/metrics").text)
    registry = prometheus_client.CollectorRegistry()
    multiprocess.MultiProcessCollector(registry)
    print("SERVER")
    print(prometheus_client.generate_latest(registry).decode())
"""


def test_listener_shows_what_the_instance_did(serving):
    serving.lease()
    serving.lease(seed="i-other")
    text = serving.http.get("/metrics").text
    for line in (
        'rfork_weights_source{protocol="",rank="0",role="target",source="checkpoint",verify=""} 1.0',
        'rfork_weights_bytes{rank="0",role="target"} 7.0',
        'rfork_weights_seconds{rank="0",role="target"} 1.5',
        'rfork_phase_seconds{phase="build",rank="0",role="target"} 1.0',
        'rfork_seed_state{state="serving"} 1.0',
        'rfork_seed_state{state="paused"} 0.0',
        "rfork_seed_generation 2.0",
        "rfork_seed_readers 1.0",
        "rfork_leases_granted_total 1.0",
        'rfork_leases_refused_total{reason="other_instance"} 1.0',
    ):
        assert line in text.splitlines()


def test_counters_count_once_however_often_they_are_read(serving):
    serving.lease()
    for _ in range(3):
        text = serving.http.get("/metrics").text
    assert "rfork_leases_granted_total 1.0" in text


def test_state_follows_the_seed(serving):
    with serving.agents[0].changing("update"):
        serving.wait("paused")
        assert 'rfork_seed_state{state="paused"} 1.0' in serving.http.get("/metrics").text


def test_server_with_metrics_of_its_own_keeps_them_and_shows_ours():
    run = subprocess.run(
        [sys.executable, "-c", SERVER_WITH_ITS_OWN_METRICS],
        cwd=Path(__file__).parents[1],
        env={**os.environ, "PYTHONPATH": "."},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    ours, _, servers = run.stdout.partition("SERVER")
    assert "rfork_leases_granted_total 1.0" in ours
    assert "sglang_requests_total 1.0" in servers
    assert "rfork_leases_granted_total 1.0" in servers
    assert 'rfork_seed_state{state="serving"} 1.0' in servers


def test_fallbacks_are_counted_by_reason(seed):
    from support.seed_rank import report

    from rfork.identity import RankIdentity

    agent = seed.start().add(publish=False)
    agent.loaded(RankIdentity(), report(fallback_reason="no_seed"))
    until(lambda: seed.node.status_reply().weights and seed.node.status_reply().weights.fallback_reason)
    seed.node.ready()
    assert 'rfork_fallbacks_total{reason="no_seed"} 1.0' in seed.http.get("/metrics").text


def test_names_are_unique_and_explained():
    assert len({s.name for s in SPECS}) == len(SPECS)
    assert all(s.help and s.name.startswith("rfork_") for s in SPECS)
