"""Plays vLLM-Ascend RFork's client over the legacy end-points, from the protocol's description."""

from __future__ import annotations

import asyncio
import time

import httpx
import msgspec
import pytest

from rfork.clock import ManualClock, SystemClock
from rfork.planner.app import create_app
from rfork.planner.events import LegacyAdded, LegacyLeased, LegacyReleased, LegacyRemoved, LegacyRenewed
from rfork.planner.legacy import LegacyBook, Place
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.store import open_store

PLACE = {"SEED_IP": "127.0.0.1", "SEED_PORT": "1234", "SEED_RANK": "0"}


class AscendFleet:
    def __init__(self, clock=None, store=None):
        self.clock = clock or ManualClock()
        self.service = PlannerService(Policy(), self.clock, store)
        self.book = LegacyBook()
        app = create_app(self.service, legacy=self.book)
        self.http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://planner.test")

    async def add(self, key="model$0$tp0", **place):
        headers = {"SEED_KEY": key, **PLACE, **place, "SEED_REFCNT": "0"}
        return await self.http.post("/add_seed", headers=headers)

    async def get(self, key="model$0$tp0"):
        return await self.http.get("/get_seed", headers={"SEED_KEY": key})

    async def post(self, path, user="", **headers):
        named = {"USER_ID": user} if user else {}
        return await self.http.post(path, headers={**PLACE, **named, **headers})


@pytest.fixture
async def ascend():
    fleet = AscendFleet()
    yield fleet
    await fleet.http.aclose()


async def test_one_life_of_a_seed_and_its_client(ascend):
    assert (await ascend.add()).status_code == 200
    lease = await ascend.get()
    assert lease.status_code == 200
    assert {name: lease.headers[name] for name in PLACE} == PLACE
    user = lease.headers["USER_ID"]
    assert float(lease.headers["LEASE_TTL_SEC"]) == 60.0
    assert (await ascend.post("/renew_seed_lease", user)).status_code == 200
    assert (await ascend.post("/put_seed", user)).status_code == 200
    assert (await ascend.post("/remove_seed", SEED_KEY="model$0$tp0")).status_code == 200
    assert (await ascend.get()).status_code == 404


async def test_no_seed_is_a_404(ascend):
    assert (await ascend.get()).status_code == 404


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"SEED_KEY": "k", "SEED_IP": "1.2.3.4", "SEED_RANK": "0", "SEED_REFCNT": "0"},
        {"SEED_KEY": "k", **PLACE, "SEED_PORT": "x", "SEED_REFCNT": "0"},
        {"SEED_KEY": "k", **PLACE, "SEED_PORT": "0", "SEED_REFCNT": "0"},
        {"SEED_KEY": "k", **PLACE, "SEED_PORT": "70000", "SEED_REFCNT": "0"},
        {"SEED_KEY": "k", **PLACE, "SEED_RANK": "-1", "SEED_REFCNT": "0"},
        {"SEED_KEY": "k", **PLACE},
    ],
    ids=str,
)
async def test_missing_or_bad_headers_are_a_400(ascend, headers):
    assert (await ascend.http.post("/add_seed", headers=headers)).status_code == 400


async def test_get_and_put_without_headers_are_a_400(ascend):
    assert (await ascend.http.get("/get_seed")).status_code == 400
    assert (await ascend.post("/put_seed")).status_code == 400
    assert (await ascend.post("/renew_seed_lease")).status_code == 400
    assert (await ascend.post("/remove_seed")).status_code == 400


async def test_the_verbs_are_as_documented(ascend):
    assert (await ascend.http.get("/add_seed")).status_code == 405
    assert (await ascend.http.post("/get_seed")).status_code == 405


