"""Which fabrics a process serves on, and which of a seed's endpoints a client tries, in order: the fastest first.

NVLink inside one host, RDMA between hosts, TCP last and not without a word where a GPU waits for it.
"""

from __future__ import annotations

import ipaddress
import logging
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from rfork.binding import ANYWHERE, Endpoint
from rfork.config import Config
from rfork.errors import TransportError
from rfork.transports.addresses import advertise_host, is_loopback
from rfork.transports.base import Transport
from rfork.transports.mooncake import PROTOCOLS, MooncakeTransport
from rfork.transports.mooncake_host import split_session_id
from rfork.transports.mooncake_import import environment, load_mooncake, load_time_variables

logger = logging.getLogger(__name__)

MIB = 1 << 20
INFINIBAND = Path("/sys/class/infiniband")
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


class Pace(NamedTuple):
    """How a link likes to be read: the longest slice, and how many bytes in how many slices fly at once.

    `longest_nap_s` is how late the end of what flies may be seen. `maps_regions`: the first read of each region maps
    it, which takes a tenth of a millisecond.
    """

    slice_nbytes: int
    flying_nbytes: int
    flying_slices: int = 64
    longest_nap_s: float = 2e-3
    maps_regions: bool = False


PACES = {
    "nvlink_intra": Pace(256 * MIB, 4096 * MIB, flying_slices=1024, longest_nap_s=1e-4, maps_regions=True),
    "rdma": Pace(64 * MIB, 512 * MIB),
    "tcp": Pace(16 * MIB, 64 * MIB),
    "memory": Pace(16 * MIB, 64 * MIB),
}
"""Over NVLink Mooncake calls a read done once everything that it was given has ended. So much flies at once, and the
pause before more is short: with 1 GiB at a time and longer pauses 31 GB took 93 ms, of which 79 were the link's.

TCP slices are small because the deadline is per slice: 64 MiB in flight end in time on a link of 20 Mbit/s."""


class Facts(NamedTuple):
    """What this rank's device and host have. `build_problem` is why Mooncake can't be loaded, if it can't."""

    device_type: str
    device_index: int
    rdma_devices: tuple[str, ...]
    has_nvlink_build: bool
    boot_id: str
    build_problem: str | None = None

    @property
    def host_scope(self) -> str:
        return f"host:{self.boot_id}"


def gather_facts(device_type: str, device_index: int | None, config: Config) -> Facts:
    """Look at this host. Never raises: what is missing shows as missing.

    Loads Mooncake's library, which takes address family and ports from `config` only when it is loaded first here.
    """
    has_nvlink_build, problem = False, None
    try:
        with environment(load_time_variables(advertise_host(config.advertise_host), config.port_range)):
            has_nvlink_build = bool(getattr(load_mooncake(), "SUPPORT_INTRA_NVLINK", False))
    except TransportError as error:
        problem = str(error)
    return Facts(device_type, device_index or 0, active_rdma_devices(), has_nvlink_build, read_boot_id(), problem)


def active_rdma_devices(root: Path = INFINIBAND) -> tuple[str, ...]:
    """Names of RDMA devices with at least one active port."""
    try:
        devices = sorted(root.iterdir())
    except OSError:
        return ()
    return tuple(d.name for d in devices if any(_is_active(p) for p in d.glob("ports/*/state")))


def _is_active(state: Path) -> bool:
    try:
        return "ACTIVE" in state.read_text()
    except OSError:
        return False


def read_boot_id(path: Path = BOOT_ID) -> str:
    """The same for every process of one running host, containers included; empty where the kernel does not tell."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def problem_with(protocol: str, facts: Facts) -> str | None:
    """Why this process can't use `protocol`, or None."""
    if facts.build_problem is not None:
        return facts.build_problem
    if protocol == "nvlink_intra":
        if facts.device_type != "cuda":
            return f"NVLink needs a CUDA device, these weights are on {facts.device_type}"
        if not facts.has_nvlink_build:
            return "this Mooncake wheel has no intra-node NVLink: install the one for your CUDA version"
        if not facts.boot_id:
            return "this host has no boot id to tell peers on it from others"
    if protocol == "rdma" and not facts.rdma_devices:
        return f"no active RDMA device under {INFINIBAND}"
    return None


def serving_transports(config: Config, facts: Facts) -> list[MooncakeTransport]:
    """The fabrics to serve on, the fastest first: one engine each.

    `auto` leaves TCP out where RDMA is there. Raises TransportError where the asked-for protocol, or every one, can't
    be used here.
    """
    if config.protocol != "auto":
        names = [config.protocol]
    else:
        names = [p for p in PROTOCOLS if problem_with(p, facts) is None]
        if "rdma" in names:
            names.remove("tcp")
    problem = problem_with(names[0] if names else "tcp", facts)
    if problem is not None:
        raise TransportError(f"can't serve over {names[0] if names else 'any protocol'}: {problem}")
    return [transport_for(name, config, facts) for name in names]


