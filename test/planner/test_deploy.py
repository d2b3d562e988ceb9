"""What is under deploy/ fits together, and the code: names, ports, labels, variables, flags, metrics."""

from __future__ import annotations

import asyncio
import itertools
import json
import re
from argparse import ArgumentParser
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import tree
import typer
import yaml

from rfork.cli import drain, planner
from rfork.clock import ManualClock, SystemClock
from rfork.config import load_config
from rfork.config_values import host_port
from rfork.errors import ConfigError
from rfork.keys import KeyRing
from rfork.metrics import SPECS
from rfork.planner.metrics import PlannerMetrics
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.store import open_store
from rfork.wire.planner import ForkFrom, ReadDisk

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
MANIFESTS = sorted(DEPLOY.glob("kubernetes/*.yaml"))
GROUP = {"LWS_WORKER_INDEX": "1", "LWS_LEADER_ADDRESS": "leader.test"}
"""What LeaderWorkerSet sets in each pod."""

DEFAULT_PROGRESS_DEADLINE_S = 600  # Kubernetes' own
DISK_S = 1800
"""A checkpoint of a terabyte at 600 MB/s, and SGLang's start around it."""


def documents(*paths):
    return [document for path in paths or MANIFESTS for document in yaml.safe_load_all(path.read_text())]


ALL = documents()


def named(kind):
    return {d["metadata"]["name"]: d for d in ALL if d["kind"] == kind}


def templates(document):
    """The pod templates of a manifest."""
    spec = document.get("spec", {})
    group = spec.get("leaderWorkerTemplate", {})
    found = (spec.get("template"), group.get("leaderTemplate"), group.get("workerTemplate"))
    return [template for template in found if template]


PODS = {
    "/".join(
        [document["metadata"]["name"], *([role] if (role := template["metadata"]["labels"].get("role")) else [])]
    ): (
        document,
        template["metadata"]["labels"],
        template["spec"],
        template["spec"]["containers"][0],
    )
    for document in ALL
    for template in templates(document)
}
SERVING = [name for name in PODS if name.startswith("sglang")]
OURS = [*SERVING, "rfork-planner"]


def selected(selector):
    """Names of the pods that a selector means."""
    return [name for name, (_, labels, *_) in PODS.items() if selector.items() <= labels.items()]


def environment(container):
    """As the container sees it; what the cluster fills in is an address."""
    return {e["name"]: GROUP.get(e["name"], e.get("value", "192.0.2.7")) for e in container.get("env", [])}


def container_ports(container):
    return {p["name"]: p["containerPort"] for p in container.get("ports", [])}


def test_what_a_newcomer_gets_is_what_these_tests_look_at():
    assert set(PODS) == {"rfork-planner", "rfork-redis", "sglang", "sglang-tp16/leader", "sglang-tp16/worker"}
    assert all(len(spec["containers"]) == 1 for _, _, spec, _ in PODS.values())


# -- manifests among themselves


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda p: p.name)
def test_every_manifest_parses_and_selects_what_it_labels(path):
    for document in documents(path):
        assert {"apiVersion", "kind", "metadata"} <= document.keys()
        assert ("stringData" if document["kind"] == "Secret" else "spec") in document
        if document["kind"] == "Deployment":
            spec = document["spec"]
            labels = spec["template"]["metadata"]["labels"]
            assert spec["selector"]["matchLabels"].items() <= labels.items()


def test_every_name_is_given_once():
    names = [(d["kind"], d["metadata"]["name"]) for d in ALL]
    assert len(names) == len(set(names))


def test_services_reach_the_pods_that_they_name_at_ports_that_those_have():
    for name, service in named("Service").items():
        pods = selected(service["spec"]["selector"])
        assert pods == {"sglang-seeds": ["sglang"], "sglang-tp16": ["sglang-tp16/leader"]}.get(name, [name])
        for port in service["spec"]["ports"]:
            assert port["targetPort"] in container_ports(PODS[pods[0]][3])


def test_budgets_and_spreads_count_pods_that_exist():
    for name, budget in named("PodDisruptionBudget").items():
        assert selected(budget["spec"]["selector"]["matchLabels"]) == [name]
    for _, labels, spec, _ in PODS.values():
        for constraint in spec.get("topologySpreadConstraints", []):
            assert constraint["labelSelector"]["matchLabels"].items() <= labels.items()


