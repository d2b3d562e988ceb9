"""Whom a seed dials once its client has joined: the client, where it called from, and nobody else.

gloo dials the member with the lower address. Seeds are at 127.0.0.9 here, their callers at 127.0.0.1.
"""

import datetime
import logging
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from typing import Any

import httpx
import pytest
import torch.distributed as dist
from support.groups import GroupSeed, many, receive
from support.seed_node import until

from rfork import wire
from rfork.auth import seed_audience
from rfork.client import receive as receiving
from rfork.client.calls import Caller, parse_json
from rfork.client.sources import signer_of
from rfork.config import Config
from rfork.errors import SeedError, SeedLost, SeedRefused
from rfork.seed.app import make_app
from rfork.transports.collective import _ToldAddresses
from rfork.wire.collective import INIT_PATH, InitGroup, InitReply

KEY = "0123456789abcdef0123456789abcdef"
INIT = {"master_address": "", "ports": "0", "group_rank": 0, "world_size": 2, "backend": "gloo"}
SEED_AT, TRAP_AT = "127.0.0.9", "127.0.0.5"
SOON = datetime.timedelta(seconds=20)
Change = Callable[[bytearray, int], None]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def trap() -> Iterator[socket.socket]:
    """A listener that a seed has no business with. Whoever connects waits in its queue, also once they have gone."""
    with socket.create_server((TRAP_AT, 0)) as listening:
        listening.setblocking(False)
        yield listening


def was_dialled(trap: socket.socket) -> bool:
    try:
        trap.accept()[0].close()
    except BlockingIOError:
        return False
    return True


def signer_for(setting: dict[str, str]) -> Any:
    return signer_of(Config(key=KEY), "i-joined") if "key" in setting else None


@contextmanager
def joined(seed: GroupSeed, signer: Any = None) -> Iterator[dist.Store]:
    """The store of a group that a client has joined, as gloo has it once the seed has told its address."""
    with seed.take("i-joined", signer=signer) as lease:
        body = InitGroup(**INIT, lease=lease.reply.lease)
        audience = seed_audience(seed.node.instance_id)
        caller = Caller(seed.node.listener_url or "", signer=signer, audience=audience)
        with closing(caller):
            answer = caller.call("POST", INIT_PATH, timeout_s=20, limit=1 << 16, body=wire.encode(body))
        ready = parse_json(answer, InitReply, "group")
        shared = dist.TCPStore(SEED_AT, int(ready.ports), 2, False, SOON, wait_for_workers=False)
        store = dist.PrefixStore(ready.group_name, shared)
        store.set("here/1", b"1")
        store.wait(["0/0"], SOON)
        yield store


def tell(store: dist.Store, change: Change) -> None:
    """Put into the store what the seed has put there, changed. `change` gets it, and where its address begins."""
    told = bytearray(store.get("0/0"))
    change(told, 16 + struct.unpack_from("=Q", told)[0])
    store.set("0/1", bytes(told))


def dial(host: str, port: int) -> Change:
    def change(told: bytearray, start: int) -> None:
        struct.pack_into("!H4s", told, start + 2, port, socket.inet_aton(host))

    return change


def ended_because(caplog: pytest.LogCaptureFixture) -> str:
    return next(r.getMessage() for r in reversed(caplog.records) if " ended after " in r.getMessage())


