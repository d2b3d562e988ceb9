"""A planner of a fleet with a key: strangers register nobody; a poisoned planner or store can only deny."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import httpx
import msgspec
import pytest
import typer
from support.seed_node import Seed, until
from support.seed_rank import CHECKPOINT, IDENTITY
from typer.testing import CliRunner

from rfork.auth import Signer, mint_view, vouch
from rfork.cli import drain, leases, seeds, watch
from rfork.client.planned import Planned, planner_of
from rfork.client.sources import Addresses
from rfork.clock import SystemClock
from rfork.config import load_config
from rfork.identity import InstanceId, instance_key
from rfork.keys import KeyRing
from rfork.planner.client import PlannerClient, PlannerUnavailable
from rfork.seed.registration import Registration
from rfork.wire.planner import Ask, ForkFrom, Heartbeat, InstanceState

from . import KEY, OTHER_KEY
from .conftest import Planner

V1 = "/rfork/v1"
MAKE = Callable[..., Planner]


def beat(name: str = "i-seed", **fields: object) -> Heartbeat:
    given = {"listener": "http://192.0.2.1:7000", "state": InstanceState.SERVING, **fields}
    return Heartbeat(instance_id=name, instance_key=instance_key(IDENTITY, CHECKPOINT), **given)  # type: ignore[arg-type]


def client_of(planner: Planner, key: str | None = KEY) -> PlannerClient:
    return PlannerClient(planner.url, signer=Signer(KeyRing(key), "i-me") if key else None)


def test_with_a_key_nothing_changes_or_shows_without_a_ticket(planner: Planner) -> None:
    client_of(planner).heartbeat(beat())
    with httpx.Client(base_url=planner.url) as http:
        body = msgspec.json.encode(beat("i-other"))
        answers = [
            http.put(f"{V1}/instances/i-other", content=body),
            http.delete(f"{V1}/instances/i-seed"),
            http.post(f"{V1}/instances/i-seed/drain"),
            http.post(f"{V1}/asks", content=msgspec.json.encode(Ask(client="i-c", instance_key="a" * 64))),
            http.post(f"{V1}/reports", content=b"{}"),
            *(http.get(f"{V1}/{path}") for path in ("instances", "leases", "events", "overview", "instances/i-seed")),
        ]
        assert [(a.status_code, a.json()["code"]) for a in answers] == [(401, "unauthorized")] * len(answers)
        assert [http.get(path).status_code for path in ("/", "/healthz", "/readyz", "/metrics")] == [200] * 4
        assert "192.0.2.1" not in http.get("/metrics").text
    assert list(planner.service.state.instances) == ["i-seed"]


def test_every_call_of_the_fleet_is_let_in_and_its_answer_proven(planner: Planner) -> None:
    client = client_of(planner)
    client.heartbeat(beat("i:with:colons", weight_version="50% off", listener="http://192.0.2.2:1"))
    client.heartbeat(beat())
    assert isinstance(client.ask(Ask(client="i-c", instance_key=beat().instance_key)), ForkFrom)
    assert client.story("i:with:colons").instance.weight_version == "50% off"
    assert client.instances(state="serving").total == 2
    assert client.leases().total == 1
    assert client.events().events
    assert client.overview().totals["serving"] == 2
    client.withdraw("i:with:colons", "a reason & more, 100 %?")
    client.drain("i-seed")
    assert client.instances().total == 1


@pytest.mark.parametrize(
    ("key", "why"),
    [
        (None, r"answered \(status 200\) without a proof of this fleet's key: it has none, or another"),
        (OTHER_KEY, r"status 401: is the fleet key the same on both sides\?"),
    ],
    ids=["none", "another"],
)
def test_a_planner_without_the_key_counts_as_none(make_planner: MAKE, key: str | None, why: str) -> None:
    """It could answer anything: a heartbeat that it calls `gone` would end a registration for good."""
    with pytest.raises(PlannerUnavailable, match=rf"^no planner proves the fleet key: PUT http://[^ ]*: {why}$"):
        client_of(make_planner(key)).heartbeat(beat())


def test_the_next_planner_is_asked_where_one_is_a_stranger(make_planner: MAKE) -> None:
    urls = [make_planner(None).url, make_planner().url]
    client = PlannerClient(urls, signer=Signer(KeyRing(KEY)))
    assert client.heartbeat(beat()).ttl_s > 0


def test_a_client_does_not_dial_what_no_key_holder_named(planner: Planner) -> None:
    """A store that somebody else can write to adds a listener: the planner passes it on, nobody follows."""
    planner.service.heartbeat(beat("i-poison", listener="http://192.0.2.66:1"))
    offer = source(planner).next()
    assert offer.candidate is None
    assert offer.reason == "unproven"
    assert "i-poison at http://192.0.2.66:1: no holder of the fleet key named it" in offer.why


def test_a_word_for_one_listener_is_no_word_for_another(planner: Planner) -> None:
    word = vouch(KeyRing(KEY), "i-seed", ["http://192.0.2.1:7000"])
    planner.service.heartbeat(beat(ticket=word))
    planner.service.heartbeat(beat("i-moved", listener="http://192.0.2.66:1", ticket=word))
    found = source(planner).next().candidate
    assert found is not None
    assert (found.instance_id, found.listener) == ("i-seed", "http://192.0.2.1:7000")


def source(planner: Planner, **more: object) -> Planned:
    config = {"key": KEY, "planner_url": planner.url, "plan_timeout_s": 1, "seek_timeout_s": 1, "storage_jitter_s": 0}
    settings = load_config(None, {"RFORK_CONFIG": json.dumps(config | more)})
    clock = SystemClock()
    client = planner_of(settings)
    assert client is not None
    return Planned(
        client,
        lambda: Addresses([], settings.seeds, settings, clock),
        settings,
        clock,
        instance_id=InstanceId("i-client"),
        identity=IDENTITY,
        content=CHECKPOINT,
        tell=lambda report: None,
    )


@contextmanager
def registered(seed: Seed, planner: Planner) -> Iterator[Registration]:
    registration = Registration(seed.node, client_of(planner))
    registration._alive = True
    registration.start()
    try:
        yield registration
    finally:
        registration.stop("test is over")


def test_an_instance_registers_and_the_next_one_finds_it(seed: Seed, planner: Planner) -> None:
    with registered(seed, planner):
        until(lambda: client_of(planner).instances(state="serving").total)
        found = source(planner).next().candidate
        assert found is not None
        assert (found.instance_id, found.listener) == (seed.node.instance_id, seed.node.listener_url)


def test_a_poisoned_planner_leaves_the_list_of_seeds(make_planner: MAKE, seed: Seed) -> None:
    stranger = make_planner(None)
    stranger.service.heartbeat(beat("i-poison"))
    found = source(stranger, seeds=[str(seed.node.listener_url).removeprefix("http://")]).next().candidate
    assert found is not None
    assert found.instance_id == seed.node.instance_id


# The legacy protocol, and people


@pytest.mark.parametrize(
    ("arguments", "environment", "speaks"),
    [
        ([], {}, True),
        (["--no-legacy"], {}, False),
        ([], {"RFORK_KEY": KEY}, False),
        (["--legacy-anonymous"], {"RFORK_KEY": KEY}, True),
    ],
)
def test_the_legacy_protocol_is_off_where_the_fleet_has_a_key(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], environment: dict[str, str], speaks: bool
) -> None:
    """It can't carry a ticket."""
    from rfork.cli import planner

    ran: list[object] = []
    monkeypatch.setattr(planner.patience, "run", lambda config, _, *, let_go: ran.append(config.app))
    app = typer.Typer()
    app.command()(planner.command)
    assert CliRunner().invoke(app, arguments, env=environment).exit_code == 0
    paths = {route.path for route in ran[0].routes}  # type: ignore[attr-defined]
    assert ("/get_seed" in paths) is speaks


