"""How a server starts: what R-Fork says, what it leaves alone where nobody asked for it, and when it refuses."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

import psutil
import pytest
from support.forking import (
    ENV,
    LAST_LINE,
    SEED,
    fork_from,
    last_line,
    rfork_lines,
    serving,
    settled,
    start_fork,
    start_seed,
    status,
)
from support.models import Models
from support.plugins import install_metadata, install_plugin
from support.ports import USABLE, lend
from support.server import STOCK, Fleet, Server

import rfork

pytestmark = pytest.mark.server

FIRST_LINE = re.compile(
    r"rfork (?P<version>\S+) on SGLang (?P<sglang>0\.5\.\d+\S*): (?P<hooks>\d+) hooks applied, "
    r"transport transfer_engine, role (?P<role>main|scheduler)$"
)
INFO = "/get_remote_instance_transfer_engine_info"
DEAD = fork_from(1)
"""Nobody listens at port 1."""


def test_the_first_line_names_versions_hooks_and_role_and_the_last_one_the_source(fleet: Fleet, models: Models) -> None:
    seed = start_seed(fleet, models.path("llama"))
    lines_of = {seed.name: rfork_lines(seed)}  # now: the first client is in its log as well
    address = fork_from(seed.port, backend=None)  # the transfer engine needs no flag, though SGLang's default is nccl
    fork = settled(fleet.start(models.path("llama"), *address, env=ENV))
    lines_of[fork.name] = rfork_lines(fork)
    for lines in lines_of.values():
        first = [m for m in map(FIRST_LINE.match, lines) if m]
        assert [m["role"] for m in first] == ["main", "scheduler"]
        assert lines[0] == first[0].string
        assert {m["version"] for m in first} == {rfork.__version__}
        assert all(int(m["hooks"]) >= 8 for m in first)
        assert LAST_LINE.match(lines[-1])
    disk, seeded = last_line(seed), last_line(fork)
    assert disk is not None
    assert disk["reason"] == "no fork was asked for"
    assert seeded is not None
    assert seeded["seed"] == status(seed)["instance_id"]
    assert seeded["address"] == status(seed)["listener"]
    assert re.fullmatch(r"0\.00\d GB in \d+\.\d\d s, \d+\.\d\d GB/s, tcp, verified", seeded["facts"])


def test_a_port_range_holds_for_all_that_a_server_opens(fleet: Fleet, models: Models) -> None:
    """Mooncake reads it once, when its library is loaded: the look at the host that loads it must know it too."""
    block = lend()
    first, last = block.port, block.port + USABLE - 1
    env = {"RFORK_PORT_RANGE": f"{first}-{last}"}
    seed = start_seed(fleet, models.path("llama"), env=env)
    fork = serving(start_fork(fleet, models.path("llama"), seed.port, env=env))
    assert status(fork)["weights"]["source"] == "seed"
    for server in (seed, fork):
        session, _ = server.get(INFO, params={"rank": 0}).json()["remote_instance_transfer_engine_info"]
        assert first <= int(session.rpartition(":")[2]) <= last
        assert first <= urlsplit(status(server)["listener"]).port <= last


def test_where_nobody_asks_for_it_sglang_is_as_released(fleet: Fleet, models: Models) -> None:
    """The same routes, the same answers, the same number of listening sockets, and not a line in the log."""
    stock = fleet.start(models.path("llama"), env=STOCK)
    installed = fleet.start(models.path("llama"))
    assert routes(installed) == routes(stock)
    for path in ("/rfork/v1/status", "/get_remote_instance_transfer_engine_info?rank=0"):
        ours, theirs = installed.get(path), stock.get(path)
        assert (ours.status_code, ours.text) == (theirs.status_code, theirs.text)
    assert installed.generate() == stock.generate()
    assert num_listeners(installed) == num_listeners(stock)
    assert [line for line in rfork_lines(installed) if "Available" not in line] == []


def routes(server: Server) -> list[str]:
    return sorted(server.get("/openapi.json").json()["paths"])


def num_listeners(server: Server) -> int:
    connections = [c for p in server.processes() for c in p.net_connections("tcp")]
    return sum(c.status == psutil.CONN_LISTEN for c in connections)


MISSING_IN_MAIN = """
    from sglang.srt.entrypoints import http_server
    del http_server._setup_and_run_http_server
