"""HTTPS on both services: a certificate of the fleet's own authority, under the name that clients expect."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import typer
from support.host_shard import HostShard
from support.seed_node import Seed
from typer.testing import CliRunner

from rfork.cli import audit, seeds
from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.planned import planner_of
from rfork.client.pull import pull
from rfork.client.resolve import resolve
from rfork.client.sources import Addresses, expand
from rfork.clock import SystemClock
from rfork.config import load_config
from rfork.errors import ConfigError, SeedUnreachable
from rfork.fence import check_fence
from rfork.planner.client import PlannerClient, PlannerUnavailable
from rfork.tls import Certificate, Tls
from rfork.transports.memory import MemoryTransport
from rfork.transports.select import GivenFabrics

from . import KEY
from .conftest import Authority, Planner
from .test_planner_door import beat
from .test_seed_door import request_for, signer

FOR_ADDRESS, FOR_NAME = "IP:127.0.0.1", "DNS:seed.fleet"


@pytest.fixture(params=[FOR_ADDRESS, FOR_NAME], ids=["address", "name"])
def names(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def certificate(authority: Authority, names: str) -> Certificate:
    return authority.issue(names.partition(":")[0], names)


@pytest.fixture
def tls(authority: Authority, names: str) -> Tls:
    return Tls(authority.ca_file, "seed.fleet" if names == FOR_NAME else None)


@pytest.fixture
def seed(make_seed: Callable[..., Seed], certificate: Certificate) -> Seed:
    return make_seed(tls_cert_file=certificate.cert_file, tls_key_file=certificate.key_file)


def test_a_fork_over_https(seed: Seed, tls: Tls) -> None:
    url = seed.node.listener_url or ""
    assert url.startswith("https://127.0.0.1:")
    found = resolve(url, timeout_s=5, tls=tls, signer=signer())
    shard = HostShard(seed.shards[0].resolve().manifest)
    with take_lease(found.listener, request_for(seed), timeout_s=5, tls=tls, signer=signer()) as lease:
        fabrics = GivenFabrics([MemoryTransport(seed.fabric)])
        pull(shard, lease, fabrics, PullSettings(), check_fence=check_fence, clock=SystemClock())
    assert shard.buffer.view == seed.shards[0].buffer.view


def test_a_certificate_of_another_authority_is_refused(seed: Seed) -> None:
    with pytest.raises(SeedUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        resolve(seed.node.listener_url or "", timeout_s=5, signer=signer())


def test_a_certificate_under_another_name_is_refused(seed: Seed, authority: Authority) -> None:
    with pytest.raises(SeedUnreachable, match="CERTIFICATE_VERIFY_FAILED"):
        resolve(seed.node.listener_url or "", timeout_s=5, tls=Tls(authority.ca_file, "other.fleet"), signer=signer())


def test_plain_http_to_an_https_listener_ends_in_time(seed: Seed) -> None:
    started_s = time.monotonic()
    with pytest.raises(SeedUnreachable):
        resolve((seed.node.listener_url or "").replace("https", "http"), timeout_s=2, signer=signer())
    assert time.monotonic() - started_s < 10


def test_a_listed_seed_may_say_that_it_speaks_https(seed: Seed, authority: Authority, tls: Tls) -> None:
    config = {"key": KEY, "seeds": [seed.node.listener_url], "ca_file": authority.ca_file}
    settings = load_config(
        None, {"RFORK_CONFIG": json.dumps(config | ({"tls_server_name": tls.server_name} if tls.server_name else {}))}
    )
    found = Addresses([], settings.seeds, settings, SystemClock()).next().candidate
    assert found is not None
    assert found.listener == seed.node.listener_url


def test_a_name_with_many_addresses_keeps_its_scheme() -> None:
    assert expand("dns+https://seeds.svc:30000", lambda host, port: [f"192.0.2.1:{port}"]) == [
        "https://192.0.2.1:30000"
    ]


def test_a_planner_over_https(make_planner: Callable[..., Planner], certificate: Certificate, tls: Tls) -> None:
    planner = make_planner(certificate=certificate)
    config = {"key": KEY, "planner_url": planner.url, "ca_file": tls.ca_file, "tls_server_name": tls.server_name}
    client = planner_of(load_config(None, {"RFORK_CONFIG": json.dumps(config)}))
    assert client is not None
    assert client.heartbeat(beat()).ttl_s > 0
    with pytest.raises(PlannerUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        PlannerClient(planner.url).overview()
    app = typer.Typer()
    app.command()(seeds.command)
    environment = {"RFORK_KEY": KEY, "RFORK_CA_FILE": tls.ca_file, "RFORK_TLS_SERVER_NAME": tls.server_name or ""}
    shown = CliRunner().invoke(app, ["--planner", planner.url], env=environment)
    assert "i-seed" in shown.output


def test_verbs_that_ask_an_instance_take_the_authority_from_the_environment(seed: Seed, tls: Tls) -> None:
    app = typer.Typer()
    app.command()(audit.command)
    environment = {"RFORK_KEY": KEY, "RFORK_CA_FILE": tls.ca_file, "RFORK_TLS_SERVER_NAME": tls.server_name or ""}
    assert CliRunner().invoke(app, [seed.node.listener_url or ""], env=environment).exit_code == 0


@pytest.mark.parametrize(
    ("cert", "key", "expected"),
    [
        ("cert", None, "expected both or neither"),
        (None, "key", "expected both or neither"),
        ("no", "no", "tls_cert_file no"),
    ],
)
def test_half_a_certificate_and_one_that_is_not_there_stop_the_start(
    cert: str | None, key: str | None, expected: str
) -> None:
    with pytest.raises(ConfigError, match=expected):
        Certificate.of(cert, key)


def test_a_certificate_and_a_key_that_do_not_fit_stop_the_start(authority: Authority) -> None:
    one, other = authority.issue("one", FOR_ADDRESS), authority.issue("other", FOR_ADDRESS)
    with pytest.raises(ConfigError, match="tls_cert_file"):
        Certificate.of(one.cert_file, other.key_file)
    with pytest.raises(ConfigError, match="ca_file"):
        Tls("/nowhere/ca").context()


def test_the_typed_seed_is_asked_over_https_where_this_server_serves_https_itself() -> None:
    """The same command line starts the first instance and the next."""
    from sglang_rfork.srt.server_args import _seed_address

    view = SimpleNamespace(
        remote_instance_weight_loader_seed_instance_ip="fd00::1",
        remote_instance_weight_loader_seed_instance_service_port=30000,
        ssl_certfile="cert.pem",
    )
    assert _seed_address(view) == "https://[fd00::1]:30000"
    view.ssl_certfile = None
    assert _seed_address(view) == "[fd00::1]:30000"
