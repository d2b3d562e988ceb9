"""Fleet start: one reads the disk, the rest wait up to a bound and fork; nobody starves, capacity comes back."""

from __future__ import annotations

import math

from rfork.planner.events import Claimed, ClaimLost, Hangup, Parked, Withdraw
from rfork.wire.planner import FallBack, ForkFrom, ReadDisk, Wait


def kinds(planner, clients):
    return [type(planner.last(c)).__name__ for c in clients]


def test_of_eight_that_start_at_once_one_reads_the_disk_and_seven_fork_from_it(planner):
    clients = [f"i-{n}" for n in range(8)]
    for name in clients:
        planner.beat(name, state="starting")
        planner.ask(name)
    assert kinds(planner, clients) == ["ReadDisk"] + ["NoneType"] * 7
    for _ in range(4):
        for name in clients:
            if isinstance(planner.last(name), ReadDisk | ForkFrom):
                planner.beat(name, capacity=2, state="serving")
    assert kinds(planner, clients) == ["ReadDisk"] + ["ForkFrom"] * 7


def test_seeds_double_each_round_instead_of_all_piling_on_one(planner):
    clients = [f"i-{n}" for n in range(64)]
    for name in clients:
        planner.ask(name)
    rounds, serving = 1, {"i-0"}
    while len(serving) < 64:
        for name in serving:
            planner.beat(name, capacity=8)
        loading = [c for c in clients if c not in serving and isinstance(planner.last(c), ForkFrom)]
        assert len(loading) <= len(serving)
        serving |= set(loading)
        rounds += 1
    assert rounds == math.ceil(math.log2(65))


def test_no_claim_before_the_planner_has_heard_of_the_seeds_that_are_there(build):
    planner = build.Driver(settle_s=12.0)
    assert planner.ask() is None
    planner.advance(5)
    planner.beat("i-seed")
    assert isinstance(planner.last(), ForkFrom)


def test_after_settling_the_claim_is_granted_to_who_asked_first(build):
    planner = build.Driver(settle_s=12.0)
    planner.ask("i-1")
    planner.ask("i-2")
    planner.advance(13)
    assert kinds(planner, ["i-1", "i-2"]) == ["ReadDisk", "NoneType"]


def test_the_claim_passes_on_when_its_holder_dies(planner):
    planner.beat("i-1", state="starting")
    planner.ask("i-1")
    passes_on_after_its_ttl(planner)


def passes_on_after_its_ttl(planner):
    """`i-1` holds the claim and is never heard of again: `i-2` gets it after `ttl_s`, and not before."""
    planner.ask("i-2", wait_s=30)
    planner.advance(29)
    assert planner.last("i-2") is None
    planner.ask("i-2", wait_s=30)
    planner.advance(2)
    assert isinstance(planner.last("i-2"), ReadDisk)


def test_a_holder_that_never_registered_loses_the_claim_after_its_ttl(planner):
    planner.ask("i-1")
    planner.ask("i-2")
    for _ in range(3):
        planner.advance(20)
        planner.ask("i-2")
    assert isinstance(planner.last("i-2"), ReadDisk)


def test_heartbeats_of_the_holder_keep_the_claim(planner, build):
    planner.beat("i-1", state="starting")
    planner.ask("i-1")
    planner.advance(200, "i-1")
    assert "i-1" in planner.state.pools[build.KEY].claims
    answer = planner.ask("i-2", wait_s=0)
    assert (answer.reason, answer.waiting_for) == ("claim_held", ["i-1"])


def test_a_heartbeat_tells_a_planner_that_knows_nothing_who_reads_the_disk(build):
    """The planner restarts while `i-1` reads the disk, and `i-2` waits on at the new one."""
    planner = build.Driver(settle_s=12.0)
    planner.ask("i-2", wait_s=30)
    planner.advance(5)
    planner.beat("i-1", state="starting", reads_disk=True)
    planner.advance(24, "i-1")
    assert planner.last("i-2") is None
    planner.ask("i-2", wait_s=30)
    planner.advance(2)
    planner.beat("i-1", state="serving")
    assert isinstance(planner.last("i-2"), ForkFrom)


def test_a_claim_of_which_a_planner_hears_again_takes_back_no_renewal_and_no_end(build):
    """A planner whose Redis connection broke reads again what it has read: the grant, and no heartbeat it knows."""
    planner = build.Driver()
    planner.beat("i-1", state="starting")
    (key,) = planner.state.pools
    planner.handle(Claimed(key, "i-1"))
    planner.advance(59, "i-1")
    planner.beat("i-1", state="starting", reads_disk=True)
    planner.state.handle(Claimed(key, "i-1"), planner.clock.now() - 59)
    planner.advance(2)
    assert planner.ask("i-2") is None, "i-1 reads the disk"
    planner.beat("i-1", state="serving")
    assert isinstance(planner.last("i-2"), ForkFrom)
    planner.state.handle(Claimed(key, "i-1"), planner.clock.now() - 1)
    assert planner.state.pools[key].claims == {}


