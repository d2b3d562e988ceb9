"""Which fabric is served and tried, and under which address."""

from __future__ import annotations

import logging
import socket
from pathlib import Path

import pytest

from rfork.binding import Endpoint
from rfork.config import Config
from rfork.errors import TransportError
from rfork.transports.addresses import advertise_host, is_loopback, is_wildcard
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.select import (
    Facts,
    GivenFabrics,
    MooncakeFabrics,
    active_rdma_devices,
    device_names,
    serving_transports,
)

CPU = Facts("cpu", 0, (), False, "boot-1")
GPU = Facts("cuda", 3, (), True, "boot-1")
GPU_RDMA = Facts("cuda", 3, ("mlx5_0",), True, "boot-1")
NVLINK = Endpoint("nvlink_intra", "192.0.2.1:1", "host:boot-1")
NVLINK_ELSEWHERE = Endpoint("nvlink_intra", "192.0.2.1:1", "host:boot-2")
RDMA = Endpoint("rdma", "192.0.2.1:2")
TCP = Endpoint("tcp", "192.0.2.1:3")


def served(facts: Facts, **settings: object) -> list[tuple[str, str]]:
    config = Config(advertise_host="192.0.2.9", **settings)  # type: ignore[arg-type]
    return [(t.protocol, t.scope) for t in serving_transports(config, facts)]


def tried(facts: Facts, *endpoints: Endpoint, **settings: object) -> list[Endpoint]:
    return [a.endpoint for a in MooncakeFabrics(Config(**settings), facts).attempts(endpoints)]  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (CPU, [("tcp", "any")]),
        (GPU, [("nvlink_intra", "host:boot-1"), ("tcp", "any")]),
        (GPU_RDMA, [("nvlink_intra", "host:boot-1"), ("rdma", "any")]),
        (CPU._replace(rdma_devices=("mlx5_0",)), [("rdma", "any")]),
        (GPU_RDMA._replace(has_nvlink_build=False), [("rdma", "any")]),
    ],
)
def test_auto_serves_every_fast_fabric_and_tcp_only_for_want_of_rdma(
    facts: Facts, expected: list[tuple[str, str]]
) -> None:
    assert served(facts) == expected


def test_an_asked_for_protocol_is_the_only_one() -> None:
    assert served(GPU_RDMA, protocol="tcp") == [("tcp", "any")]


@pytest.mark.parametrize(
    ("facts", "protocol", "reason"),
    [
        (CPU, "rdma", "no active RDMA device"),
        (CPU, "nvlink_intra", "NVLink needs a CUDA device"),
        (GPU._replace(has_nvlink_build=False), "nvlink_intra", "no intra-node NVLink"),
        (CPU._replace(build_problem="Mooncake is not installed"), "auto", "Mooncake is not installed"),
    ],
)
def test_what_can_not_be_served_says_why(facts: Facts, protocol: str, reason: str) -> None:
    with pytest.raises(TransportError, match=reason):
        served(facts, protocol=protocol)


def test_a_loopback_address_is_for_this_host_only() -> None:
    """It is never advertised to another host (P43)."""
    transports = serving_transports(Config(advertise_host="127.0.0.1"), CPU)
    assert [t.scope for t in transports] == ["host:boot-1"]


def test_the_fastest_usable_endpoint_is_tried_first() -> None:
    assert tried(GPU_RDMA, TCP, RDMA, NVLINK) == [NVLINK, RDMA, TCP]


def test_nvlink_of_another_host_is_left_out() -> None:
    assert tried(GPU_RDMA, TCP, RDMA, NVLINK_ELSEWHERE) == [RDMA, TCP]


def test_what_this_side_lacks_is_left_out() -> None:
    assert tried(CPU, TCP, RDMA, NVLINK) == [TCP]


def test_a_configured_protocol_leaves_out_the_others() -> None:
    assert tried(GPU_RDMA, TCP, RDMA, NVLINK, protocol="tcp") == [TCP]


@pytest.mark.parametrize("session_id", ["", "host", "fd00::1:15", "host:0", "host:99999", ":5"])
def test_a_session_id_that_is_none_is_left_out(session_id: str) -> None:
    assert tried(CPU, Endpoint("tcp", session_id)) == []


def test_an_unknown_protocol_is_left_out() -> None:
    """A newer seed may serve what this client does not know."""
    assert tried(CPU, Endpoint("quantum", "192.0.2.1:1"), TCP) == [TCP]


def test_tcp_into_a_gpu_is_a_warning_that_names_the_fix(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert tried(GPU, TCP, NVLINK_ELSEWHERE) == [TCP]
    assert "nvlink_intra: it is for clients on the seed's own host" in caplog.text
    assert "rdma: no active RDMA device" in caplog.text


def test_tcp_into_host_memory_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    tried(CPU, TCP)
    assert caplog.text == ""


def test_the_local_side_has_the_peers_address_family() -> None:
    """Mooncake speaks one family at a time."""
    fabrics = MooncakeFabrics(Config(advertise_host="192.0.2.9"), CPU)
    (attempt,) = fabrics.attempts([Endpoint("tcp", "[fd00::7]:1")])
    assert ":" in repr(attempt.transport).split(" at ")[1].split(" device")[0]


def test_given_fabrics_match_by_protocol_and_scope() -> None:
    fabric = GivenFabrics([MemoryTransport(MemoryFabric())])
    there, elsewhere = Endpoint("memory", "memory:1"), Endpoint("memory", "memory:1", "host:x")
    assert [a.endpoint for a in fabric.attempts([TCP, elsewhere, there])] == [there]


def test_each_gpu_has_its_own_nics() -> None:
    assert device_names({"0": "mlx5_0", "3": "mlx5_3,mlx5_4"}, 3) == "mlx5_3,mlx5_4"
    assert device_names({"0": "mlx5_0"}, 3) == ""
    assert device_names("mlx5_9", 3) == "mlx5_9"
    assert device_names(None, 3) == ""


def test_only_devices_with_an_active_port_count(tmp_path: Path) -> None:
    for device, state in (("mlx5_0", "4: ACTIVE\n"), ("mlx5_1", "1: DOWN\n")):
        port = tmp_path / device / "ports" / "1"
        port.mkdir(parents=True)
        (port / "state").write_text(state)
    assert active_rdma_devices(tmp_path) == ("mlx5_0",)
    assert active_rdma_devices(tmp_path / "none") == ()


def test_an_explicit_address_is_taken_as_it_is() -> None:
    assert advertise_host("[fd00::1]") == "fd00::1"
    assert advertise_host("127.0.0.1") == "127.0.0.1"
    assert advertise_host("pod-0.seeds") == "pod-0.seeds"


def test_the_own_address_is_one_that_this_host_can_bind() -> None:
    with socket.socket() as probe:
        probe.bind((advertise_host(family=socket.AF_INET), 0))


def test_addresses_are_told_apart() -> None:
    assert all(map(is_loopback, ["127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost"]))
    assert not any(map(is_loopback, ["192.0.2.1", "fd00::1", "seed", "0.0.0.0"]))
    assert all(map(is_wildcard, ["0.0.0.0", "::", "[::]"]))
    assert not any(map(is_wildcard, ["127.0.0.1", "seed"]))
