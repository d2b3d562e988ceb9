"""What a peer sends is bounded, parsed as data, and held against what it said itself (P67)."""

from __future__ import annotations

import ast
import json
import random
import resource
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.host_shard import HostShard
from support.seed_node import Seed, lease_body

from rfork import wire
from rfork.auth import TICKET_HEADER
from rfork.binding import Binding, Region
from rfork.client.calls import Reply, parse_json
from rfork.client.contract import PullSettings
from rfork.client.pull import pull
from rfork.client.verify import check_table
from rfork.clock import SystemClock
from rfork.errors import SeedRefused, SeedUnreachable
from rfork.fence import check_fence
from rfork.identity import RankIdentity
from rfork.manifest import Manifest, TensorEntry, decode_manifest, encode_manifest
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.planner import Ask, Heartbeat, Report
from rfork.wire.seed import DigestTable, LeaseReply, StatusReply

from .conftest import Planner

ROOT = Path(__file__).parents[2]
relaxed = settings(max_examples=80, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

BINDING: dict[str, Any] = {
    "manifest_digest": "d",
    "generation": 2,
    "regions": [[4096, 8192], [65536, 4096]],
    "addresses": [4096, 8192],
    "group_nbytes": [4096, 4096],
    "fence_address": 65536,
    "fence_nbytes": 4096,
    "endpoints": [{"protocol": "tcp", "session_id": "192.0.2.1:1"}],
}


@pytest.mark.parametrize(
    "hostile",
    [
        {"addresses": [4096, 1 << 40]},
        {"addresses": [4096, -4096]},
        {"addresses": [4096, 4097]},
        {"addresses": [4096]},
        {"group_nbytes": [4096, 8193]},
        {"group_nbytes": [4096, 0]},
        {"group_nbytes": [4096, -1]},
        {"group_nbytes": [4096, 1 << 63]},
        {"fence_nbytes": 0},
        {"fence_nbytes": -5},
        {"fence_nbytes": 1 << 62},
        {"fence_address": 1},
        {"fence_address": 4096},
        {"regions": []},
        {"regions": [[0, 8192], [65536, 4096]]},
        {"regions": [[4096, 8192], [65536, -1]]},
        {"regions": [[4096, (1 << 64)], [65536, 4096]]},
        {"regions": [[4096, 8192], [8192, 8192], [65536, 4096]]},
        {"addresses": "x"},
        {"generation": 1e300},
    ],
    ids=lambda h: json.dumps(h)[:60],
)
def test_a_binding_that_leaves_its_own_regions_is_refused_at_birth(hostile: dict[str, Any]) -> None:
    assert msgspec.convert(BINDING, Binding).fence_nbytes == 4096
    with pytest.raises(ValueError, match=r"\S"):
        wire.decode(json.dumps(BINDING | hostile).encode(), Binding)


@relaxed
@given(data=st.data())
def test_whatever_binding_is_accepted_keeps_every_byte_inside_its_regions(data: st.DataObject) -> None:
    number = st.integers(-10, 70_000) | st.sampled_from([1 << 40, (1 << 63) - 1, 1 << 63])
    numbers = st.lists(number, min_size=1, max_size=4)
    hostile = data.draw(
        st.fixed_dictionaries(
            {},
            optional={
                "regions": st.lists(st.lists(number, min_size=2, max_size=2), max_size=4),
                "addresses": numbers,
                "group_nbytes": numbers,
                "fence_address": number,
                "fence_nbytes": number,
            },
        )
    )
    try:
        found = wire.decode(json.dumps(BINDING | hostile).encode(), Binding)
    except ValueError:
        return
    spans = [*zip(found.addresses, found.group_nbytes, strict=True), (found.fence_address, found.fence_nbytes)]
    inside = {byte for region in found.regions for byte in (region.base, region.end - 1)}
    assert inside
    for address, nbytes in spans:
        assert nbytes > 0
        assert any(r.base <= address < r.end for r in found.regions)
        assert any(r.base < address + nbytes <= r.end for r in found.regions)


def mutate(data: bytes, rng: random.Random) -> bytes:
    """A few bytes flipped, cut, doubled or blown up."""
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(out) + 1)
        match rng.randrange(5):
            case 0:
                out[at : at + 1] = bytes([rng.randrange(256)])
            case 1:
                del out[at : at + rng.randint(1, 32)]
            case 2:
                out[at:at] = out[at : at + rng.randint(1, 64)]
            case 3:
                out[at:at] = rng.choice([b"\xdd\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\x91" * 500, b"[" * 500])
            case 4:
                out[at : at + 8] = rng.choice([b"1e999", b"-1", b"18446744073709551616", b'"\\ud800"', b"null"])
    return bytes(out)


def manifest() -> Manifest:
    entries = tuple(TensorEntry(f"layers.{i}.weight", "uint8", (64,), (1,), i, 0, "parameter") for i in range(3))
    return Manifest(RankIdentity(), entries, (64, 64, 64))