def test_network_policies_let_in_those_who_ask_and_nobody_else():
    """Who talks to whom, as (from, to): fleet among itself, fleet to planner, planner to Redis."""
    allowed = set()
    for policy in named("NetworkPolicy").values():
        targets = selected(policy["spec"]["podSelector"]["matchLabels"])
        listening = {port for name in targets for port in container_ports(PODS[name][3]).values()}
        for rule in policy["spec"]["ingress"]:
            assert {p["port"] for p in rule.get("ports", [])} in (set(), listening)
            assert {"from", "ports"} & rule.keys(), "open to all, at every port"
            peers = [pod for peer in rule.get("from", []) for pod in selected(peer["podSelector"]["matchLabels"])]
            allowed |= set(itertools.product(peers, targets))
    everybody = {*itertools.product(SERVING, SERVING), *((pod, "rfork-planner") for pod in SERVING)}
    assert allowed == everybody | {("rfork-planner", "rfork-redis")}


def test_planners_and_servers_mount_the_fleet_key_read_only_where_they_look_for_it():
    (secret,) = named("Secret").values()
    for name in OURS:
        _, _, pod, container = PODS[name]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "fleet-key"]
        (volume,) = [v["secret"] for v in pod["volumes"] if v["name"] == "fleet-key"]
        assert environment(container)["RFORK_KEY_FILE"] == f"{mount['mountPath']}/{next(iter(secret['stringData']))}"
        assert (mount["readOnly"], "subPath" in mount) == (True, False)
        assert volume == {"secretName": secret["metadata"]["name"], "defaultMode": 0o440}
        user = container.get("securityContext", {}).get("runAsUser")
        assert pod.get("securityContext", {}).get("fsGroup") == user, (
            "who is not root reads it as a member of the group"
        )


def test_every_mount_has_its_volume():
    for _, _, pod, container in PODS.values():
        mounts = {m["name"] for m in container.get("volumeMounts", [])}
        assert mounts == {v["name"] for v in pod.get("volumes", [])}
    for name in SERVING:
        container = PODS[name][3]
        (model,) = [a.partition("=")[2] for a in container["args"] if a.startswith("--model-path=")]
        assert any(model.startswith(f"{m['mountPath']}/") for m in container["volumeMounts"])


def test_nobody_starts_on_the_key_that_stands_in_the_manifest(tmp_path):
    (secret,) = named("Secret").values()
    path = tmp_path / "key"
    path.write_text(secret["stringData"]["key"])
    with pytest.raises(ConfigError, match="of at least 16 characters"):
        KeyRing(path=str(path))


def test_no_service_becomes_a_variable_that_a_program_takes_for_its_own():
    """Of a Service `sglang` Kubernetes makes SGLANG_PORT=tcp://…"""
    assert all(pod["enableServiceLinks"] is False for _, _, pod, _ in PODS.values())


# -- lives of pods


def startup_s(container):
    probe = container.get("startupProbe", {})
    return probe.get("failureThreshold", 0) * probe.get("periodSeconds", 10)


def test_a_pod_has_the_time_that_the_disk_path_takes_and_its_roll_out_has_more():
    """The longest: wait for another who reads the disk, for as long as the planner lets wait, and read it then."""
    policy = Policy()
    for name in ("sglang", "sglang-tp16/leader"):
        assert startup_s(PODS[name][3]) >= policy.wait_bound_s * (1 + policy.bound_jitter) + DISK_S
    for name, deployment in named("Deployment").items():
        deadline_s = deployment["spec"].get("progressDeadlineSeconds", DEFAULT_PROGRESS_DEADLINE_S)
        assert deadline_s > startup_s(PODS[name][3]), name


@pytest.mark.parametrize("name", SERVING)
def test_serving_pods_drain_before_they_stop_and_outlive_the_drain(name):
    """At an address that answers in that very pod: of a worker, R-Fork's own listener only."""
    _, _, pod, container = PODS[name]
    program, verb, *words = container["lifecycle"]["preStop"]["exec"]["command"]
    assert (program, verb) == ("rfork", "drain")
    given = arguments(drain.command, words)
    assert 60 <= given["wait"] < pod["terminationGracePeriodSeconds"] - load_config(None, {}).drain_timeout_s
    address = urlsplit(given["local"])
    listen = load_config(None, environment(container)).listen
    answering = {listen[1]} if listen else set(container_ports(container).values())
    assert (address.scheme, address.hostname) == ("http", "127.0.0.1")
    assert address.port in answering