"""
MISSING_IN_RANK = """
    from sglang.srt.utils import weight_checker
    del weight_checker.WeightChecker._reset_tensors
"""

MISSING_IN_PLUGIN = """
    from sglang.srt.arg_groups import resolution_hooks
    del resolution_hooks.register_resolution_hook
"""


@pytest.mark.parametrize(
    ("name", "register"),
    [("_setup_and_run_http_server", MISSING_IN_MAIN), ("WeightChecker._reset_tensors", MISSING_IN_RANK)],
    ids=["in the main process", "in a rank"],
)
def test_a_hook_that_cannot_be_applied_keeps_the_server_from_starting(
    name: str, register: str, fleet: Fleet, models: Models
) -> None:
    """As with a release that has renamed something: a server that silently loads from disk would be worse."""
    install_plugin(fleet.folder, "another_release", register)
    server = fleet.start(models.path("llama"), SEED, env=ENV, wait=False)
    assert server.wait_until_ended(90) != 0
    refusal = f"rfork {rfork.__version__}: refusing to start: SGLang 0.5.23 does not let R-Fork hook"
    line = next(line for line in server.log().splitlines() if refusal in line)
    assert name in line
    assert "supported: SGLang 0.5.16 to 0.5.23" in line


def test_the_same_server_starts_where_nobody_asked_for_a_fork(fleet: Fleet, models: Models) -> None:
    """Nor does a path that has our name in it ask."""
    install_plugin(fleet.folder, "another_release", MISSING_IN_PLUGIN)
    assert fleet.start(models.path("llama")).generate().tokens


@pytest.mark.parametrize("asked", [True, False], ids=["asked", "not asked"])
def test_an_unsupported_sglang_is_refused_by_version_where_a_fork_is_asked(
    asked: bool, fleet: Fleet, models: Models
) -> None:
    install_metadata(fleet.folder, "sglang", "0.5.99")
    server = fleet.start(models.path("llama"), *([SEED] if asked else []), wait=False)
    if asked:
        assert server.wait_until_ended(60) != 0
        assert "refusing to start: SGLang 0.5.99 is installed" in server.log()
    else:
        assert server.wait_until_ready().generate().tokens


@pytest.mark.parametrize(
    ("flags", "env", "said"),
    [
        ((*DEAD, "--weight-cache-mode", "client"), {}, "--weight-cache-mode client"),
        ((*DEAD, "--use-ray"), {}, "--use-ray"),
        ((*DEAD, "--smg-grpc-mode"), {}, "--smg-grpc-mode"),
        ((SEED, "--encoder-only"), {}, "--encoder-only"),
        ((SEED, "--tp", "2", "--dwdp-size", "2"), {}, "--dwdp-size 2"),
        ((SEED, "--elastic-ep-backend", "mooncake", "--elastic-ep-join-mode", "recover"), {}, "--elastic-ep-join-mode"),
        (DEAD, {"SGLANG_RUST_SERVER": "1"}, "SGLANG_RUST_SERVER"),
        (DEAD[:-2], {}, "-service-port is missing"),
        ((*DEAD, "--rfork-config", '{"sed": "off"}'), {}, "did you mean 'seed'"),
        (DEAD, {"RFORK_VERIFY": "yes"}, "verify: expected full, sample or off"),
        (DEAD, {"RFORK_LISTEN": "nowhere.invalid:1"}, "nowhere.invalid"),
    ],
)
def test_what_cannot_work_is_refused_by_name_in_one_line(
    flags: tuple[str, ...], env: dict[str, str], said: str, fleet: Fleet, models: Models
) -> None:
    server = fleet.start(models.path("llama"), *flags, env={**ENV, **env}, wait=False)
    assert server.wait_until_ended(60) != 0
    line = next(line for line in server.log().splitlines() if "refusing to start" in line)
    assert line.startswith("rfork")
    assert said in line
    assert "Traceback" not in server.log(), server.log()[-3000:]
    assert "role scheduler" not in server.log(), "it is refused before anything is spawned"
