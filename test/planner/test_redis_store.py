"""Several planners on one real Redis server: they agree within moments, and lose nothing when it dies."""

from __future__ import annotations

import asyncio
import time

import pytest
import redis

from rfork.clock import SystemClock
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.store import open_store
from rfork.wire.planner import ForkFrom, ReadDisk, Wait

pytestmark = pytest.mark.timeout(60)


@pytest.fixture
def patient(monkeypatch):
    """A planner that finds Redis slow acts alone, and agrees with nobody: not where it is the machine that is slow."""
    monkeypatch.setattr("rfork.planner.store.redis.DEADLINE_S", 5.0)


MADE: list[PlannerService] = []


@pytest.fixture(autouse=True)
async def every_planner_is_stopped():
    """Also where a test fails: the loop itself cancels a task once and waits, and one cancellation can get lost."""
    yield
    while MADE:
        if (service := MADE.pop()).running:
            await service.stop()


async def planner(redis_server, **knobs):
    policy = Policy(**{"settle_s": 0.0, "claim_ttl_s": 2.0, "interval_s": 1.0, **knobs})
    store = open_store(redis_server.url, horizon_s=60.0, num_claims=policy.disk_claims)
    service = PlannerService(policy, SystemClock(), store)
    MADE.append(service)
    await service.start()
    return service


