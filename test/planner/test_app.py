"""The real app behind an ASGI client: what protocol v1 promises on the wire."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from rfork.clock import ManualClock
from rfork.planner.app import create_app
from rfork.planner.lifecycle import PlannerError
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.wire import planner as wire

V1 = "/rfork/v1"


class Fleet:
    """A planner and shorthand for what instances send to it."""

    def __init__(self, build, **knobs):
        self.build = build
        self.clock = ManualClock()
        self.service = PlannerService(Policy(**{"settle_s": 0.0, **knobs}), self.clock)
        self.app = create_app(self.service)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(self.app), base_url="http://planner.test")

    async def beat(self, name="i-seed", **fields):
        beat = self.build.seed(name, **fields)
        return await self.http.put(f"{V1}/instances/{name}", content=msgspec.json.encode(beat))

    async def ask(self, client="i-client", **fields):
        body = msgspec.json.encode(self.build.ask(client, **{"wait_s": 0.0, **fields}))
        return (await self.http.post(f"{V1}/asks", content=body)).json()

    async def report(self, *args, **fields):
        return await self.http.post(f"{V1}/reports", content=msgspec.json.encode(self.build.report(*args, **fields)))


@pytest.fixture
async def fleet(build):
    fleet = Fleet(build)
    await fleet.service.start()
    yield fleet
    await fleet.http.aclose()
    await fleet.service.stop()


async def test_a_heartbeat_registers_and_is_told_when_to_come_again(fleet):
    reply = (await fleet.beat()).json()
    assert (reply["ttl_s"], reply["interval_s"], reply["identity_wanted"]) == (30.0, 10.0, True)
    reply = (await fleet.beat(identity={"dtype": "bfloat16"})).json()
    assert reply["identity_wanted"] is False


async def test_an_ask_is_answered_by_ranked_candidates(fleet):
    await fleet.beat(generation=3)
    answer = await fleet.ask()
    assert answer["answer"] == "fork"
    assert answer["candidates"][0] == {
        "instance_id": "i-seed",
        "listener": "http://i-seed.test:7000",
        "generation": 3,
        "instance_key": fleet.build.KEY,
    }


async def test_an_ask_with_no_seed_is_answered_by_the_claim_and_the_next_by_whom_to_wait_for(fleet):
    assert (await fleet.ask("i-1"))["answer"] == "read_disk"
    answer = await fleet.ask("i-2")
    assert (answer["answer"], answer["reason"], answer["waiting_for"]) == ("wait", "claim_held", ["i-1"])


async def test_an_ask_is_held_open_until_a_seed_is_there(fleet):
    await fleet.ask("i-1")
    held = asyncio.ensure_future(fleet.ask("i-2", wait_s=20.0))
    await asyncio.sleep(0.05)
    assert not held.done()
    await fleet.beat("i-1")
    assert (await asyncio.wait_for(held, 5))["candidates"][0]["instance_id"] == "i-1"


async def test_an_ask_is_held_open_no_longer_than_it_says(fleet):
    await fleet.ask("i-1")
    held = asyncio.ensure_future(fleet.ask("i-2", wait_s=20.0))
    await asyncio.sleep(0.05)
    fleet.clock.advance(20.0)
    fleet.service.tick()
    assert (await asyncio.wait_for(held, 5))["answer"] == "wait"


async def test_withdrawing_is_idempotent_and_final(fleet):
    await fleet.beat()
    for _ in range(2):
        assert (await fleet.http.delete(f"{V1}/instances/i-seed?reason=SIGTERM")).status_code == 204
    late = await fleet.beat()
    assert late.status_code == 410
    assert late.json()["code"] == "gone"


async def test_draining_is_told_to_the_instance_in_its_next_reply(fleet):
    await fleet.beat()
    assert (await fleet.http.post(f"{V1}/instances/i-seed/drain")).status_code == 202
    assert (await fleet.beat()).json()["drain"] is True
    assert (await fleet.http.post(f"{V1}/instances/i-nobody/drain")).status_code == 404


async def test_an_illegal_transition_is_a_409_that_tells_the_story(fleet):
    await fleet.beat(state="draining")
    reply = await fleet.beat(state="serving")
    assert reply.status_code == 409
    assert reply.json()["code"] == "illegal_transition"
    assert "registered DRAINING" in reply.json()["story"][0]


@pytest.mark.parametrize(
    ("body", "says"),
    [
        (b"{", "truncated"),
        (b"[]", "Expected `object`"),
        (b"\xff\xfe", ""),
        (b"[" * 5000, ""),
        (b'{"client":"i-1"}', "missing required field `instance_key`"),
        (b'{"client":"<script>","instance_key":"' + b"a" * 64 + b'"}', "$.client"),
        (b'{"client":"i-1","instance_key":"A"}', "$.instance_key"),
        (b'{"client":"i-1","instance_key":"' + b"a" * 64 + b'","wait_s":-1}', "$.wait_s"),
        (b'{"client":"i-1","instance_key":"' + b"a" * 64 + b'","wait_s":true}', "$.wait_s"),
        (b'{"client":"i-1","instance_key":"' + b"a" * 64 + b'","wait_s":NaN}', ""),
    ],
)
async def test_a_malformed_body_is_a_400_that_says_where_and_the_planner_lives(fleet, body, says):
    reply = await fleet.http.post(f"{V1}/asks", content=body)
    assert reply.status_code == 400
    assert reply.json()["code"] == "bad_request"
    assert says in reply.json()["message"]
    assert (await fleet.http.get("/healthz")).json() == {"status": "ok"}


async def test_an_oversize_body_is_refused(fleet):
    assert (await fleet.http.post(f"{V1}/reports", content=b" " * 70_000)).status_code == 413


async def test_unknown_fields_are_ignored_and_unknown_requirements_refused(fleet):
    body = {"client": "i-1", "instance_key": fleet.build.KEY, "colour": "green"}
    assert (await fleet.http.post(f"{V1}/asks", json=body)).json()["answer"] == "read_disk"
    reply = await fleet.http.post(f"{V1}/asks", json={**body, "requires": ["teleport"]})
    assert reply.status_code == 422
    assert "teleport" in reply.json()["message"]


async def test_path_and_body_must_name_the_same_instance(fleet):
    beat = fleet.build.seed("i-a")
    assert (await fleet.http.put(f"{V1}/instances/i-b", content=msgspec.json.encode(beat))).status_code == 400


async def test_a_web_page_can_not_change_state(fleet):
    await fleet.beat()
    reply = await fleet.http.post(f"{V1}/instances/i-seed/drain", headers={"Origin": "http://evil.test"})
    assert reply.status_code == 400
    assert (await fleet.beat()).json()["drain"] is False


COUNTS = {
    "seq", "generation", "capacity", "ranks", "ranks_ready", "nbytes", "num_differing", "num_leases", "position",
    "total", "totals", "next",
}  # fmt: skip
"""Every number on the wire that is no duration; `next` and `seq` number events of one life of one planner."""


def numbers(kind):
    """Whether values of this msgspec type hold numbers; an identity's values are whatever a model has."""
    if isinstance(kind, msgspec.inspect.UnionType):
        return not any(isinstance(k, msgspec.inspect.StrType) for k in kind.types) and any(map(numbers, kind.types))
    if isinstance(kind, msgspec.inspect.DictType):
        return numbers(kind.value_type)
    if isinstance(kind, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
        return numbers(kind.item_type)
    if isinstance(kind, msgspec.inspect.TupleType):
        return any(map(numbers, kind.item_types))
    if isinstance(kind, msgspec.inspect.IntType | msgspec.inspect.FloatType):
        return True
    no_number = msgspec.inspect.StrType | msgspec.inspect.BoolType | msgspec.inspect.EnumType
    assert isinstance(kind, no_number | msgspec.inspect.NoneType | msgspec.inspect.StructType), f"what is {kind}?"
    return False


def test_no_wall_clock_is_on_the_wire():
    """Every number of every body is a duration in seconds, and says so, or one of the counts."""
    bodies = [b for b in vars(wire).values() if isinstance(b, type) and issubclass(b, msgspec.Struct)]
    fields = [(body, field) for body in bodies for field in msgspec.inspect.type_info(body).fields]
    found = {(body.__name__, field.name) for body, field in fields if numbers(field.type)}
    assert len(found) > 25
    assert {name for _, name in found if not name.endswith("_s")} == COUNTS
    assert all(numbers(field.type) for _, field in fields if field.name.endswith("_s"))


async def refusals(fleet):
    """One request for each way to be refused: what the answer is, by status."""
    put, post, get = fleet.http.put, fleet.http.post, fleet.http.get
    await fleet.beat("i-serving")
    await fleet.beat("i-draining", state="draining")
    await fleet.http.delete(f"{V1}/instances/i-gone")
    ask = {"client": "i-1", "instance_key": fleet.build.KEY}
    yield 400, await post(f"{V1}/asks", content=b"{")
    yield 400, await put(f"{V1}/instances/i-other", content=msgspec.json.encode(fleet.build.seed("i-serving")))
    yield 400, await post(f"{V1}/instances/i-serving/drain", headers={"Origin": "http://evil.test"})
    yield 400, await get(f"{V1}/leases?limit=many")
    yield 400, await get(f"{V1}/instances/{'x' * 200}")
    yield 404, await get(f"{V1}/instances/i-nobody")
    yield 404, await post(f"{V1}/instances/i-nobody/drain")
    yield 404, await get("/rfork/v2/overview")
    yield 405, await get(f"{V1}/asks")
    yield 405, await fleet.http.delete(f"{V1}/overview")
    yield 405, await post("/healthz")
    yield 409, await fleet.beat("i-draining", state="serving")
    yield 410, await fleet.beat("i-gone")
    yield 413, await post(f"{V1}/reports", content=b" " * 70_000)
    yield 422, await post(f"{V1}/asks", json={**ask, "requires": ["teleport"]})
    yield 503, await fleet.beat("i-one-too-many")
    fleet.service.state = None
    yield 500, await get(f"{V1}/overview")
    yield 500, await post(f"{V1}/asks", json=ask)
    yield 500, await put(f"{V1}/instances/i-serving", content=msgspec.json.encode(fleet.build.seed("i-serving")))


async def test_every_refusal_is_a_problem_with_a_stable_code(build):
    fleet = Fleet(build, max_instances=2)
    transport = httpx.ASGITransport(fleet.app, raise_app_exceptions=False)
    fleet.http = httpx.AsyncClient(transport=transport, base_url="http://planner.test")
    codes = set()
    async for status, answer in refusals(fleet):
        said = f"{answer.request.method} {answer.url}: {answer.status_code} {answer.text}"
        assert (answer.status_code, answer.headers["content-type"]) == (status, "application/json"), said
        problem = msgspec.json.decode(answer.content, type=wire.Problem)
        assert problem.message, said
        assert ("allow" in answer.headers) == (status == 405), said
        codes.add((status, problem.code))
    ours = {(error.status, error.code) for error in (PlannerError, *PlannerError.__subclasses__())}
    others = {(404, "not_found"), (405, "method_not_allowed"), (500, "internal")}
    assert codes == (ours | others) - {(401, "unauthorized")}, "a fleet without a key wants no tickets"
    await fleet.http.aclose()


async def test_instances_and_leases_are_listed(fleet):
    await fleet.beat("i-1", capacity=4, leases=["i-a"])
    await fleet.beat("i-2", state="starting")
    listed = (await fleet.http.get(f"{V1}/instances")).json()
    assert listed["total"] == 2
    assert [i["instance_id"] for i in listed["instances"]] == ["i-1", "i-2"]
    serving = (await fleet.http.get(f"{V1}/instances?state=serving&limit=5")).json()
    assert [i["num_leases"] for i in serving["instances"]] == [1]
    leases = (await fleet.http.get(f"{V1}/leases")).json()
    assert [(line["seed"], line["client"], line["granted"]) for line in leases["leases"]] == [("i-1", "i-a", True)]
    assert (await fleet.http.get(f"{V1}/instances?limit=x")).status_code == 400


async def test_one_instance_tells_its_story(fleet):
    await fleet.beat(identity={"dtype": "bfloat16"})
    await fleet.ask()
    found = (await fleet.http.get(f"{V1}/instances/i-seed")).json()
    assert found["identity"] == {"dtype": "bfloat16"}
    assert found["story"][-1].endswith("chosen for i-client")


async def test_watching_returns_at_once_when_there_is_news_and_waits_when_there_is_none(fleet):
    await fleet.beat()
    seen = (await fleet.http.get(f"{V1}/events")).json()
    assert [e["kind"] for e in seen["events"]] == ["registered"]
    watching = asyncio.ensure_future(fleet.http.get(f"{V1}/events?after={seen['next']}&wait_s=20"))
    await asyncio.sleep(0.05)
    assert not watching.done()
    await fleet.report("failed", reason="unreachable", detail="connection refused")
    news = (await asyncio.wait_for(watching, 5)).json()["events"]
    assert news[0]["text"] == "failed unreachable connection refused"


async def test_metrics_count_forks_by_outcome_and_reason(fleet):
    await fleet.beat("i-seed", leases=["i-a"])
    await fleet.report("loaded", nbytes=1000, phases_s={"read": 1.5, "made-up": 1.0})
    await fleet.report("failed", reason="unreachable")
    await fleet.report("failed", reason="anything-a-client-says")
    text = (await fleet.http.get("/metrics")).text
    assert 'rfork_planner_forks_total{outcome="loaded",reason="",source="seed"} 1.0' in text
    assert 'rfork_planner_forks_total{outcome="failed",reason="unreachable",source="seed"} 1.0' in text
    assert 'rfork_planner_forks_total{outcome="failed",reason="other",source="seed"} 1.0' in text
    assert "rfork_planner_forked_bytes_total 1000.0" in text
    assert 'rfork_planner_phase_seconds_count{phase="read"} 1.0' in text
    assert 'rfork_planner_phase_seconds_count{phase="other"} 1.0' in text
    assert 'rfork_planner_instances{state="serving"} 1.0' in text
    assert 'rfork_planner_heartbeat_age_seconds{quantile="1"} 0.0' in text


async def test_ready_while_it_runs_only(build):
    fleet = Fleet(build)
    assert (await fleet.http.get("/readyz")).status_code == 503
    await fleet.service.start()
    assert (await fleet.http.get("/readyz")).json() == {"ready": True, "store": "memory", "store_answers": True}
    await fleet.service.stop()
    assert (await fleet.http.get("/readyz")).status_code == 503


async def test_held_asks_are_answered_when_the_planner_stops(build):
    fleet = Fleet(build)
    await fleet.service.start()
    await fleet.ask("i-1")
    held = asyncio.ensure_future(fleet.ask("i-2", wait_s=30))
    await asyncio.sleep(0.05)
    await fleet.service.stop()
    assert (await asyncio.wait_for(held, 5))["reason"] == "planner_stops"


async def test_the_planner_restarted_empty_lists_every_instance_again_within_one_heartbeat(build):
    before, after = Fleet(build), Fleet(build)
    names = [f"i-{n}" for n in range(20)]
    for name in names:
        await before.beat(name, seq=50, identity={"dtype": "bfloat16"})
    for name in names:
        reply = await after.beat(name, seq=51)
    assert reply.json()["identity_wanted"] is True
    assert reply.json()["planner"] != before.service.name
    assert sorted(after.service.state.instances) == sorted(names)


async def test_the_planner_dials_nobody(build):
    """A registered listener of ours is never connected to, whatever is asked, reported, listed or drained."""
    dialled = []
    server = await asyncio.start_server(lambda reader, writer: dialled.append(writer), "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    fleet = Fleet(build)
    await fleet.service.start()
    await fleet.beat(listener=f"http://127.0.0.1:{port}", nodes=[f"http://127.0.0.1:{port}"])
    await fleet.ask()
    await fleet.report("failed", reason="unreachable")
    await fleet.http.post(f"{V1}/instances/i-seed/drain")
    for path in ("instances", "leases", "events", "overview", "instances/i-seed"):
        await fleet.http.get(f"{V1}/{path}")
    fleet.clock.advance(100)
    fleet.service.tick()
    await asyncio.sleep(0.1)
    server.close()
    await fleet.service.stop()
    assert not dialled