@pytest.mark.parametrize("lazily", ["0", "1"])
def test_a_joined_client_can_not_have_the_seed_dial_another(
    lazily: str,
    stack: ExitStack,
    trap: socket.socket,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its group ends with the reason before anybody is dialled, and the next client is served. gloo's own setting to
    connect later, when something is sent, changes nothing: members with and without it could not connect.
    """
    monkeypatch.setenv("TORCH_GLOO_LAZY_INIT", lazily)
    caplog.set_level(logging.INFO, "rfork")
    seed = GroupSeed(stack, listen=f"{SEED_AT}:0").serve()
    with joined(seed) as store:
        tell(store, dial(*trap.getsockname()))
        until(lambda: seed.broadcasts.num_groups == 0, 30.0)
    assert not was_dialled(trap)
    told = f"told gloo to dial {TRAP_AT} port {trap.getsockname()[1]}"
    assert f"{told}, which is not done: expected one of 127.0.0.1" in ended_because(caplog)
    assert seed.holds(seed.fork())


def cut(told: bytearray, start: int) -> None:
    del told[start + 100 :]


def nothing(told: bytearray, start: int) -> None:
    told.clear()


def without_numbers(told: bytearray, start: int) -> None:
    dial("127.0.0.1", 9)(told, start)
    del told[start + 136 :]


def of_another_family(told: bytearray, start: int) -> None:
    struct.pack_into("=H", told, start, socket.AF_UNIX)


@pytest.mark.parametrize("setting", [{}, {"key": KEY}], ids=["without a key", "with a key"])
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (nothing, "an address that can't be read (0 bytes)"),
        (cut, "an address that can't be read"),
        (without_numbers, "0 numbers of connections, expected 2"),
        (of_another_family, "an address that can't be read (an address of family 1)"),
    ],
)
def test_what_is_not_told_as_gloo_tells_it_ends_the_group(
    change: Change, reason: str, setting: dict[str, str], stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """gloo reads past the end of some of these, which ends the process. A member of the fleet may be ill too."""
    caplog.set_level(logging.INFO, "rfork")
    seed = GroupSeed(stack, listen=f"{SEED_AT}:0", **setting).serve()
    with joined(seed, signer_for(setting)) as store:
        tell(store, change)
        until(lambda: seed.broadcasts.num_groups == 0, 30.0)
    assert f"the other member told gloo {reason}" in ended_because(caplog)
    with seed.take("i-joined", signer=signer_for(setting)) as lease:
        target = seed.target()
        receive(target, lease, signer=signer_for(setting))
    assert seed.holds(target)


@pytest.mark.parametrize("setting", [{"group_clients": f"{TRAP_AT}/32"}, {"key": KEY}], ids=["allowed", "of the fleet"])
def test_an_allowed_address_is_dialled_and_with_a_key_every_one(
    setting: dict[str, str], stack: ExitStack, trap: socket.socket
) -> None:
    seed = GroupSeed(stack, listen=f"{SEED_AT}:0", **setting).serve()
    with joined(seed, signer_for(setting)) as store:
        tell(store, dial(*trap.getsockname()))
        until(lambda: was_dialled(trap), 30.0)
        until(lambda: seed.broadcasts.num_groups == 0, 30.0)


@pytest.mark.parametrize(
    ("listen", "at"),
    [
        *(("127.0.0.1:0", None), (f"{SEED_AT}:0", None), ("[::1]:0", None)),
        *(("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "::1"), ("[::]:0", "127.0.0.1")),
    ],
)
def test_a_client_that_calls_from_where_it_listens_needs_no_setting(
    listen: str, at: str | None, stack: ExitStack
) -> None:
    seed = GroupSeed(stack, many(), listen=listen, **({"advertise_host": at} if at else {})).serve()
    assert seed.holds(seed.fork())


def test_a_client_listens_in_the_family_in_which_the_seed_answers(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name has addresses of both, and the seed listens at one: gloo can't join members of two families."""
    resolve = socket.getaddrinfo

    def both(host: Any, *args: Any, **kwargs: Any) -> Any:
        return [*(resolve("::1", *args, **kwargs) if host == "localhost" else ()), *resolve(host, *args, **kwargs)]

    monkeypatch.setattr(socket, "getaddrinfo", both)
    seed = GroupSeed(stack, listen="0.0.0.0:0", advertise_host="localhost").serve()
    assert seed.holds(seed.fork())


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> str:
    """Clients listen at another address than they call from, as behind NAT."""
    monkeypatch.setattr(receiving, "local_address_towards", lambda *_: "127.0.0.7")
    return "127.0.0.7"


def test_a_client_behind_nat_is_told_what_to_set(stack: ExitStack, elsewhere: str) -> None:
    seed = GroupSeed(stack).serve()
    with pytest.raises(SeedRefused) as refused:
        seed.fork()
    assert refused.value.reason == "not_for_this_address"
    assert f"dialled at '{elsewhere}', expected one of 127.0.0.1." in str(refused.value)
    assert "group_clients" in str(refused.value)
    assert seed.broadcasts.num_groups == 0


def test_a_client_behind_nat_is_served_where_it_is_allowed(stack: ExitStack, elsewhere: str) -> None:
    seed = GroupSeed(stack, many(), listen=f"{SEED_AT}:0", group_clients="127.0.0.6/31").serve()
    assert seed.holds(seed.fork())


def test_what_a_client_says_in_its_request_is_no_permission(
    stack: ExitStack, elsewhere: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It says one address there, and gloo tells another."""
    caplog.set_level(logging.INFO, "rfork")
    monkeypatch.setattr(receiving, "InitGroup", lambda **fields: InitGroup(**{**fields, "interface": "127.0.0.1"}))
    seed = GroupSeed(stack).serve()
    with pytest.raises(SeedError):
        seed.fork()
    until(lambda: seed.broadcasts.num_groups == 0, 30.0)
    assert f"told gloo to dial {elsewhere} port " in ended_because(caplog)


def test_what_a_member_told_itself_is_not_read_back_from_others() -> None:
    """And no other way to read from a store passes by the check."""
    shared = dist.HashStore()
    told = _ToldAddresses(shared, ["127.0.0.1"])
    told.set("0/0", b"mine")
    shared.set("0/0", b"not mine")
    shared.set("0/1", b"theirs")
    assert told.get("0/0") == b"mine"
    assert not told.has_extended_api()
    inner = dist.PrefixStore("0", told)
    for read in (lambda: told.get("0/1"), lambda: told.multi_get(["0/1"]), lambda: inner.multi_get(["1"])):
        with pytest.raises(SeedLost, match="can't be read"):
            read()
    for other in (told.clone, lambda: told.queue_pop("0/1"), lambda: told.compare_set("0/1", "theirs", "theirs")):
        with pytest.raises((RuntimeError, NotImplementedError)):
            other()


async def ask(seed: GroupSeed, caller: str, headers: dict[str, str], backend: str) -> httpx.Response:
    transport = httpx.ASGITransport(make_app(seed.node), client=(caller, 4711))
    async with httpx.AsyncClient(transport=transport, base_url="http://seed", headers=headers) as http:
        return await http.post(INIT_PATH, json={**INIT, "ports": "29500", "backend": backend})


@pytest.mark.parametrize(
    ("caller", "headers", "backend", "reason"),
    [
        ("127.0.0.1", {}, "nccl", "not_understood"),  # let in, and these weights are on the CPU
        ("169.254.3.3", {}, "nccl", "not_understood"),
        ("198.51.100.7", {}, "nccl", "not_understood"),
        ("203.0.113.7", {}, "nccl", "not_for_this_address"),
        ("203.0.113.7", {}, "hccl", "not_for_this_address"),
        ("127.0.0.1", {"X-Forwarded-For": "169.254.3.3"}, "nccl", "not_for_this_address"),
        ("127.0.0.1", {"Via": "1.1 proxy"}, "nccl", "not_for_this_address"),
    ],
)
async def test_without_a_key_others_than_near_ones_get_no_nccl_group(
    caller: str, headers: dict[str, str], backend: str, reason: str, stack: ExitStack
) -> None:
    """NCCL shows nobody what its members tell each other, so it matters who they are. Others are refused at once."""
    seed = GroupSeed(stack, stock_nccl_clients="on", group_clients="198.51.100.0/24").serve()
    answer = await ask(seed, caller, headers, backend)
    assert answer.json()["reason"] == reason
    assert answer.status_code == (403 if reason == "not_for_this_address" else 409)
    assert seed.broadcasts.num_groups == 0


async def test_with_a_key_nobody_is_asked_for_an_address(stack: ExitStack) -> None:
    """Its ticket is asked for instead."""
    seed = GroupSeed(stack, key=KEY).serve()
    assert (await ask(seed, "203.0.113.7", {}, "nccl")).status_code == 401