async def until(condition, timeout_s=15.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_what_one_planner_sees_the_other_offers(redis_server, build):
    one, two = await planner(redis_server), await planner(redis_server)
    one.heartbeat(build.seed(identity={"dtype": "bfloat16"}))
    await until(lambda: "i-seed" in two.state.instances)
    assert two.state.identity_known(build.KEY)
    assert isinstance(await two.ask(build.ask(wait_s=0)), ForkFrom)
    one.withdraw("i-seed", "SIGTERM")
    await until(lambda: "i-seed" not in two.state.instances)
    await one.stop()
    await two.stop()


@pytest.mark.usefixtures("patient")
async def test_a_reservation_at_one_planner_is_known_to_the_other(redis_server, build):
    one, two = await planner(redis_server), await planner(redis_server)
    one.heartbeat(build.seed())
    await one.ask(build.ask("i-a"))
    await until(lambda: "i-seed" in two.state.instances and "i-a" in two.state.instances["i-seed"].uses)
    answer = await two.ask(build.ask("i-b", wait_s=0))
    assert isinstance(answer, Wait)
    assert answer.reason == "seeds_busy"
    await one.stop()
    await two.stop()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("disk_claims", [1, 3])
async def test_of_forty_clients_at_two_planners_exactly_as_many_as_may_read_the_disk(redis_server, build, disk_claims):
    one, two = [await planner(redis_server, disk_claims=disk_claims, claim_ttl_s=30.0) for _ in range(2)]
    asks = [(one, two)[n % 2].ask(build.ask(f"i-{n}", wait_s=1.0)) for n in range(40)]
    answers = await asyncio.gather(*asks)
    assert sum(isinstance(a, ReadDisk) for a in answers) == disk_claims
    assert all(isinstance(a, ReadDisk | Wait) for a in answers)
    await one.stop()
    await two.stop()


@pytest.mark.usefixtures("patient")
async def test_a_holder_that_asks_again_anywhere_keeps_its_one_claim(redis_server, build):
    knobs = {"disk_claims": 2, "claim_ttl_s": 60.0}
    one, two = await planner(redis_server, **knobs), await planner(redis_server, **knobs)
    assert isinstance(await one.ask(build.ask("i-1")), ReadDisk)
    assert isinstance(await two.ask(build.ask("i-2")), ReadDisk)
    one.report(build.report("failed", "i-1", seed=""))  # gives the first claim back: i-2 must not take it too
    await until(lambda: not any("i-1" in pool.claims for p in (one, two) for pool in p.state.pools.values()))
    assert isinstance(await one.ask(build.ask("i-2")), ReadDisk)
    assert isinstance(await one.ask(build.ask("i-3")), ReadDisk)
    assert isinstance(await two.ask(build.ask("i-4", wait_s=0)), Wait)
    await one.stop()
    await two.stop()


@pytest.mark.usefixtures("patient")
async def test_a_client_whom_only_the_store_denies_a_claim_is_answered_in_time_and_asks_it_seldom(redis_server, build):
    import redis

    raw = redis.Redis.from_url(redis_server.url)
    for name in (f"rfork:v1:claim:{build.KEY}", f"rfork:v1:claim:{build.KEY}:1"):
        raw.set(name, "i-two-lives", ex=60)  # one holder of both: to the planner a claim is free
    one = await planner(redis_server, disk_claims=2)
    answer = await asyncio.wait_for(one.ask(build.ask("i-1", wait_s=0.5, waited_s=7.0)), 20)
    assert isinstance(answer, Wait)
    assert (answer.reason, answer.waiting_for) == ("claim_held", ["i-two-lives"])
    assert answer.waited_s >= 7.5
    assert raw.info("commandstats")["cmdstat_mget"]["calls"] < 20
    raw.close()
    await one.stop()


@pytest.mark.usefixtures("patient")
async def test_the_claim_of_a_holder_that_died_with_its_planner_passes_on(redis_server, build):
    one, two = [await planner(redis_server, claim_ttl_s=4.0) for _ in range(2)]
    assert isinstance(await one.ask(build.ask("i-1")), ReadDisk)
    await until(lambda: two.state.pools)
    await one.stop()
    assert isinstance(await two.ask(build.ask("i-2", wait_s=0)), Wait)
    assert isinstance(await two.ask(build.ask("i-2", wait_s=20.0)), ReadDisk)
    await two.stop()


@pytest.mark.usefixtures("patient")
async def test_a_holder_keeps_its_claim_while_the_planners_are_rolled(redis_server, build):
    """The new planner starts, the old one goes, and the holder's heartbeats go to the new one from then on."""
    reads = build.seed("i-1", state="starting", ranks_ready=0, reads_disk=True)
    one = await planner(redis_server, claim_ttl_s=30.0)
    assert isinstance(await one.ask(build.ask("i-1")), ReadDisk)
    one.heartbeat(reads)
    two = await planner(redis_server, claim_ttl_s=30.0)
    await until(lambda: "i-1" in two.state.instances)
    assert "i-1" in two.state.pools[build.KEY].claims, "a planner that starts knows it"
    await one.stop()
    with redis.Redis.from_url(redis_server.url) as raw:
        lock = "rfork:v1:claim:" + build.KEY
        raw.pexpire(lock, 10_000)
        two.heartbeat(reads)
        await until(lambda: raw.pttl(lock) > 10_000)
        await two.stop()
        raw.delete("rfork:v1:events")
    three = await planner(redis_server, claim_ttl_s=30.0)
    assert not three.state.pools
    answer = await three.ask(build.ask("i-2", wait_s=0))
    assert (answer.reason, answer.waiting_for) == ("claim_held", ["i-1"]), "Redis knows it too"
    await three.stop()


@pytest.mark.usefixtures("patient")
async def test_a_holder_gets_its_claim_back_from_a_redis_that_lost_its_memory(redis_server, build):
    one, two = [await planner(redis_server, claim_ttl_s=30.0) for _ in range(2)]
    assert isinstance(await one.ask(build.ask("i-1")), ReadDisk)
    redis_server.kill()
    await until(lambda: not one.store.healthy and not two.store.healthy)
    redis_server.start()
    await until(lambda: one.store.healthy and two.store.healthy)
    with redis.Redis.from_url(redis_server.url) as raw:
        while raw.get("rfork:v1:claim:" + build.KEY) is None:  # a connection from before breaks at its first use
            one.heartbeat(build.seed("i-1", state="starting", ranks_ready=0, reads_disk=True))
            await asyncio.sleep(0.05)
    await until(lambda: two.state.instances)
    two.state.pools[build.KEY].claims.clear()
    answer = await two.ask(build.ask("i-2", wait_s=0))
    assert (answer.reason, answer.waiting_for) == ("claim_held", ["i-1"])
    await one.stop()
    await two.stop()


@pytest.mark.usefixtures("patient")
async def test_a_planner_that_starts_knows_a_claim_for_as_long_as_it_lasts(redis_server, build, monkeypatch):
    """Its holder may be of a version that does not say so in its heartbeats."""
    monkeypatch.setattr("rfork.planner.service.FRESH_S", 0.0)
    one = await planner(redis_server, claim_ttl_s=30.0)
    assert isinstance(await one.ask(build.ask("i-1")), ReadDisk)
    with redis.Redis.from_url(redis_server.url) as raw:
        await until(lambda: raw.xlen("rfork:v1:events"))
    await asyncio.sleep(0.1)
    two = await planner(redis_server, claim_ttl_s=30.0)
    left_s = two.state.pools[build.KEY].claims["i-1"] - two.clock.now()
    assert 0 < left_s < 29.95
    await one.stop()
    await two.stop()


async def test_a_planner_that_starts_knows_at_once_what_the_others_know(redis_server, build):
    one = await planner(redis_server)
    for n in range(50):
        one.heartbeat(build.seed(f"i-{n}"))
    one.withdraw("i-7", "SIGTERM")
    with redis.Redis.from_url(redis_server.url) as raw:
        await until(lambda: raw.xlen("rfork:v1:events") >= 51)
    two = await planner(redis_server)
    assert len(two.state.instances) == 49
    await one.stop()
    await two.stop()


async def test_killing_redis_stops_no_answer_and_sends_no_fleet_to_the_disk(redis_server, build):
    one, two = [await planner(redis_server, claim_ttl_s=30.0) for _ in range(2)]
    one.heartbeat(build.seed(capacity=50))
    await until(lambda: "i-seed" in two.state.instances)
    redis_server.kill()
    began = time.monotonic()
    assert isinstance(await one.ask(build.ask("i-a")), ForkFrom)
    assert isinstance(await two.ask(build.ask("i-b")), ForkFrom)
    assert time.monotonic() - began < 5.0
    other = [
        p.ask(build.ask(f"i-{n}", instance_key=build.OTHER_KEY, wait_s=1.0)) for n, p in enumerate((one, two) * 10)
    ]
    answers = await asyncio.gather(*other)
    assert 1 <= sum(isinstance(a, ReadDisk) for a in answers) <= 2
    await until(lambda: not one.store.healthy and not two.store.healthy)
    await one.stop()
    await two.stop()


async def test_planners_agree_again_once_redis_is_back_and_empty(redis_server, build):
    one, two = await planner(redis_server), await planner(redis_server)
    redis_server.kill()
    await until(lambda: not one.store.healthy)
    redis_server.start()
    await until(lambda: one.store.healthy and two.store.healthy)
    one.heartbeat(build.seed("i-later"))
    await until(lambda: "i-later" in two.state.instances)
    await one.stop()
    await two.stop()


async def test_a_planner_starts_without_redis_and_acts_alone(redis_server, build):
    redis_server.kill()
    began = time.monotonic()
    alone = await planner(redis_server)
    assert time.monotonic() - began < 15.0
    alone.heartbeat(build.seed())
    assert isinstance(await alone.ask(build.ask()), ForkFrom)
    assert not alone.store.healthy
    await alone.stop()


async def test_what_is_none_of_ours_in_the_stream_is_left_out(redis_server, build):
    one = await planner(redis_server)
    raw = redis.Redis.from_url(redis_server.url)
    raw.xadd("rfork:v1:events", {"p": "p-evil", "e": b"\x80\x04cos\nsystem\n"})
    raw.xadd("rfork:v1:events", {"x": "y"})
    raw.xadd("rfork:v1:events", {"p": "p-evil", "e": b"\x81\xa4type\xa7no_such"})
    two = await planner(redis_server)
    two.heartbeat(build.seed())
    await until(lambda: "i-seed" in one.state.instances)
    raw.close()
    await one.stop()
    await two.stop()