@pytest.mark.parametrize(
    ("arguments", "environment"),
    [
        (["--key-file", "/nowhere/key"], {}),
        (["--tls-cert-file", "/nowhere/cert"], {}),
        ([], {"RFORK_KEY": "too short"}),
        ([], {"RFORK_KEY_FILE": "/nowhere/key"}),
    ],
)
def test_a_planner_without_its_files_is_one_line_and_exit_2(arguments: list[str], environment: dict[str, str]) -> None:
    from rfork.cli import planner

    app = typer.Typer()
    app.command()(planner.command)
    shown = CliRunner().invoke(app, arguments, env=environment)
    assert "too short" not in shown.output
    assert (shown.exit_code, len(shown.output.splitlines())) == (2, 1)


@pytest.fixture
def run(planner: Planner) -> Callable[..., object]:
    def run(verb: object, *args: str, **environment: str) -> object:
        app = typer.Typer()
        app.command()(verb.command)  # type: ignore[attr-defined]
        return CliRunner().invoke(app, [*args, "--planner", planner.url], env=environment)

    return run


@pytest.mark.parametrize(
    ("verb", "arguments"),
    [(seeds, []), (leases, []), (watch, ["--once"]), (drain, ["i-seed"])],
    ids=["seeds", "leases", "watch", "drain"],
)
def test_verbs_take_the_key_from_the_environment(run, planner: Planner, tmp_path, verb, arguments) -> None:
    client_of(planner).heartbeat(beat())
    (tmp_path / "key").write_text(KEY)
    assert run(verb, *arguments, RFORK_KEY_FILE=str(tmp_path / "key")).exit_code == 0
    assert run(verb, *arguments, RFORK_KEY=KEY, RFORK_STORE="memory").exit_code == 0
    refused = run(verb, *arguments)
    assert refused.exit_code == 1
    assert "this fleet has a key" in refused.output
    assert KEY not in refused.output


def test_the_dashboard_takes_a_ticket_to_look(planner: Planner) -> None:
    client_of(planner).heartbeat(beat())
    headers = {"authorization": mint_view(KeyRing(KEY), "operator", ttl_s=60)}
    with httpx.Client(base_url=planner.url, headers=headers) as http:
        assert [http.get(f"{V1}/overview").status_code for _ in range(3)] == [200] * 3
        assert http.post(f"{V1}/instances/i-seed/drain").status_code == 401


def test_loopback_is_told_to_no_planner_that_others_reach(seed: Seed, planner: Planner) -> None:
    far = PlannerClient("http://192.0.2.1:7700")
    registration = Registration(seed.node, far)
    registration._alive = True
    described = registration.describe()
    assert described is not None
    assert described.listener == ""
    client_of(planner).heartbeat(described)
    assert not client_of(planner).instances().instances[0].offered