def test_the_claim_that_a_heartbeat_brought_back_passes_on_as_any_other(build):
    planner = build.Driver(settle_s=12.0)
    planner.beat("i-1", state="starting", reads_disk=True)
    passes_on_after_its_ttl(planner)


def test_only_while_it_starts_does_an_instance_hold_the_claim(planner, build):
    planner.beat("i-1", state="serving", reads_disk=True)
    assert not planner.state.pools[build.KEY].claims


def test_the_holder_that_asks_again_still_holds_the_claim(planner):
    assert isinstance(planner.ask("i-1"), ReadDisk)
    assert isinstance(planner.ask("i-1"), ReadDisk)


def test_a_failed_disk_load_passes_the_claim_on_at_once(planner):
    planner.ask("i-1")
    planner.ask("i-2")
    planner.report("failed", "i-1", seed="", reason="io_error")
    assert isinstance(planner.last("i-2"), ReadDisk)


def test_a_withdrawn_holder_passes_the_claim_on_at_once(planner):
    planner.beat("i-1", state="starting")
    planner.ask("i-1")
    planner.ask("i-2")
    planner.handle(Withdraw("i-1"))
    assert isinstance(planner.last("i-2"), ReadDisk)


def test_the_store_may_take_a_claim_away_again(planner, build):
    planner.ask("i-1")
    planner.handle(ClaimLost(build.KEY, "i-1", {"i-elsewhere": 20.0}))
    answer = planner.ask("i-1", wait_s=0)
    assert isinstance(answer, Wait)
    assert answer.waiting_for == ["i-elsewhere"]


def test_who_may_not_read_the_disk_never_gets_a_claim(planner):
    assert planner.ask(allow_disk=False, bound_s=60.0) is None
    planner.ask("i-2")
    assert isinstance(planner.last("i-2"), ReadDisk)


def test_nobody_waits_past_the_bound(planner):
    planner.beat("i-disk", state="starting")
    planner.ask("i-disk")
    planner.ask("i-1", bound_s=25.0, wait_s=30.0)
    planner.advance(25, "i-disk")
    answer = planner.last("i-1")
    assert isinstance(answer, FallBack)
    assert answer.reason == "bound"
    assert 20.0 <= answer.waited_s <= 26.0


def test_bounds_are_spread_so_that_a_fleet_does_not_give_up_at_once(planner):
    planner.beat("i-disk", state="starting")
    planner.ask("i-disk")
    for n in range(100):
        planner.ask(f"i-{n}", bound_s=100.0, wait_s=30.0, waited_s=75.0)
    planner.advance(15, "i-disk")
    gone = sum(isinstance(planner.last(f"i-{n}"), FallBack) for n in range(100))
    assert 20 < gone < 80


def test_who_asked_first_is_served_first_even_between_two_asks(planner):
    planner.beat("i-seed", leases=["i-x"])
    planner.ask("i-first", wait_s=5)
    planner.advance(2, "i-seed")
    planner.ask("i-second", wait_s=20)
    planner.advance(4, "i-seed")
    assert isinstance(planner.last("i-first"), Wait)
    planner.ask("i-first", wait_s=20, waited_s=6.0)
    planner.beat("i-seed")
    assert kinds(planner, ["i-first", "i-second"]) == ["ForkFrom", "NoneType"]


def test_a_client_keeps_its_place_when_it_asks_another_planner(planner):
    planner.beat("i-seed", leases=["i-x"])
    planner.ask("i-young")
    planner.ask("i-old", waited_s=50.0)
    planner.beat("i-seed")
    assert kinds(planner, ["i-old", "i-young"]) == ["ForkFrom", "NoneType"]


def test_a_second_ask_of_one_client_ends_the_first(planner, build):
    planner.beat("i-seed", leases=["i-x"])
    planner.handle(Parked(build.ask(), 100))
    effects = planner.handle(Parked(build.ask(), 101))
    assert [(e.poll, e.answer.reason) for e in effects] == [(100, "replaced")]


def test_a_client_that_hung_up_is_granted_nothing(planner, build):
    planner.beat("i-seed", leases=["i-x"])
    planner.handle(Parked(build.ask("i-gone"), 100))
    planner.handle(Hangup("i-gone", 100))
    planner.ask("i-here")
    planner.beat("i-seed")
    assert kinds(planner, ["i-gone", "i-here"]) == ["NoneType", "ForkFrom"]


def test_a_reservation_that_no_heartbeat_confirms_is_given_back(planner):
    planner.beat("i-seed")
    planner.ask("i-killed")
    planner.ask("i-next", wait_s=30)
    planner.advance(29, "i-seed")
    planner.ask("i-next", wait_s=30)
    planner.advance(3, "i-seed")
    assert isinstance(planner.last("i-next"), ForkFrom)


