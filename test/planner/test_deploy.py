"""What is under deploy/ fits the planner: metrics that exist, verbs that exist, manifests that parse."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from rfork.cli import drain, planner
from rfork.clock import ManualClock
from rfork.errors import ConfigError
from rfork.keys import KeyRing
from rfork.planner.metrics import PlannerMetrics
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService

DEPLOY = Path(__file__).parents[2] / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))


def documents(path):
    yaml = pytest.importorskip("yaml")
    return list(yaml.safe_load_all(path.read_text()))


def metric_names():
    metrics = PlannerMetrics(PlannerService(Policy(), ManualClock()))
    names = set()
    for family in metrics.registry.collect():
        suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}.get(family.type, [""])
        names |= {family.name + suffix for suffix in suffixes}
    return names


@pytest.mark.parametrize("name", ["grafana/rfork.json", "prometheus/alerts.yaml"])
def test_every_metric_that_is_drawn_or_alerted_on_exists(name):
    used = set(re.findall(r"\brfork_planner_\w+", (DEPLOY / name).read_text()))
    assert used
    assert used <= metric_names(), used - metric_names()


def test_the_dashboard_is_json_with_one_panel_a_place():
    panels = json.loads((DEPLOY / "grafana" / "rfork.json").read_text())["panels"]
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert len(places) == len(set(places)) > 10


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_every_manifest_parses_and_selects_what_it_labels(path):
    for document in documents(path):
        assert {"apiVersion", "kind", "metadata"} <= document.keys()
        assert ("stringData" if document["kind"] == "Secret" else "spec") in document
        if document["kind"] == "Deployment":
            spec = document["spec"]
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_serving_pods_drain_before_they_stop_and_outlive_the_drain():
    for name in ("sglang.yaml", "tp16.yaml"):
        text = (DEPLOY / "kubernetes" / name).read_text()
        wait = int(re.search(r'drain, --local, "[^"]+", --wait, "(\d+)"', text)[1])
        grace = int(re.search(r"terminationGracePeriodSeconds: (\d+)", text)[1])
        assert grace > wait
        assert "startupProbe" in text
        assert "maxSurge: 1, maxUnavailable: 0" in text
    assert callable(drain.command)


def pods(path):
    """The pod templates of a manifest."""
    for document in documents(path):
        spec = document.get("spec", {})
        group = spec.get("leaderWorkerTemplate", {})
        templates = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
        yield from (template["spec"] for template in templates if template)


def test_planners_and_servers_mount_the_fleet_key_read_only_where_they_look_for_it():
    (secret,) = documents(DEPLOY / "kubernetes" / "fleet-key.yaml")
    found = 0
    for pod in (pod for path in MANIFESTS for pod in pods(path) if pod["containers"][0]["name"] != "redis"):
        (container,) = pod["containers"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "fleet-key"]
        (volume,) = [v["secret"] for v in pod["volumes"] if v["name"] == "fleet-key"]
        env = {e["name"]: e.get("value") for e in container["env"]}
        assert env["RFORK_KEY_FILE"] == f"{mount['mountPath']}/{next(iter(secret['stringData']))}"
        assert (mount["readOnly"], "subPath" in mount) == (True, False)
        assert volume == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
        user = container.get("securityContext", {}).get("runAsUser")
        assert pod.get("securityContext", {}).get("fsGroup") == user, (
            "who is not root reads it as a member of the group"
        )
        found += 1
    assert found == 4


def test_nobody_starts_on_the_key_that_stands_in_the_manifest(tmp_path):
    (secret,) = documents(DEPLOY / "kubernetes" / "fleet-key.yaml")
    path = tmp_path / "key"
    path.write_text(secret["stringData"]["key"])
    with pytest.raises(ConfigError, match="of at least 16 characters"):
        KeyRing(path=str(path))


def test_the_fleet_label_that_the_network_policy_opens_is_on_every_serving_pod():
    for name in ("sglang.yaml", "tp16.yaml", "networkpolicy.yaml"):
        assert "rfork.dev/fleet: main" in (DEPLOY / "kubernetes" / name).read_text()


def test_the_images_start_what_there_is():
    assert 'ENTRYPOINT ["rfork", "planner"' in (DEPLOY / "planner.Dockerfile").read_text()
    assert callable(planner.command)
    assert "sglang.launch_server" in (DEPLOY / "Dockerfile").read_text()
