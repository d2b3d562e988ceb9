"""A client's way to weights: the real planner behind a real socket, and seeds that are known by name only."""

from __future__ import annotations

import dataclasses
import json
import logging
import threading

import pytest

from rfork.client.planned import NUM_FAILED, Planned
from rfork.client.sources import Addresses
from rfork.clock import ManualClock, SystemClock
from rfork.config import load_config
from rfork.errors import FenceBroken, SeedLost, SeedRefused, SeedUnreachable
from rfork.identity import ANY_LIVE, Content, InstanceId, ModelIdentity, instance_key
from rfork.planner.client import PlannerClient
from rfork.wire.planner import Outcome, Report
from rfork.wire.seed import WeightsReport

IDENTITY = ModelIdentity("test", {"dtype": "bfloat16", "model.architecture": "Tiny"})
CHECKPOINT = Content("checkpoint", "c0ffee")
KEY = instance_key(IDENTITY, CHECKPOINT)
LIVE_KEY = instance_key(IDENTITY, ANY_LIVE)


@dataclasses.dataclass
class Client:
    """One instance that looks for weights. `told` is what it reports, which a test may hand on to the planner."""

    source: Planned
    told: list[Report]
    clock: ManualClock | SystemClock

    def next(self):
        return self.source.next()

    @property
    def outcomes(self):
        return [(r.outcome.value, r.seed, r.reason) for r in self.told]


@pytest.fixture
def fleet(live_planner, build):
    return Fleet(live_planner, build)


class Fleet:
    """Instances registered with a real planner by real heartbeats."""

    def __init__(self, planner, build):
        self.planner, self.build = planner, build
        self.http = PlannerClient(planner.url)
        self.elected: list[str] = []

    def seed(self, name, **fields):
        self.http.heartbeat(self.build.seed(name, **{"instance_key": KEY, "capacity": 8, **fields}))

    def client(self, name="i-client", *, url=None, clock=None, deliver=True, listener="", **settings):
        """`deliver`: its reports arrive at the planner at once."""
        config = load_config(None, {"RFORK_CONFIG": json.dumps({"plan_timeout_s": 5, **settings})})
        clock = clock or SystemClock()
        told = []

        def tell(report):
            told.append(report)
            if deliver:
                self.http.report(report)

        source = Planned(
            PlannerClient(url or self.planner.url, timeout_s=2.0),
            lambda: Addresses([], config.seeds, config, clock, own_instance_ids=(name,)),
            config,
            clock,
            instance_id=InstanceId(name),
            identity=IDENTITY,
            content=CHECKPOINT,
            tell=tell,
            elected=lambda: self.elected.append(name),
            listener=listener,
        )
        return Client(source, told, clock)


def test_the_first_is_elected_to_read_the_disk_and_the_next_forks_from_it(fleet):
    offer = fleet.client("i-first").next()
    assert (offer.candidate, offer.elected, offer.reason) == (None, True, "elected")
    assert fleet.elected == ["i-first"], "it tells whoever sends its heartbeats"
    fleet.seed("i-first", capacity=8)
    second = fleet.client("i-second")
    offer = second.next()
    assert offer.candidate.instance_id == "i-first"
    second.source.succeeded(offer.candidate, WeightsReport(source="seed", nbytes=10, phases_s={"read": 0.5}))
    report = second.told[0]
    assert (report.outcome, report.seed, report.nbytes, report.phases_s) == (
        *(Outcome.LOADED, "i-first"),
        *(10, {"read": 0.5}),
    )


def test_three_seeds_that_fail_are_tried_at_once_then_it_falls_back_and_says_so(fleet):
    for name in ("i-a", "i-b", "i-c", "i-d"):
        fleet.seed(name)
    client = fleet.client(clock=ManualClock())
    tried = []
    while (offer := client.next()).candidate is not None:
        tried.append(offer.candidate.instance_id)
        client.source.failed(offer.candidate, SeedUnreachable(f"{offer.candidate.instance_id} does not answer"))
    assert len(set(tried)) == NUM_FAILED == 3
    assert client.clock.now() == 1000.0, "nothing was waited for"
    assert (offer.elected, offer.reason) == (False, "unreachable")
    assert all(f"{name} does not answer" in offer.why for name in tried)
    assert "3 seeds failed; no other is tried" in offer.why
    assert client.outcomes == [*(("failed", name, "unreachable") for name in tried), ("fell_back", "", "unreachable")]


