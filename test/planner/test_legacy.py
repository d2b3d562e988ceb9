"""Plays vLLM-Ascend RFork's client over the legacy end-points, from the protocol's description."""

from __future__ import annotations

import httpx
import msgspec
import pytest

from rfork.clock import ManualClock
from rfork.planner.app import create_app
from rfork.planner.legacy import LegacyBook
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService

PLACE = {"SEED_IP": "127.0.0.1", "SEED_PORT": "1234", "SEED_RANK": "0"}


class AscendFleet:
    def __init__(self):
        self.clock = ManualClock()
        self.service = PlannerService(Policy(), self.clock)
        app = create_app(self.service, legacy=LegacyBook())
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
