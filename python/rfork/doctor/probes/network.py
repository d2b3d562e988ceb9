"""The network as others see this host: RDMA devices, the advertised address, ports."""

from __future__ import annotations

import resource
import socket

from rfork.config import Config
from rfork.doctor.finding import Finding, fail, ok, warn
from rfork.doctor.probes.gpu import has_gpu_device
from rfork.errors import TransportError
from rfork.transports.addresses import advertise_host, interface_addresses, is_loopback, is_wildcard
from rfork.transports.mooncake_host import require_free_ports
from rfork.transports.select import INFINIBAND, active_rdma_devices


def probe(config: Config) -> list[Finding]:
    return [*_rdma(config), _address(config), *_ports(config)]


def _rdma(config: Config) -> list[Finding]:
    active = active_rdma_devices()
    if not active:
        there = sorted(d.name for d in INFINIBAND.iterdir()) if INFINIBAND.is_dir() else []
        what = f"none is active ({', '.join(there)} down)" if there else f"none ({INFINIBAND} is empty or missing)"
        if not has_gpu_device():
            return [ok("RDMA", f"{what}; TCP will do for this host")]
        remedy = "forks between hosts go over TCP at 1 to 2 GB/s; in a container, pass /dev/infiniband through"
        return [warn("RDMA", what, remedy)]
    found = [ok("RDMA", f"active: {', '.join(active)}")]
    wanted = config.ib_device.values() if isinstance(config.ib_device, dict) else [config.ib_device or ""]
    unknown = sorted({name for text in wanted for name in text.split(",") if name and name not in active})
    if unknown:
        found.append(
            fail("RDMA", f"ib_device names {', '.join(unknown)}, which is not active here", "correct ib_device")
        )
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit != resource.RLIM_INFINITY:
        remedy = "ulimit -l unlimited (docker: --ulimit memlock=-1; systemd: LimitMEMLOCK=infinity)"
        found.append(warn("memlock", f"memory that may be pinned is limited to {limit >> 20} MiB", remedy))
    return found


def _address(config: Config) -> Finding:
    subject = "address"
    host = advertise_host(config.advertise_host)
    if is_wildcard(host):
        return fail(
            subject, f"advertise_host {host} is an address to listen on, not one to reach", "name this host's own"
        )
    try:
        addresses = sorted({str(info[4][0]) for info in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)})
    except OSError as error:
        return fail(subject, f"advertise_host {host} does not resolve: {error}", "correct advertise_host, or drop it")
    shown = host if addresses == [host] else f"{host} ({', '.join(addresses)})"
    if all(is_loopback(address) for address in addresses):
        remedy = "only clients on this host can fork from here; set advertise_host to an address that others reach"
        return warn(subject, f"{shown} is loop-back", remedy)
    own = {*interface_addresses(socket.AF_INET), *interface_addresses(socket.AF_INET6)}
    if config.advertise_host and not own.intersection(addresses):
        remedy = f"right behind NAT that forwards all ports; else choose one of {', '.join(sorted(own)) or 'none'}"
        return warn(subject, f"{shown} is on no interface of this host", remedy)
    return ok(subject, f"{shown} is what peers are told")


def _ports(config: Config) -> list[Finding]:
    subject, found = "ports", []
    if config.listen is not None:
        host, port = config.listen
        try:
            with socket.create_server((host or "", port), family=_family(host)):
                pass
        except OSError as error:
            found.append(
                fail(subject, f"listen {host or ''}:{port}: {error.strerror}", "choose a free port in `listen`")
            )
    if config.port_range is None:
        bounds = "any free port (set port_range to bound them)"
    else:
        bounds = f"ports {config.port_range[0]} to {config.port_range[1]}"
        try:
            require_free_ports(config.port_range)
        except TransportError as error:
            found.append(fail(subject, str(error), "widen port_range, or end what holds its ports"))
    text = (
        f"open between instances, and to nobody else: SGLang's own, rfork's listener and transfer engines on {bounds}"
    )
    return [*found, ok(subject, text)]


def _family(host: str | None) -> socket.AddressFamily:
    return socket.AF_INET6 if host and ":" in host else socket.AF_INET