def test_where_the_disk_is_no_way_out_every_seed_is_tried(fleet):
    names = {f"i-{n}" for n in range(5)}
    for name in names:
        fleet.seed(name)
    client = fleet.client(fallback="never", deliver=False)
    tried = set()
    while (offer := client.next()).candidate is not None:
        tried.add(offer.candidate.instance_id)
        client.source.failed(offer.candidate, SeedLost("it went away"))
    assert tried == names
    assert "all_excluded" in offer.why


def test_a_busy_seed_is_moved_on_from_at_once_and_comes_into_question_again(fleet):
    """Over-grants are harmless: the seed refuses, and the client asks the next, or the same a moment later."""
    fleet.seed("i-a")
    client = fleet.client()
    busy = SeedRefused("1 of 1 clients are reading", reason="busy", retry_after_s=2.0)
    first = client.next()
    client.source.failed(first.candidate, busy)
    assert client.next().candidate.instance_id == "i-a"
    assert client.outcomes == [("refused", "i-a", "busy")]
    fleet.seed("i-b")
    client.source.failed(first.candidate, busy)
    assert client.next().candidate.instance_id == "i-b", "the other one is free"


@pytest.mark.parametrize(("error", "again"), [(FenceBroken("it changed"), True), (SeedLost("it died"), False)])
def test_weights_that_changed_under_the_reader_are_worth_another_try(error, again, fleet):
    fleet.seed("i-a")
    client = fleet.client(fallback="never", plan_timeout_s=3)
    client.source.failed(client.next().candidate, error)
    offer = client.next()
    assert (offer.candidate is not None) == again, offer


def test_all_asks_of_a_load_share_one_bound(fleet):
    """A seed that is always busy must not keep a client for ever."""
    fleet.seed("i-a")
    client = fleet.client(clock=ManualClock(), plan_timeout_s=4, deliver=False)
    busy = SeedRefused("full", reason="busy", retry_after_s=1.0)
    num_tries = 0
    while (offer := client.next()).candidate is not None:
        client.source.failed(offer.candidate, busy)
        num_tries += 1
    assert 1 < num_tries < 12
    assert (offer.reason, offer.elected) == ("busy", False)
    assert client.clock.now() < 1006


def test_live_weights_are_waited_for_and_the_disk_is_never_offered(fleet):
    fleet.seed("i-checkpoint")
    client = fleet.client(weights="live", plan_timeout_s=1)
    offer = client.next()
    assert (offer.candidate, offer.elected) == (None, False)
    assert "no_seed" in offer.reason
    fleet.seed("i-live", instance_key="a" * 64, live_key=LIVE_KEY, content="live:1")
    client = fleet.client("i-next", weights="live")
    assert client.next().candidate.instance_id == "i-live"
    assert client.source._ask.allow_disk is False


def test_live_weights_without_a_planner_are_not_waited_for_as_for_a_disk(build, fleet):
    client = fleet.client(
        url=f"http://127.0.0.1:{build.free_port()}", weights="live", clock=ManualClock(), storage_jitter_s=1000,
        deliver=False,
    )  # fmt: skip
    assert client.next().candidate is None
    assert client.clock.now() < 1025, "only the planner was waited for"


def test_an_instance_that_will_be_nobodys_seed_gives_its_claim_back_at_once(fleet):
    assert fleet.client("i-selfish", seed="off").next().elected
    assert fleet.client("i-next").next().elected
    assert fleet.elected == ["i-next"], "who holds no claim says nothing"


def test_its_own_former_life_is_never_offered(fleet):
    """The listener's address says who it was, whatever it is called now."""
    fleet.seed("i-before", listener="http://me:7000")
    client = fleet.client("i-after", listener="http://me:7000", plan_timeout_s=0.5)
    assert client.next().candidate is None
    assert client.source._ask.listener == "http://me:7000"


class Held:
    """The planner's own core on the client's clock: asks that it holds open pass in no time."""

    def __init__(self, driver):
        self.driver = driver

    def ask(self, ask):
        answer = self.driver.ask(**{name: getattr(ask, name) for name in ask.__struct_fields__})
        if answer is None:
            self.driver.advance(ask.wait_s)
        return answer or self.driver.last(ask.client)


