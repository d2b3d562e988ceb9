"""Addresses that strangers tell: read as gloo reads them, within bounds, or not at all."""

import ipaddress
import socket
import struct
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import SeedLost
from rfork.transports.peer_address import check_told, is_within, parsed, told_to_gloo


def told(
    address: str = "192.0.2.7",
    port: int = 4711,
    *,
    host: bytes = b"node-7",
    family: int | None = None,
    zone: int = 0,
    pairs: tuple[int, ...] = (-1, 0),
) -> bytes:
    """As gloo puts it into a store."""
    ip = ipaddress.ip_address(address)
    family = family if family is not None else socket.AF_INET if ip.version == 4 else socket.AF_INET6
    place = struct.pack("=H", family) + struct.pack("!H", port)
    if ip.version == 4:
        place += ip.packed
    else:
        place += bytes(4) + ip.packed + struct.pack("=I", zone)
    place = place.ljust(136, b"\xa5")  # what lies behind an address is not initialised
    size = struct.Struct("=Q").pack
    return size(len(host)) + host + size(len(place)) + place + struct.pack(f"={len(pairs)}q", *pairs)


OWN = told("198.51.100.1")


@pytest.mark.parametrize(
    ("address", "read"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("2001:db8::7", "2001:db8::7"),
        ("::1", "::1"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
    ],
)
def test_both_families_are_read_and_mapped_addresses_are_those_that_they_map(address: str, read: str) -> None:
    found = told_to_gloo(told(address, 80))
    assert (str(found.address), found.port, found.num_pairs) == (read, 80, 2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff" * 7,
        b"\xff" * 200,
        told()[:-1],
        told()[:100],
        told() + b"x",
        told(family=socket.AF_UNIX),
        told(family=0),
        told(host=b"x" * 256),
        told("fe80::1", zone=2),
        told().replace(struct.pack("=Q", 136), struct.pack("=Q", 128)),
        told().replace(struct.pack("=Q", 136), struct.pack("=Q", 1 << 63)),
    ],
)
def test_what_has_another_form_is_no_address(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"bytes|family|zone"):
        told_to_gloo(data)
    with pytest.raises(SeedLost, match="can't be read"):
        check_told(data, OWN, ["0.0.0.0/0", "::/0"])


def test_what_this_member_told_in_another_form_permits_nothing() -> None:
    """A transport of gloo that is not known here: its addresses would be misread."""
    with pytest.raises(SeedLost, match=r"gloo tells addresses here in a form that can't be read.*fleet key"):
        check_told(told(), b"another form", ["0.0.0.0/0"])


def test_without_a_bound_any_address_passes_in_the_known_form() -> None:
    """And any form at all where this member's own is not known: gloo looks at it then, as if nobody stood between."""
    check_told(told("203.0.113.7"), OWN, None)
    check_told(b"a form of theirs", b"a form of ours", None)
    for wrong in (b"", told(pairs=()), told(pairs=(0, 1, 2)), told()[:-1]):
        with pytest.raises(SeedLost, match="the other member told gloo"):
            check_told(wrong, OWN, None)


def test_a_refusal_says_who_what_was_expected_and_what_to_try() -> None:
    with pytest.raises(SeedLost) as refused:
        check_told(told("192.0.2.7", 22), OWN, ["198.51.100.7", "203.0.113.0/24"])
    text = str(refused.value)
    assert "told gloo to dial 192.0.2.7 port 22, which is not done" in text
    assert "expected one of 198.51.100.7, 203.0.113.0/24." in text
    assert "`group_clients`" in text


ADDRESSES = st.ip_addresses().map(str)


@given(ADDRESSES, st.integers(0, 65535), st.binary(max_size=255), st.lists(st.integers(-1, 9), max_size=4))
def test_every_address_is_read_as_it_was_told(address: str, port: int, host: bytes, pairs: list[int]) -> None:
    found = told_to_gloo(told(address, port, host=host, pairs=tuple(pairs)))
    assert (found.address, found.port, found.num_pairs) == (parsed(address), port, len(pairs))


@given(st.binary(max_size=300))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(SeedLost):
        check_told(data, OWN, ["203.0.113.7"])


@given(ADDRESSES, st.lists(st.tuples(st.integers(0, 180), st.integers(0, 255)), max_size=4), st.integers(0, 180))
def test_what_is_permitted_is_what_gloo_will_dial(address: str, changes: list[tuple[int, int]], num_bytes: int) -> None:
    """Read here by gloo's rule, without a look at bounds, whatever was done to it on the way."""
    data = bytearray(told(address))
    for place, value in changes:
        data[place % len(data)] = value
    data = data[: num_bytes or None] if num_bytes < 20 else data
    try:
        check_told(bytes(data), OWN, ["192.0.2.0/24", "2001:db8::/32", "128.0.0.0/1"])
    except SeedLost:
        return
    start = 16 + int.from_bytes(data[:8], sys.byteorder)
    family = int.from_bytes(data[start : start + 2], sys.byteorder)
    packed = data[start + 4 : start + 8] if family == socket.AF_INET else data[start + 8 : start + 24]
    dialled = parsed(str(ipaddress.ip_address(bytes(packed))))
    assert is_within(dialled, ["192.0.2.0/24", "2001:db8::/32", "128.0.0.0/1"])


@pytest.mark.parametrize(
    ("text", "network", "inside"),
    [
        ("192.0.2.7", "192.0.2.7", True),
        ("::ffff:192.0.2.7", "192.0.2.0/24", True),
        ("fe80::1%eth0", "fe80::/10", True),
        ("192.0.2.7", "2001:db8::/32", False),
        ("localhost", "127.0.0.0/8", False),
        ("", "0.0.0.0/0", False),
    ],
)
def test_an_address_lies_in_a_network_of_its_own_family(text: str, network: str, inside: bool) -> None:
    assert is_within(parsed(text), [network]) is inside