def test_a_lease_that_the_seed_lists_no_more_frees_the_slot(planner):
    planner.beat("i-seed", leases=["i-a"])
    planner.ask("i-b")
    planner.beat("i-seed", leases=[])
    assert isinstance(planner.last("i-b"), ForkFrom)


def test_a_client_that_serves_reads_no_more(planner):
    planner.beat("i-seed")
    planner.ask("i-a")
    planner.ask("i-b")
    planner.beat("i-a")
    assert isinstance(planner.last("i-b"), ForkFrom)
    assert planner.state.instances["i-seed"].uses.keys() | planner.state.instances["i-a"].uses.keys() == {"i-b"}


def test_a_slow_reader_does_not_starve_the_rest(planner):
    """No grant in `patience_s`: the first in the queue shares a seed with the reader that is stuck."""
    planner.beat("i-seed", capacity=4, leases=["i-slow"])
    for wait_no in range(6):
        planner.ask("i-next", wait_s=10, waited_s=10.0 * wait_no)
        planner.advance(10, "i-seed")
    assert isinstance(planner.last("i-next"), ForkFrom)


def wait_on(planner, clients, duration_s, serve):
    """Clients ask every ten seconds until one of them is answered; `serve` is called every five."""
    for second in range(duration_s):
        if second % 5 == 0:
            serve(second)
        if second % 10 == 0:
            for name, exclude in clients.items():
                planner.ask(name, wait_s=10, waited_s=float(second), exclude=exclude)
        planner.advance(1)
        if any(isinstance(planner.last(name), ForkFrom | FallBack) for name in clients):
            return


def test_grants_of_a_seed_that_it_gave_up_on_are_no_comfort_to_who_waits(planner):
    """`i-fast` serves one newcomer after another, and `i-a` can't use it; `i-stuck` has three places free."""

    def serve(second):
        planner.beat("i-stuck", capacity=4, leases=["i-slow"])
        planner.beat("i-fast", capacity=1)
        planner.report("loaded", f"i-new{second - 5}", "i-fast")
        planner.ask(f"i-new{second}")

    wait_on(planner, {"i-a": ["i-fast"]}, 100, serve)
    assert [c.instance_id for c in planner.last("i-a").candidates] == ["i-stuck"]
    assert planner.clock.now() - 1000.0 <= planner.policy.patience_s + 2
    assert kinds(planner, [f"i-new{second}" for second in range(0, 60, 5)]) == ["ForkFrom"] * 12


def test_who_can_use_nothing_does_not_stand_in_the_way_of_who_could_share(planner):
    """The first in the queue has given up on every seed but a full one."""

    def serve(second):
        planner.beat("i-full", capacity=1, leases=["i-slow"])
        planner.beat("i-stuck", capacity=4, leases=["i-slower"])
        planner.beat("i-fast", capacity=1)
        planner.report("loaded", f"i-new{second - 5}", "i-fast")
        planner.ask(f"i-new{second}")

    wait_on(planner, {"i-1": ["i-stuck", "i-fast"], "i-2": ["i-fast"]}, 100, serve)
    assert isinstance(planner.last("i-1"), Wait)
    assert [c.instance_id for c in planner.last("i-2").candidates] == ["i-stuck"]


def test_patience_lets_one_share_at_a_time(planner):
    clients = {f"i-{n}": ["i-fast"] for n in range(3)}

    def serve(second):
        planner.beat("i-stuck", capacity=4, leases=["i-slow"])
        planner.beat("i-fast", capacity=1, leases=["i-other"])

    wait_on(planner, clients, 100, serve)
    assert kinds(planner, clients) == ["ForkFrom", "Wait", "Wait"]


def test_capacity_is_never_exceeded_by_patience(planner):
    planner.beat("i-seed", capacity=1, leases=["i-slow"])
    for wait_no in range(9):
        planner.ask("i-next", wait_s=10, waited_s=10.0 * wait_no)
        planner.advance(10, "i-seed")
    assert isinstance(planner.last("i-next"), Wait)


def test_an_ask_gives_back_what_the_client_was_sent_to_before(planner):
    planner.beat("i-1")
    planner.beat("i-2")
    planner.ask("i-a")
    planner.ask("i-a", exclude=["i-1"])
    assert not planner.state.instances["i-1"].uses
    assert list(planner.state.instances["i-2"].uses) == ["i-a"]


def test_a_client_that_fell_back_is_waited_for_by_nobody(planner):
    planner.beat("i-seed", leases=["i-x"])
    planner.ask("i-a")
    planner.report("fell_back", "i-a", seed="")
    assert not planner.state.pool_of_waiter