async def test_one_seed_is_leased_to_one_client_at_a_time(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    assert (await ascend.get()).status_code == 404
    assert (await ascend.post("/put_seed", user)).status_code == 200
    assert (await ascend.get()).status_code == 200


async def test_returning_a_lease_twice_is_a_404(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    assert (await ascend.post("/put_seed", user)).status_code == 200
    assert (await ascend.post("/put_seed", user)).status_code == 404


async def test_a_lease_of_another_seed_is_a_404(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    assert (await ascend.post("/put_seed", user, SEED_PORT="9999")).status_code == 404


async def test_a_lease_that_was_never_returned_expires(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    ascend.clock.advance(50)
    await ascend.add()
    assert (await ascend.get()).status_code == 404
    ascend.clock.advance(11)
    assert (await ascend.get()).status_code == 200
    assert (await ascend.post("/renew_seed_lease", user)).status_code == 404
    assert (await ascend.post("/put_seed", user)).status_code == 404


async def test_renewals_keep_a_long_transfer_alive(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    for _ in range(10):
        ascend.clock.advance(20)
        await ascend.add()
        assert (await ascend.post("/renew_seed_lease", user)).status_code == 200
    assert (await ascend.get()).status_code == 404


async def test_a_seed_without_heartbeats_dies(ascend):
    await ascend.add()
    ascend.clock.advance(61)
    assert (await ascend.get()).status_code == 404


async def test_a_leased_seed_is_not_removed(ascend):
    await ascend.add()
    user = (await ascend.get()).headers["USER_ID"]
    assert (await ascend.post("/remove_seed", SEED_KEY="model$0$tp0")).status_code == 409
    await ascend.post("/put_seed", user)
    assert (await ascend.post("/remove_seed", SEED_KEY="model$0$tp0")).status_code == 200
    assert (await ascend.post("/remove_seed", SEED_KEY="model$0$tp0")).status_code == 404


async def test_keys_are_never_mixed_and_every_rank_is_a_seed_of_its_own(ascend):
    await ascend.add("model$0$tp0", SEED_RANK="0", SEED_PORT="1000")
    await ascend.add("model$0$tp1", SEED_RANK="1", SEED_PORT="1001")
    assert (await ascend.get("model$0$tp1")).headers["SEED_PORT"] == "1001"
    assert (await ascend.get("model$0$tp1")).status_code == 404
    assert (await ascend.get("model$0$tp0")).headers["SEED_PORT"] == "1000"


async def test_legacy_seeds_are_no_candidates_of_v1_and_v1_seeds_none_of_legacy(ascend, build):
    await ascend.add("a" * 64)
    ask = {"client": "i-1", "instance_key": "a" * 64}
    assert (await ascend.http.post("/rfork/v1/asks", json=ask)).json()["answer"] == "wait"
    await ascend.http.put("/rfork/v1/instances/i-2", content=msgspec.json.encode(build.seed("i-2")))
    assert (await ascend.get("a" * 64)).headers["SEED_IP"] == "127.0.0.1"
    assert (await ascend.get("a" * 64)).status_code == 404


async def test_the_legacy_end_points_are_absent_unless_asked_for():
    app = create_app(PlannerService(Policy(), ManualClock()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://planner.test") as http:
        assert (await http.get("/get_seed", headers={"SEED_KEY": "k"})).status_code == 404


async def until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        await asyncio.sleep(0.01)


async def test_planners_on_one_redis_know_each_others_seeds_and_leases(redis_server):
    """What one does, the other respects, renews, takes back; so does one that starts later."""
    place = Place("127.0.0.1", 1234, 0)

    async def start():
        fleet = AscendFleet(SystemClock(), open_store(redis_server.url, horizon_s=60.0, num_claims=1))
        await fleet.service.start()
        return fleet

    def users(fleet):
        seed = fleet.book.seeds.get(place)
        return sorted(seed.leases) if seed is not None else None

    one, two = await start(), await start()
    await one.add()
    await until(lambda: users(two) == [])
    user = (await one.get()).headers["USER_ID"]
    await until(lambda: users(two) == [user])
    assert (await two.get()).status_code == 404
    before = one.book.seeds[place].leases[user]
    assert (await two.post("/renew_seed_lease", user)).status_code == 200
    await until(lambda: one.book.seeds[place].leases[user] > before)
    later = await start()
    assert users(later) == [user]
    assert (await later.post("/put_seed", user)).status_code == 200
    await until(lambda: users(one) == users(two) == [])
    assert (await two.post("/remove_seed", SEED_KEY="model$0$tp0")).status_code == 200
    await until(lambda: users(one) is None and users(later) is None)
    for fleet in (one, two, later):
        await fleet.service.stop()
        await fleet.http.aclose()


def test_what_another_planner_did_counts_from_when_it_did_it():
    """A planner that starts hears of the last minute at once."""
    book, place = LegacyBook(ttl_s=60, lease_ttl_s=60), Place("192.0.2.1", 1, 0)
    book.take(LegacyAdded(*place, "k"), 1000.0, 50.0)
    book.take(LegacyLeased(*place, "reader"), 1000.0, 45.0)
    book.take(LegacyRenewed(*place, "reader"), 1000.0, 20.0)
    book.take(LegacyLeased(*place, "done"), 1000.0, 15.0)
    book.take(LegacyReleased(*place, "done"), 1000.0, 5.0)
    assert book.seeds[place].leases == {"reader": 1040.0}
    assert book.seeds[place].seen_at == 950.0
    book.add(place, "k", 1001.0)
    book.take(LegacyAdded(*place, "k"), 1002.0, 40.0)
    assert book.seeds[place].seen_at == 1001.0, "older news changes nothing"
    book.take(LegacyRemoved(*place), 1002.0, 40.0)
    assert place in book.seeds, "it has come again since"
    book.take(LegacyRemoved(*place), 1003.0, 0.1)
    assert place not in book.seeds