def test_roll_outs_never_take_the_last_seed_first():
    for name in ("sglang", "sglang-tp16/leader", "rfork-planner"):
        spec = PODS[name][0]["spec"]
        strategy = (
            spec.get("strategy", {}).get("rollingUpdate") or spec["rolloutStrategy"]["rollingUpdateConfiguration"]
        )
        assert strategy == {"maxSurge": 1, "maxUnavailable": 0}


@pytest.mark.parametrize("name", PODS)
def test_probes_ask_ports_that_there_are(name):
    container = PODS[name][3]
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        probe = container.get(kind, {})
        for how in ("httpGet", "tcpSocket"):
            if how in probe:
                assert probe[how]["port"] in container_ports(container)


def test_planners_are_asked_and_scraped_at_paths_that_they_have():
    document, _, _, container = PODS["rfork-planner"]
    probes = {container[kind]["httpGet"]["path"] for kind in ("readinessProbe", "livenessProbe")}
    app = (ROOT / "python/rfork/planner/app.py").read_text()
    assert all(f'"{path}"' in app for path in probes | {"/metrics"})
    notes = document["spec"]["template"]["metadata"]["annotations"]
    assert notes["prometheus.io/port"] == str(container_ports(container)["http"])


# -- manifests and programs


def arguments(command, words):
    """What a verb of `rfork` makes of its arguments; raises for what it does not know."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    context = typer.main.get_command(app).make_context("verb", [str(w) for w in words])
    return context.params


def entry_point(dockerfile):
    (line,) = re.findall(r"^ENTRYPOINT (.*)$", (DEPLOY / dockerfile).read_text(), re.MULTILINE)
    return json.loads(line)


def test_the_planner_takes_what_its_image_and_its_pod_say():
    program, verb, *words = entry_point("planner.Dockerfile")
    assert (program, verb) == ("rfork", "planner")
    container = PODS["rfork-planner"][3]
    given = arguments(planner.command, [*words, *container["args"]])
    store, service = urlsplit(given["store"]), named("Service")["rfork-redis"]
    assert (store.scheme, store.hostname) == ("redis", service["metadata"]["name"])
    assert store.port == service["spec"]["ports"][0]["port"]
    assert given["port"] == container_ports(container)["http"]
    assert f"EXPOSE {given['port']}\n" in (DEPLOY / "planner.Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVING)
def test_servers_take_every_variable_and_find_whom_it_names(name):
    """As R-Fork itself reads them: an unknown key or a value out of bounds stops a start."""
    container, services = PODS[name][3], named("Service")
    config = load_config(None, environment(container))
    assert config.advertise_host == "192.0.2.7"
    url = urlsplit(config.planner_url)
    assert url.hostname == "rfork-planner"
    assert url.port == services[url.hostname]["spec"]["ports"][0]["port"]
    for seed in config.seeds:
        host, port = host_port(seed.removeprefix("dns+"), "seeds")
        assert services[host]["spec"]["clusterIP"] == "None", "only a headless Service resolves to its pods"
        assert port == services[host]["spec"]["ports"][0]["port"]
    assert config.planner_url in (DEPLOY / "Dockerfile").read_text()


@pytest.mark.parametrize("name", SERVING)
def test_servers_take_every_flag(name):
    """As SGLang's own parser reads the command line of image and pod."""
    from sglang.srt.server_args import ServerArgs

    python, dash, module, *words = entry_point("Dockerfile")
    assert (python, dash, module) == ("python3", "-m", "sglang.launch_server")
    parser = ArgumentParser(allow_abbrev=False)
    ServerArgs.add_cli_args(parser)
    container = PODS[name][3]
    typed = [re.sub(r"\$\((\w+)\)", lambda m: GROUP[m[1]], word) for word in container["args"]]
    given = parser.parse_args([*words, *typed])
    assert (given.load_format, given.host) == ("remote_instance", "0.0.0.0")
    assert given.tp_size == given.nnodes * container["resources"]["limits"]["nvidia.com/gpu"]
    ports = container_ports(container)
    assert not ports or given.port == ports["http"]
    if given.nnodes > 1:
        size = PODS[name][0]["spec"]["leaderWorkerTemplate"]["size"]
        meeting = host_port(given.dist_init_addr, "dist_init_addr")
        assert (given.nnodes, given.node_rank, meeting[0]) == (size, 1, GROUP["LWS_LEADER_ADDRESS"])
        low, high = load_config(None, environment(container)).port_range
        assert not low <= meeting[1] <= high