def transport_for(protocol: str, config: Config, facts: Facts, *, family: int | None = None) -> MooncakeTransport:
    """One fabric, at this host's advertised address. What peers on other hosts can't use is scoped to this host."""
    host = advertise_host(config.advertise_host, family=family)
    if family is not None and _family(host) not in (None, family):
        host = advertise_host(family=family)
    local_only = protocol == "nvlink_intra" or is_loopback(host)
    return MooncakeTransport(
        protocol=protocol,
        host=host,
        device=device_names(config.ib_device, facts.device_index) if protocol == "rdma" else "",
        port_range=config.port_range,
        device_index=facts.device_index if facts.device_type == "cuda" else None,
        connect_timeout_s=config.connect_timeout_s,
        scope=facts.host_scope if local_only else ANYWHERE,
    )


def device_names(ib_device: str | dict[str, str] | None, device_index: int) -> str:
    """NICs for one device, comma-separated; empty lets Mooncake discover them."""
    if isinstance(ib_device, dict):
        return ib_device.get(str(device_index), "")
    return ib_device or ""


class Attempt(NamedTuple):
    """One endpoint of a seed, and the fabric here that reaches it."""

    endpoint: Endpoint
    transport: Transport


class Fabrics(Protocol):
    """What a client can connect with."""

    def attempts(self, endpoints: Sequence[Endpoint]) -> list[Attempt]:
        """Endpoints that are of use here, in the order in which to try them."""


class GivenFabrics:
    """Fabrics that exist already, matched by protocol and scope, in their own order."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._transports = tuple(transports)

    def attempts(self, endpoints: Sequence[Endpoint]) -> list[Attempt]:
        return [
            Attempt(endpoint, transport)
            for transport in self._transports
            for endpoint in endpoints
            if endpoint.protocol == transport.protocol and endpoint.scope in (ANYWHERE, transport.scope)
        ]


class MooncakeFabrics:
    """Mooncake over whatever this host has and `protocol` allows."""

    def __init__(self, config: Config, facts: Facts) -> None:
        self._config = config
        self._facts = facts

    def attempts(self, endpoints: Sequence[Endpoint]) -> list[Attempt]:
        """The fastest first. TCP into a GPU's memory is tried last, with a warning that names the fix."""
        usable = [e for e in endpoints if self.problem_with(e) is None]
        usable.sort(key=lambda e: PROTOCOLS.index(e.protocol))
        if usable and usable[0].protocol == "tcp" and self._facts.device_type == "cuda":
            logger.warning(
                "rfork: reading over TCP at a small part of the link's speed, because %s",
                self.why_only_tcp(endpoints),
            )
        return [Attempt(e, self._transport(e)) for e in usable]

    def problem_with(self, endpoint: Endpoint) -> str | None:
        """Why an endpoint is of no use here, or None."""
        if endpoint.protocol not in PROTOCOLS:
            return f"protocol {endpoint.protocol!r} is unknown here"
        if self._config.protocol not in ("auto", endpoint.protocol):
            return f"protocol {self._config.protocol} is configured"
        if endpoint.scope not in (ANYWHERE, self._facts.host_scope):
            return "it is for clients on the seed's own host"
        try:
            split_session_id(endpoint.session_id)
        except ValueError as error:
            return str(error)
        return problem_with(endpoint.protocol, self._facts)

    def why_only_tcp(self, endpoints: Sequence[Endpoint]) -> str:
        """What keeps the faster protocols from being used, in one line."""
        if self._config.protocol == "tcp":
            return "`protocol: tcp` is configured"
        reasons = []
        for protocol in ("nvlink_intra", "rdma"):
            offered = [e for e in endpoints if e.protocol == protocol]
            problem = self.problem_with(offered[0]) if offered else "the seed does not offer it"
            reasons.append(f"{protocol}: {problem_with(protocol, self._facts) or problem}")
        return "; ".join(reasons)

    def _transport(self, endpoint: Endpoint) -> MooncakeTransport:
        family = _family(split_session_id(endpoint.session_id)[0])
        return transport_for(endpoint.protocol, self._config, self._facts, family=family)


def _family(host: str) -> int | None:
    """Address family of a literal address; None for a name."""
    try:
        version = ipaddress.ip_address(host.partition("%")[0]).version
    except ValueError:
        return None
    return socket.AF_INET6 if version == 6 else socket.AF_INET
