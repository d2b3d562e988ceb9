"""Who gets a group without a fleet key, and where the seed may then dial."""

from ipaddress import IPv4Address

import pytest

from rfork.seed.door import caller_of
from rfork.seed.group_clients import peers_of
from rfork.wire.collective import InitGroup
from rfork.wire.seed import Refusal

ALLOWED = ("203.0.113.0/24",)
# Read here, never called: 10/8, both ends of 172.16/12, and 192.168/16.
PRIVATE = tuple(str(IPv4Address(number)) for number in (0x0A000007, 0xAC100001, 0xAC1FFFFF, 0xC0A80101))


def asked(backend: str, interface: str = "") -> InitGroup:
    return InitGroup(
        master_address="", ports="0", group_rank=0, world_size=2, backend=backend, lease="x", interface=interface
    )


@pytest.mark.parametrize(
    "caller",
    [
        *("127.0.0.1", "127.66.0.1", "::1", "::ffff:127.0.0.1", "169.254.1.1", "fe80::1%eth0", *PRIVATE),
        *("100.64.0.1", "100.127.255.255", "fd00::2", "fc00::1", "203.0.113.9"),
    ],
)
def test_near_and_allowed_callers_get_a_group_of_any_backend(caller: str) -> None:
    for backend in ("nccl", "hccl", "gloo"):
        assert not isinstance(peers_of(asked(backend), caller, ALLOWED), Refusal)


@pytest.mark.parametrize(
    "caller",
    [
        *("198.51.100.7", "172.32.0.1", "100.128.0.1", "192.0.2.7", "0.0.0.0", "240.0.0.1", "11.0.0.1"),
        *("2001:db8::7", "::", "::ffff:198.51.100.7", "64:ff9b::a00:1", "localhost", "", None),
    ],
)
@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_others_get_none_where_nothing_can_be_checked(backend: str, caller: str | None) -> None:
    """`is_private` would let some of these in, and others on other releases of Python."""
    refusal = peers_of(asked(backend), caller, ALLOWED)
    assert isinstance(refusal, Refusal)
    assert refusal.reason == "not_for_this_address"
    assert "fleet key" in refusal.message
    assert "group_clients" in refusal.message


def test_gloo_may_dial_its_caller_and_whom_the_operator_allows() -> None:
    assert peers_of(asked("gloo"), "198.51.100.7", ()) == ("198.51.100.7",)
    assert peers_of(asked("gloo"), "::ffff:198.51.100.7", ALLOWED) == ("198.51.100.7", "203.0.113.0/24")
    assert peers_of(asked("gloo"), None, ALLOWED) == ("203.0.113.0/24",)


def test_gloo_without_anybody_to_dial_is_refused_at_once() -> None:
    refusal = peers_of(asked("gloo"), None, ())
    assert isinstance(refusal, Refusal)
    assert "a proxy passed it on" in refusal.message


@pytest.mark.parametrize("interface", [PRIVATE[0], "no address", "198.51.100.8"])
def test_a_client_that_says_where_it_is_and_can_not_be_dialled_there_hears_of_it(interface: str) -> None:
    refusal = peers_of(asked("gloo", interface), "198.51.100.7", ALLOWED)
    assert isinstance(refusal, Refusal)
    assert f"'{interface}', expected one of 198.51.100.7, 203.0.113.0/24" in refusal.message
    assert not isinstance(peers_of(asked("gloo", "203.0.113.7"), "198.51.100.7", ALLOWED), Refusal)
    assert not isinstance(peers_of(asked("nccl", interface), PRIVATE[1], ()), Refusal), "NCCL chooses its own"


@pytest.mark.parametrize("name", ["x-forwarded-for", "forwarded", "via", "x-real-ip"])
def test_who_calls_through_a_proxy_is_not_known(name: str) -> None:
    """uvicorn takes the address from such a header where it trusts the proxy: it is what anybody wrote."""
    assert caller_of({"client": ("192.0.2.1", 1)}, {name: "192.0.2.1"}) is None
    assert caller_of({"client": ("192.0.2.1", 1)}, {}) == "192.0.2.1"
    assert caller_of({"client": None}, {}) is None