# -- images


def test_an_image_is_built_from_sources_and_nothing_else():
    """`COPY .` takes what .dockerignore leaves: not the environments of `make`, nor a build/ of yesterday."""
    sources = {"LICENSE", "README.md", "pyproject.toml", "setup.py", "python"}
    taken = {tree.relative(path) for path in tree.files() if tree.travels(path)}
    assert {name.partition("/")[0] for name in taken} == sources
    assert {n for n in map(tree.relative, tree.files()) if n.startswith("python/")} <= taken
    litter = """.git/HEAD .gitignore .venv/bin/python .venv-0.5.16/lib .venv.lock .faults/1 .hypothesis/x .mypy_cache/x
        build/lib/rfork/gone.py dist/x.whl sglang_rfork.egg-info/SOURCES.txt python/rfork/__pycache__/cli.pyc
        python/sglang_rfork.egg-info/x docs/design.md test/conftest.py deploy/kubernetes/fleet-key.yaml bench/sim.py
        platforms/host_cpu/pyproject.toml key .env""".split()  # noqa: SIM905
    assert [name for name in litter if tree.travels(ROOT / name)] == []


def test_every_top_level_name_of_this_checkout_was_thought_of():
    """Whatever lies here, of `make` or of git, ends up in an image only if it is a source."""
    taken = {path.name for path in ROOT.iterdir() if tree.travels(path)}
    assert taken == {"LICENSE", "README.md", "pyproject.toml", "setup.py", "python"}


# -- the guide


def test_the_guide_names_every_file_and_no_other():
    guide = (DEPLOY / "README.md").read_text()
    table = set(re.findall(r"^\| `([^`]+)` \|", guide, re.MULTILINE))
    files = {path.relative_to(DEPLOY).as_posix() for path in tree.files() if path.is_relative_to(DEPLOY)}
    assert table == files - {"README.md"} | {"../.dockerignore"}
    for applied in re.findall(r"(?:apply| )-f (deploy/\S+)", guide):
        assert (ROOT / applied).is_file(), applied


def test_the_guide_asks_a_planner_where_its_network_policy_lets_it():
    """From within its own pod: a planner's pod is not of the fleet, so it can't ask the Service."""
    (asked,) = re.findall(r"rfork seeds --planner\s+(\S+?)`", (DEPLOY / "README.md").read_text())
    assert urlsplit(asked).hostname == "127.0.0.1"
    assert urlsplit(asked).port == container_ports(PODS["rfork-planner"][3])["http"]


# -- metrics


def families():
    """Every name that is exported → the labels that it has."""
    metrics = PlannerMetrics(PlannerService(Policy(), ManualClock()))
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_count", "_sum"]}
    labels = {"instances": {"state"}, "heartbeat_age_seconds": {"quantile"}}
    of_counters = {m._name: set(m._labelnames) for m in vars(metrics).values() if hasattr(m, "_labelnames")}
    found = {spec.name: set(spec.labels) for spec in SPECS}
    for family in metrics.registry.collect():
        known = of_counters.get(family.name, labels.get(family.name.removeprefix("rfork_planner_"), set()))
        for suffix in suffixes.get(family.type, [""]):
            found[family.name + suffix] = known | ({"le"} if suffix == "_bucket" else set())
    return found