def status() -> StatusReply:
    return StatusReply(
        version="1", protocol_version=1, instance_id="i-1", state="serving", generation=2, listener="http://h:1"
    )


def lease_reply() -> LeaseReply:
    return LeaseReply(
        lease="l-1", ttl_s=30.0, instance_id="i-1", generation=2, content="checkpoint:1", weight_version=None,
        manifest_digest="d", manifest_path="/m", digests_path="/d", binding=msgspec.convert(BINDING, Binding),
    )  # fmt: skip


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


@pytest.mark.parametrize(
    ("body", "parse"),
    [
        (encode_manifest(manifest()), decode_manifest),
        (wire.encode(lease_reply()), lambda b: wire.decode(b, LeaseReply)),
        (wire.encode(status()), lambda b: wire.decode(b, StatusReply)),
    ],
    ids=["manifest", "lease", "status"],
)
def test_ten_thousand_broken_bodies_end_in_a_value_or_a_value_error_and_take_no_memory(
    body: bytes, parse: Callable[[bytes], object]
) -> None:
    rng, before = random.Random(20_261), peak_mib()
    num_refused = 0
    for _ in range(10_000):
        try:
            parse(mutate(body, rng))
        except (ValueError, RecursionError):
            num_refused += 1
    assert num_refused > 2_000
    assert peak_mib() - before < 64


def test_a_client_takes_a_broken_reply_for_no_protocol() -> None:
    rng, said = random.Random(7), list[int]()
    for _ in range(2_000):
        try:
            parse_json(Reply(200, mutate(wire.encode(lease_reply()), rng), None), LeaseReply, "lease")
        except SeedUnreachable as error:
            said.append(len(str(error)))
    assert said
    assert max(said) < 2_000


@pytest.mark.parametrize("nbytes", [0, -8, 8, 4097, 1 << 70])
def test_a_digest_table_that_does_not_cover_the_manifest_is_refused(nbytes: int) -> None:
    with pytest.raises(SeedRefused):
        check_table(DigestTable("xxh3", nbytes, ((1,), (1,))), manifest(), "i-1")


# The services live on


def bodies() -> list[tuple[str, str, bytes]]:
    key = "a" * 64
    beat = {"instance_id": "i-1", "instance_key": key, "state": "serving", "listener": "http://h:1"}
    report = {"client": "i-2", "instance_key": key, "outcome": "failed", "seed": "i-1", "reason": "unreachable"}
    return [
        ("PUT", "/rfork/v1/instances/i-1", json.dumps(beat).encode()),
        ("POST", "/rfork/v1/asks", json.dumps({"client": "i-2", "instance_key": key, "allow_disk": False}).encode()),
        ("POST", "/rfork/v1/reports", json.dumps(report).encode()),
    ]


@pytest.mark.parametrize("key", [None, "a key of sixteen characters or more"])
def test_a_planner_lives_through_hundreds_of_broken_bodies(
    make_planner: Callable[..., Planner], key: str | None
) -> None:
    planner, rng, before = make_planner(key), random.Random(3), peak_mib()
    with httpx.Client(base_url=planner.url, timeout=20) as http:
        for turn in range(600):
            method, path, body = rng.choice(bodies())
            headers = {TICKET_HEADER: mutate(b"ask1;1700000000;aa;i-1;planner;bb", rng).decode("latin-1").strip()}
            headers = {k: v for k, v in headers.items() if v.isprintable() and v.isascii()}
            answer = http.request(method, path, content=mutate(body, rng), headers=headers if turn % 2 else {})
            assert answer.status_code < 500, answer.text
            assert b"Traceback" not in answer.content
        assert http.get("/readyz").status_code == 200
    assert peak_mib() - before < 64


def test_a_seed_lives_through_a_thousand_broken_leases(make_seed: Callable[..., Seed]) -> None:
    seed, rng = make_seed(key=None), random.Random(5)
    body = json.dumps(lease_body()).encode()
    for _ in range(1_000):
        answer = seed.http.post("/rfork/v1/leases", content=mutate(body, rng))
        assert answer.status_code < 500, answer.text
        if answer.status_code == 201:
            seed.http.delete(f"/rfork/v1/leases/{answer.json()['lease']}")
    assert seed.lease().status_code == 201


