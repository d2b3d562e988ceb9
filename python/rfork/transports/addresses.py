"""Which of this host's addresses others can reach it at, without asking a name server."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from pathlib import Path

from rfork.transports.mooncake_host import bare_host

_SIOCGIFADDR = 0x8915
_ELSEWHERE = {socket.AF_INET: "192.0.2.1", socket.AF_INET6: "2001:db8::1"}
"""Documentation addresses: connecting a UDP socket there sends nothing and tells which address the default route
has.
"""


def advertise_host(explicit: str | None = None, *, family: int | None = None) -> str:
    """The address that peers should use: `explicit` as given, else a routable one of `family`, else loopback.

    Without a family IPv4 comes first. Loopback is the answer only where this host has nothing else.
    """
    if explicit:
        return bare_host(explicit)
    families = [family] if family is not None else [socket.AF_INET, socket.AF_INET6]
    for wanted in families:
        found = _default_route_address(wanted) or next(iter(interface_addresses(wanted)), None)
        if found:
            return found
    return "::1" if family == socket.AF_INET6 else "127.0.0.1"


def is_loopback(host: str) -> bool:
    """Whether only this host reaches `host`. Names other than localhost count as reachable."""
    return bare_host(host) == "localhost" or _parsed(host, "is_loopback")


def is_own(host: str) -> bool:
    """Whether this host (this network namespace) has that address."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(bare_host(host), 0, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def is_wildcard(host: str) -> bool:
    """Whether `host` is an address to bind to, and none to connect to."""
    return _parsed(host, "is_unspecified")


def _parsed(host: str, question: str) -> bool:
    try:
        return bool(getattr(ipaddress.ip_address(bare_host(host).partition("%")[0]), question))
    except ValueError:
        return False


def _is_routable(address: str) -> bool:
    ip = ipaddress.ip_address(address)
    return not (ip.is_loopback or ip.is_link_local or ip.is_unspecified or ip.is_multicast)


def _default_route_address(family: int) -> str | None:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((_ELSEWHERE[socket.AddressFamily(family)], 9))
        address = str(probe.getsockname()[0])
        if _is_routable(address):
            return address
    return None


def interface_addresses(family: int) -> list[str]:
    """Routable addresses of the interfaces that are up, in the kernel's order."""
    found = _ipv6_addresses() if family == socket.AF_INET6 else _ipv4_addresses()
    return [address for address in found if _is_routable(address)]


def _ipv4_addresses() -> list[str]:
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            with contextlib.suppress(OSError):
                reply = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
                found.append(socket.inet_ntoa(reply[20:24]))
    return found


def _ipv6_addresses() -> list[str]:
    try:
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
    except OSError:
        return []
    return [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(line.split()[0])) for line in lines]
