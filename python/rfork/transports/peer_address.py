"""Which addresses the other member of a group may be dialled at, where no fleet key says who it is.

gloo's members tell each other where they listen, and one dials the other there. What is told is held here against what
is known of its teller, before gloo sees it. NCCL's members tell each other over connections of NCCL's own: nothing can
be held against anything, so that it matters who they are; `NEARBY` is who they may be without further settings.
"""

from __future__ import annotations

import ipaddress
import struct
from collections.abc import Sequence
from typing import NamedTuple

from rfork.errors import SeedLost

Address = ipaddress.IPv4Address | ipaddress.IPv6Address

# Not `is_private`, whose list is another one from release to release of Python, and holds more than its name says.
NEARBY = (
    *("127.0.0.0/8", "169.254.0.0/16", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"),
    "100.64.0.0/10",  # shared address space: carriers', and of some clusters' pods
    *("::1/128", "fe80::/10", "fc00::/7"),
)
"""Loopback, link-local, private and shared addresses: what is not routed between networks."""

MAX_HOST_NCHARS = 255
_INET, _INET6 = 2, 10  # AF_INET and AF_INET6 on Linux
_SIZE = struct.Struct("=Q")
_SOCKADDR_NBYTES = 128 + 8
"""A sockaddr_storage, and a number that gloo puts behind it."""


class Told(NamedTuple):
    """What a member of a gloo group says of itself. `num_pairs` is how many numbers of connections follow."""

    address: Address
    port: int
    num_pairs: int


def parsed(text: str) -> Address | None:
    """An address without its zone, IPv4 in IPv6's clothes as IPv4; None for what is none."""
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return None
    return address if isinstance(address, ipaddress.IPv4Address) else _plain(address)


def _plain(address: ipaddress.IPv6Address) -> Address:
    return address.ipv4_mapped or ipaddress.IPv6Address(int(address))


def is_within(address: Address | None, networks: Sequence[str]) -> bool:
    return address is not None and any(address in ipaddress.ip_network(network) for network in networks)


def told_to_gloo(data: bytes) -> Told:
    """Parse what a member puts into the store: a host's name, a socket address, numbers of connections; each of the
    first two behind its length. As in gloo's `tcp::Rank`, but within bounds. Raises ValueError for all else.
    """
    name_nbytes = _size(data, 0)
    if name_nbytes > MAX_HOST_NCHARS:
        raise ValueError(f"a host's name of {name_nbytes} bytes")
    start = 2 * _SIZE.size + name_nbytes
    if (got := _size(data, start - _SIZE.size)) != _SOCKADDR_NBYTES:
        raise ValueError(f"an address of {got} bytes, expected {_SOCKADDR_NBYTES}")
    rest = len(data) - start - _SOCKADDR_NBYTES
    if rest < 0 or rest % _SIZE.size:
        raise ValueError(f"{len(data)} bytes")
    (family,) = struct.unpack_from("=H", data, start)
    if family == _INET:
        port, packed = struct.unpack_from("!H4s", data, start + 2)
        return Told(ipaddress.IPv4Address(packed), port, rest // _SIZE.size)
    if family != _INET6:
        raise ValueError(f"an address of family {family}")
    port, _, packed, _ = struct.unpack_from("!HI16sI", data, start + 2)
    (zone,) = struct.unpack_from("=I", data, start + 24)
    if zone:  # the number of an interface over there, which would choose one of ours
        raise ValueError(f"an address with zone {zone}")
    return Told(_plain(ipaddress.IPv6Address(packed)), port, rest // _SIZE.size)


def _size(data: bytes, offset: int) -> int:
    if offset + _SIZE.size > len(data):
        raise ValueError(f"{len(data)} bytes")
    return int(_SIZE.unpack_from(data, offset)[0])


def check_told(data: bytes, own: bytes, peers: Sequence[str] | None) -> None:
    """Raises SeedLost unless `data` has the form of `own`, which this member told, and tells an address within `peers`.

    Without `peers` any address will do, and the form is looked at only where it is known: gloo itself checks most of
    it, and reads past the end of the rest.
    """
    try:
        ours = told_to_gloo(own)
    except ValueError as error:
        if peers is None:
            return
        unknown = (
            f"gloo tells addresses here in a form that can't be read ({error}), so none that it is told can be checked"
        )
        raise SeedLost(f"{unknown}. Set a fleet key on both sides, or use the other backend.") from None
    try:
        theirs = told_to_gloo(data)
    except ValueError as error:
        raise SeedLost(f"the other member told gloo an address that can't be read ({error})") from None
    if theirs.num_pairs != ours.num_pairs:  # gloo would look for one that is not there
        got = f"{theirs.num_pairs} numbers of connections, expected {ours.num_pairs}"
        raise SeedLost(f"the other member told gloo {got}")
    if peers is not None and not is_within(theirs.address, peers):
        told = f"the other member told gloo to dial {theirs.address} port {theirs.port}"
        advice = "Behind NAT or a proxy, list its addresses in `group_clients` here, or set a fleet key on both sides."
        raise SeedLost(f"{told}, which is not done: expected one of {', '.join(peers)}. {advice}")