def test_it_says_every_ten_seconds_for_whom_it_waits_how_long_and_until_when(build, caplog):
    caplog.set_level(logging.INFO, "rfork")
    driver = build.Driver(claim_ttl_s=1000.0, bound_jitter=0.0)
    driver.ask("i-first", instance_key=KEY)
    config = load_config(None, {"RFORK_CONFIG": json.dumps({"plan_timeout_s": 65})})
    source = Planned(
        Held(driver), lambda: Addresses([], (), config, driver.clock), config, driver.clock,
        instance_id=InstanceId("i-second"), identity=IDENTITY, content=CHECKPOINT, tell=lambda report: None,
    )  # fmt: skip
    assert source.next().candidate is None
    assert driver.clock.now() == 1065.0
    lines = [r.getMessage() for r in caplog.records if "waiting for" in r.getMessage()]
    assert lines == [
        f"rfork: waiting for i-first (claim_held): {waited} s of at most 65 s, 0 ahead"
        for waited in (10, 20, 30, 40, 50, 60)
    ]


def test_two_replicas_of_one_instance_ask_in_turns_and_both_are_told(fleet, monkeypatch):
    """They share a name, so each ask replaces the other's; neither may be lost."""
    assert fleet.client("i-first").next().elected
    offers = []
    threads = [threading.Thread(target=lambda: offers.append(fleet.client("i-twice").next())) for _ in range(2)]
    for thread in threads:
        thread.start()
    fleet.seed("i-first")
    for thread in threads:
        thread.join(10)
    assert [o.candidate.instance_id for o in offers] == ["i-first"] * 2


# Without the planner


def test_seeds_are_used_while_the_planner_is_gone_and_the_disk_only_after_them(build, fleet, stage):
    """`stage` is a real listener that says that it is no seed yet, until it is."""
    client = fleet.client(
        url=f"http://127.0.0.1:{build.free_port()}", seeds=[stage.url.removeprefix("http://")], clock=ManualClock(),
        storage_jitter_s=1000, seek_timeout_s=2, deliver=False,
    )  # fmt: skip
    offer = client.next()
    assert offer.candidate.instance_id == "i-listed"
    assert client.clock.now() < 1005, "a planner that does not answer is not waited for where there are seeds"
    client.source.failed(offer.candidate, SeedLost("it died"))
    offer = client.next()
    assert (offer.candidate, offer.reason) == (None, "seed_lost")
    assert "no planner answers" in offer.why
    assert 1005 < client.clock.now() <= 2010, "nobody reads the disk unclaimed without a wait of its own"
    assert client.outcomes == [("failed", "i-listed", "seed_lost"), ("fell_back", "", "seed_lost")]


def test_seeds_are_the_second_source_where_the_planner_has_nobody(fleet, stage):
    fleet.client("i-holder").next()
    client = fleet.client(seeds=[stage.url.removeprefix("http://")], plan_timeout_s=0.5)
    offer = client.next()
    assert offer.candidate.instance_id == "i-listed"


def test_what_the_planner_named_is_not_tried_again_from_the_list(fleet, stage):
    fleet.seed("i-listed", listener=stage.url)
    client = fleet.client(seeds=[stage.url.removeprefix("http://")], fallback="never", plan_timeout_s=2)
    offer = client.next()
    assert offer.candidate.instance_id == "i-listed"
    client.source.failed(offer.candidate, SeedLost("it died"))
    assert client.next().candidate is None


def test_a_planner_that_refuses_is_no_reason_to_read_the_disk_at_once(live_planner, fleet):
    """A fleet with the wrong key, say: the list first, then a wait that differs between instances."""
    client = fleet.client("not a name", clock=ManualClock(), storage_jitter_s=1000, deliver=False)
    client.source._tell = lambda report: None
    assert client.next().candidate is None
    assert client.clock.now() > 1001


@pytest.fixture
def stage():
    from test.planner.stage import Stage

    stage = Stage("i-listed", KEY)
    yield stage
    stage.close()


def test_an_identity_of_any_size_can_be_asked_with(fleet):
    fields = {f"field.{n}": "x" * 5000 for n in range(1000)}
    config = load_config(None, {"RFORK_CONFIG": json.dumps({"labels": {"zone" * 30: "z" * 500}})})
    clock = SystemClock()
    source = Planned(
        PlannerClient(fleet.planner.url), lambda: Addresses([], (), config, clock), config, clock,
        instance_id=InstanceId("i-big"), identity=ModelIdentity("test", fields), content=CHECKPOINT,
        tell=lambda report: None,
    )  # fmt: skip
    assert source.next().elected


def test_a_reason_from_a_peer_never_breaks_a_report(fleet):
    fleet.seed("i-a")
    client = fleet.client()
    odd = SeedRefused("é" * 9000, reason="<b>no way\x00" * 40)
    client.source.failed(client.next().candidate, odd)
    assert client.told[0].reason.startswith("_b_no_way_")
    assert len(client.told[0].reason) == 64