DASHBOARD = json.loads((DEPLOY / "grafana" / "rfork.json").read_text())
ALERTS = [r for g in yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())["groups"] for r in g["rules"]]
EXPRESSIONS = [t["expr"] for p in DASHBOARD["panels"] for t in p["targets"]] + [rule["expr"] for rule in ALERTS]
SHARED = {"instances", "leases_active", "offered", "capacity_free", "set_aside", "disk_claims", "heartbeat_age_seconds"}
"""What planners on one store all know: two of them show the same, and a sum would be twice as much."""


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_metrics_and_labels_that_are_drawn_or_alerted_on_exist(expression):
    known = families()
    used = re.findall(r"\b(rfork_\w+)(?:{([^}]*)})?", expression)
    assert used
    for name, matchers in used:
        grouped = {x.strip() for by in re.findall(r"by \(([^)]*)\)", expression) for x in by.split(",")}
        assert set(re.findall(r"(\w+)=", matchers)) | grouped <= known[name], name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_what_planners_share_is_not_added_up_and_what_each_has_for_itself_is(expression):
    for metric in re.finditer(r"\brfork_planner_(\w+)", expression):
        name, around = metric[1], re.findall(r"\b(sum|max|min|absent)\b", expression[: metric.start()])
        if name == "store_up":
            assert around in (["min"], ["absent"], []), expression
        else:
            assert around[-1] == ("max" if name in SHARED | {"longest_wait_seconds"} else "sum"), expression


def gauges(metrics):
    """What is read from a planner's state when it is scraped."""
    families = {family.name.removeprefix("rfork_planner_"): family for family in metrics.registry.collect()}
    return {
        name: {tuple(sample.labels.values()): sample.value for sample in family.samples}
        for name, family in families.items()
        if family.type == "gauge"
    }


async def test_two_planners_on_one_store_show_the_same_of_what_is_shared_and_their_own_of_the_rest(redis_server, build):
    """One planner hears all of it: a busy seed, one set aside, a claim to read the disk, a client that waits."""
    policy = Policy(settle_s=0.0)
    one, two = (
        PlannerService(policy, SystemClock(), open_store(redis_server.url, horizon_s=60.0, num_claims=1))
        for _ in range(2)
    )
    shown = [PlannerMetrics(service) for service in (one, two)]
    for service in (one, two):
        await service.start()
    one.heartbeat(build.seed("i-busy"))
    assert isinstance(await one.ask(build.ask("i-reader")), ForkFrom)
    one.heartbeat(build.seed("i-odd", instance_key=build.OTHER_KEY))
    one.report(build.report("failed", "i-else", "i-odd", instance_key=build.OTHER_KEY, reason="seed_lost"))
    assert isinstance(await one.ask(build.ask("i-disk", instance_key="c" * 64)), ReadDisk)
    waiting = asyncio.create_task(one.ask(build.ask("i-waits", instance_key="c" * 64)))
    told = {"leases_active": 1, "disk_claims": 1, "set_aside": 1}
    for _ in range(1000):
        first, second = (gauges(metrics) for metrics in shown)
        if first["waiting_clients"][()] and all(second[name][()] == value for name, value in told.items()):
            break
        await asyncio.sleep(0.01)
    waiting.cancel()
    exact = SHARED - {"heartbeat_age_seconds"}
    assert {name: first[name] for name in exact} == {name: second[name] for name in exact}
    assert {name: first[name][()] for name in told} == told
    assert (first["waiting_clients"][()], second["waiting_clients"][()]) == (1, 0)
    assert set(first) == SHARED | {"waiting_clients", "longest_wait_seconds", "store_up"}
    for service in (one, two):
        await service.stop()


def test_an_alert_names_only_labels_that_its_expression_keeps():
    for rule in ALERTS:
        kept = {x.strip() for by in re.findall(r"by \(([^)]*)\)", rule["expr"]) for x in by.split(",")}
        told = set(re.findall(r"\$labels\.(\w+)", json.dumps(rule["annotations"])))
        assert not re.search(r"\b(sum|max|min)\b", rule["expr"]) or told <= kept, rule["alert"]


def test_forks_that_fail_for_many_reasons_count_together():
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "RForkForksFail"]
    left, _, right = rule["expr"].partition(" > 0.1 * ")
    assert "reason" not in rule["expr"]
    assert left.replace(', outcome="failed"', "") == right, "a share of the same attempts"


def test_no_panel_lies_on_another():
    places = {panel["title"]: panel["gridPos"] for panel in DASHBOARD["panels"]}
    assert len(places) == len(DASHBOARD["panels"]) > 10
    cells = [
        (x, y)
        for at in places.values()
        for x, y in itertools.product(range(at["x"], at["x"] + at["w"]), range(at["y"], at["y"] + at["h"]))
    ]
    assert len(cells) == len(set(cells))
    assert all(0 <= x < 24 for x, _ in cells)
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(places)