def test_hostile_text_in_a_registration_stays_within_what_a_text_may_be(make_planner: Callable[..., Planner]) -> None:
    """What is let in is shown by the dashboard as text (test_dashboard.py), by the verbs without control characters."""
    hostile = ["<script>alert(1)</script>", "\x1b[2J", "a" * 300, "../../etc/passwd", "i\r\nx: y", "\u202e", ""]
    listeners = [
        "javascript:alert(1)",
        "file:///etc/passwd",
        "http://u:p@h:1",
        "http://h:1/path",
        "http://a b:1",
        "//h:1",
    ]
    with httpx.Client(base_url=make_planner(None).url) as http:
        for name in hostile:
            body = {"instance_id": name, "instance_key": "a" * 64, "state": "serving"}
            path = httpx.URL("http://x").copy_with(raw_path=b"/rfork/v1/instances/i-1").raw_path.decode()
            assert http.put(path, json=body).status_code == 400, name
        for listener in listeners:
            body = {"instance_id": "i-1", "instance_key": "a" * 64, "state": "serving", "listener": listener}
            assert http.put("/rfork/v1/instances/i-1", json=body).status_code == 400, listener


@relaxed
@given(
    headers=st.dictionaries(
        st.sampled_from(["seed_key", "seed_ip", "seed_port", "seed_rank", "seed_refcnt", "user_id"]),
        st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=40) | st.just("9" * 400),
        max_size=6,
    ),
    path=st.sampled_from(["/add_seed", "/put_seed", "/renew_seed_lease", "/remove_seed"]),
)
def test_any_headers_end_in_an_answer_of_the_legacy_protocol(
    legacy: httpx.Client, headers: dict[str, str], path: str
) -> None:
    headers = {name: text.strip() for name, text in headers.items()}
    assert legacy.post(path, headers=headers).status_code in (200, 400, 404, 409)


@pytest.fixture(scope="module")
def legacy() -> Any:
    planner = Planner(None, legacy=True).start()
    with httpx.Client(base_url=planner.url) as http:
        yield http
    planner.stop()


# What names the reader itself


class OwnLease:
    """A lease whose binding leads back to the process that holds it."""

    def __init__(self, shard: HostShard, session_id: str) -> None:
        binding = Binding(
            manifest_digest=shard.manifest.digest,
            generation=2,
            regions=shard.regions,
            addresses=shard.addresses,
            group_nbytes=shard.manifest.group_nbytes,
            fence_address=shard.scratch_page()[0],
            fence_nbytes=shard.scratch_page()[1],
            endpoints=(
                msgspec.structs.replace(
                    msgspec.convert(BINDING, Binding).endpoints[0], protocol="memory", session_id=session_id
                ),
            ),
        )
        self.reply = msgspec.structs.replace(lease_reply(), manifest_digest=shard.manifest.digest, binding=binding)
        self.address = "http://192.0.2.1:1"
        self._manifest = shard.manifest

    def manifest(self) -> Manifest:
        return self._manifest

    def digests(self) -> DigestTable:
        raise AssertionError("nothing is fetched from oneself")

    def check(self) -> None: ...


def test_a_binding_that_names_the_clients_own_session_is_refused() -> None:
    """It would read its own zeros, and find them equal to themselves."""
    fabric = MemoryFabric()
    first = MemoryTransport(fabric).open()
    number = int(first.session_id.rpartition(":")[2])
    shard = HostShard(manifest())
    mine = f"memory:{number + 1}"  # what the engine of this pull will be called
    with pytest.raises(SeedRefused) as caught:
        pull(
            shard, OwnLease(shard, mine), GivenFabrics([MemoryTransport(fabric)]), PullSettings(verify="off"),
            check_fence=check_fence, clock=SystemClock(),
        )  # fmt: skip
    assert caught.value.reason == "self"
    first.close(1.0)


# No code on the wire

CODE_ON_THE_WIRE = {
    "pickle",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "jsonpickle",
    "yaml",
    "multiprocessing.connection",
}
CALLS = {"eval", "exec", "send_pyobj", "recv_pyobj", "broadcast_object_list", "all_gather_object", "gather_object"}


@pytest.mark.parametrize("folder", ["python/rfork", "python/sglang"])
def test_nothing_that_runs_what_it_reads_is_imported_or_called(folder: str) -> None:
    guilty = []
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = {a.name for a in node.names} if isinstance(node, ast.Import) else set()
            names |= {node.module or ""} if isinstance(node, ast.ImportFrom) else set()
            called = node.func if isinstance(node, ast.Call) else None
            call = getattr(called, "attr", getattr(called, "id", "")) if called else ""
            loads = isinstance(called, ast.Attribute) and ast.unparse(called) == "torch.load"
            if names & CODE_ON_THE_WIRE or call in CALLS - {"eval"} or loads:
                guilty.append(f"{path.name}:{getattr(node, 'lineno', 0)}")
            if call == "eval" and isinstance(called, ast.Name):
                guilty.append(f"{path.name}:{node.lineno}")  # type: ignore[attr-defined]
    assert guilty == []


@pytest.mark.parametrize("kind", [Heartbeat, Ask, Report, LeaseReply, StatusReply, Binding, Manifest, Region])
def test_every_body_is_a_frozen_record(kind: type) -> None:
    assert kind.__struct_config__.frozen  # type: ignore[attr-defined]
