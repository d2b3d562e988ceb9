"""Choice of seed: who is offered to whom."""

from __future__ import annotations

import pytest

from rfork.planner.events import Drain, Withdraw
from rfork.planner.lifecycle import IllegalTransition, InstanceGone, UnknownInstance
from rfork.wire.planner import FallBack, ForkFrom, ReadDisk, Wait


def names(answer):
    assert isinstance(answer, ForkFrom), answer
    return [candidate.instance_id for candidate in answer.candidates]


def test_a_client_is_sent_to_a_serving_instance_of_its_key(planner):
    planner.beat("i-seed", generation=4, content="checkpoint:c0ffee")
    answer = planner.ask()
    assert names(answer) == ["i-seed"]
    assert answer.candidates[0].listener == "http://i-seed.test:7000"
    assert answer.candidates[0].generation == 4


def test_another_key_is_never_offered(planner, build):
    planner.beat("i-other", instance_key=build.OTHER_KEY)
    assert isinstance(planner.ask(), ReadDisk)


@pytest.mark.parametrize(
    "fields",
    [
        {"state": "starting"},
        {"state": "paused"},
        {"state": "draining"},
        {"ranks": 8, "ranks_ready": 7},
        {"capacity": 0},
    ],
    ids=str,
)
def test_an_instance_that_can_not_serve_is_not_offered(planner, fields):
    planner.beat("i-bad", **fields)
    assert not isinstance(planner.ask(), ForkFrom)


def test_fewest_leases_first(planner):
    planner.beat("i-busy", capacity=4, leases=["i-a", "i-b"])
    planner.beat("i-idle", capacity=4)
    planner.beat("i-some", capacity=4, leases=["i-c"])
    assert names(planner.ask()) == ["i-idle", "i-some", "i-busy"]


def test_same_fabric_and_zone_are_preferred_among_equals(planner):
    planner.beat("i-far", labels={"zone": "z2", "fabric": "f2"})
    planner.beat("i-zone", labels={"zone": "z1", "fabric": "f2"})
    planner.beat("i-fabric", labels={"zone": "z2", "fabric": "f1"})
    planner.beat("i-both", labels={"zone": "z1", "fabric": "f1"})
    assert names(planner.ask(labels={"zone": "z1", "fabric": "f1"})) == ["i-both", "i-fabric", "i-zone"]


def test_seeds_of_equal_rank_take_turns(planner):
    for name in ("i-1", "i-2", "i-3"):
        planner.beat(name, capacity=2)
    chosen = []
    for client in ("i-a", "i-b", "i-c", "i-d"):
        chosen.append(names(planner.ask(client))[0])
        planner.report("loaded", client, chosen[-1])
    assert chosen == ["i-1", "i-2", "i-3", "i-1"]


def test_never_itself_nor_its_former_self(planner):
    planner.beat("i-me")
    planner.beat("i-former", listener="http://192.0.2.1:7000")
    answer = planner.ask("i-me", listener="http://192.0.2.1:7000")
    assert not isinstance(answer, ForkFrom)


def test_a_former_self_at_another_address_costs_one_try(planner):
    """A container restarts on a free port: nobody answers where it was, which it reports as of any seed."""
    planner.beat("i-former", listener="http://192.0.2.1:7000")
    assert names(planner.ask("i-now", listener="http://192.0.2.1:7001")) == ["i-former"]
    planner.beat("i-alive")
    planner.report("failed", "i-now", "i-former", reason="unreachable")
    assert names(planner.ask("i-now", listener="http://192.0.2.1:7001", exclude=["i-former"])) == ["i-alive"]
    planner.report("loaded", "i-now", "i-alive")
    assert names(planner.ask("i-other")) == ["i-alive"], "nobody else is sent there for a while either"
    planner.advance(31, "i-alive")
    assert list(planner.state.instances) == ["i-alive"]


def test_never_whoever_is_registered_at_the_clients_own_address(planner):
    planner.beat("i-before", listener="http://192.0.2.1:7000")
    assert planner.ask("i-now", listener="http://192.0.2.1:7000") is None
    planner.beat("i-else")
    assert names(planner.last("i-now")) == ["i-else"]


def test_a_new_instance_on_an_address_replaces_the_one_before(planner):
    planner.beat("i-before", listener="http://192.0.2.1:7000")
    planner.beat("i-after", listener="http://192.0.2.1:7000")
    assert list(planner.state.instances) == ["i-after"]
    with pytest.raises(InstanceGone, match="replaced by i-after"):
        planner.beat("i-before", listener="http://192.0.2.1:7000")


def test_taking_over_the_address_of_ones_own_reader_leaves_the_index_true(planner):
    """Found by the state machine test: ending the reader's entry put the seed on its shelf twice."""
    planner.beat("i-reader", listener="http://192.0.2.1:7000", state="starting")
    planner.beat("i-seed", state="starting", capacity=0, leases=["i-reader"])
    planner.beat("i-seed", capacity=1, leases=["i-other"], listener="http://192.0.2.1:7000")
    assert list(planner.state.instances) == ["i-seed"]


def test_an_entry_past_its_ttl_is_not_offered_even_if_nobody_swept(planner):
    planner.beat("i-dead")
    planner.clock.advance(31.0)
    assert not isinstance(planner.ask(), ForkFrom)


def test_an_entry_dies_without_heartbeats_and_lives_with_them(planner):
    planner.beat("i-dead")
    planner.beat("i-live")
    planner.advance(40, "i-live")
    assert list(planner.state.instances) == ["i-live"]


def test_an_instance_that_was_only_unreachable_comes_back_under_its_id(planner):
    planner.beat("i-seed", seq=7)
    planner.advance(40)
    planner.beat("i-seed", seq=8)
    assert names(planner.ask()) == ["i-seed"]


def test_a_heartbeat_that_was_overtaken_is_ignored(planner):
    planner.beat(seq=1, state="serving")
    planner.beat(seq=3, state="paused")
    planner.beat(seq=2, state="serving")
    assert planner.state.instances["i-seed"].beat.state.value == "paused"


def test_an_illegal_transition_changes_nothing_and_tells_the_story(planner):
    planner.beat(state="serving")
    planner.beat(state="draining")
    with pytest.raises(IllegalTransition, match="from DRAINING it may become DRAINING, STOPPED") as caught:
        planner.beat(state="serving")
    assert planner.state.instances["i-seed"].beat.state.value == "draining"
    assert caught.value.story[0].endswith("registered SERVING gen=0")


def test_a_withdrawn_id_never_comes_back(planner):
    planner.beat()
    planner.handle(Withdraw("i-seed", "SIGTERM"))
    with pytest.raises(InstanceGone, match="SIGTERM"):
        planner.beat()


def test_a_heartbeat_that_arrives_after_its_withdrawal_is_refused_even_if_never_seen_before(planner):
    planner.handle(Withdraw("i-seed"))
    with pytest.raises(InstanceGone):
        planner.beat()


def test_a_draining_seed_takes_nobody_new_and_keeps_its_readers(planner):
    planner.beat(capacity=4, leases=["i-a"])
    planner.handle(Drain("i-seed"))
    assert not isinstance(planner.ask(), ForkFrom)
    assert "i-a" in planner.state.instances["i-seed"].uses


def test_draining_an_unknown_instance_says_so(planner):
    with pytest.raises(UnknownInstance):
        planner.handle(Drain("i-nobody"))


def test_live_content_is_found_under_its_live_key_only(planner, build):
    planner.beat("i-rl", instance_key="c" * 64, live_key=build.OTHER_KEY, content="live:1")
    assert names(planner.ask("i-new", instance_key=build.OTHER_KEY)) == ["i-rl"]
    assert isinstance(planner.ask("i-new2"), ReadDisk)


def test_content_that_changed_leaves_its_old_key_at_once(planner, build):
    planner.beat("i-seed")
    planner.beat("i-seed", instance_key=build.OTHER_KEY, generation=2)
    assert isinstance(planner.ask(), ReadDisk)
    assert names(planner.ask("i-2", instance_key=build.OTHER_KEY)) == ["i-seed"]


def test_a_seed_reported_bad_is_set_aside_and_comes_back(planner):
    near = {"labels": {"zone": "z1"}}
    planner.beat("i-bad", **near)
    planner.beat("i-good", labels={"zone": "z2"})
    assert names(planner.ask("i-a", **near)) == ["i-bad", "i-good"]
    planner.report("failed", "i-a", "i-bad", reason="unreachable")
    assert names(planner.ask("i-a", **near)) == ["i-good"]
    planner.report("loaded", "i-a", "i-good")
    planner.advance(11, "i-bad", "i-good")
    assert names(planner.ask("i-c", **near)) == ["i-bad", "i-good"]


def test_back_off_doubles_with_each_client_that_fails(planner):
    planner.beat("i-bad", capacity=9)
    for client in ("i-1", "i-2", "i-3"):
        planner.report("failed", client, "i-bad", reason="seed_lost")
    assert planner.state.instances["i-bad"].aside_until - planner.clock.now() == 40.0
    planner.report("loaded", "i-4", "i-bad")
    assert planner.state.instances["i-bad"].aside_until == 0.0


def test_one_client_with_a_broken_link_does_not_set_the_fleet_aside(planner):
    for n in range(6):
        planner.beat(f"i-{n}")
        planner.report("failed", "i-broken", f"i-{n}", reason="unreachable")
    aside = [i.id for i in planner.state.instances.values() if i.aside_until > planner.clock.now()]
    assert aside == ["i-0", "i-1"]
    assert planner.notes[-1].kind == "suspect"


def test_a_mismatch_is_no_fault_of_the_seed(planner):
    planner.beat("i-seed")
    planner.report("failed", reason="manifest_mismatch")
    assert not planner.state.instances["i-seed"].strikes


def test_a_seed_that_refused_is_left_alone_for_a_moment_only(planner):
    planner.beat("i-full", capacity=2)
    planner.ask("i-a")
    planner.report("refused", "i-a", "i-full", reason="busy")
    assert planner.ask("i-b", wait_s=0).__class__ is not ForkFrom
    planner.advance(2, "i-full")
    assert names(planner.ask("i-c")) == ["i-full"]


def test_who_gave_up_on_every_seed_falls_back_at_once(planner):
    planner.beat("i-1")
    planner.beat("i-2")
    answer = planner.ask(exclude=["i-1", "i-2"])
    assert isinstance(answer, FallBack)
    assert answer.reason == "all_excluded"


def test_a_refusal_names_the_nearest_instances_and_the_fields_that_differ(planner, build):
    mine = {"dtype": "bfloat16", "tp_size": 2, "quantization": None}
    planner.beat("i-fp8", instance_key="b" * 64, identity={**mine, "quantization": "fp8"})
    planner.beat("i-far", instance_key="c" * 64, identity={"dtype": "float16", "tp_size": 8, "quantization": "awq"})
    answer = planner.ask(identity=mine)
    assert isinstance(answer, ReadDisk)
    assert [n.instances for n in answer.nearest] == [["i-fp8"], ["i-far"]]
    assert answer.nearest[0].differs == {"quantization": (None, "fp8")}


def test_the_identity_is_asked_for_once(planner, build):
    planner.beat("i-1")
    assert not planner.state.identity_known(build.KEY)
    planner.beat("i-1", identity={"dtype": "bfloat16"})
    planner.beat("i-2")
    assert planner.state.identity_known(build.KEY)


def test_waiting_is_told_for_whom(planner):
    planner.beat("i-seed", leases=["i-x"])
    answer = planner.ask(wait_s=0)
    assert isinstance(answer, Wait)
    assert (answer.reason, answer.waiting_for) == ("seeds_busy", ["i-seed"])


def test_a_seed_that_is_busy_for_a_moment_is_no_reason_to_read_the_disk(planner):
    """It counts as a seed while it rests; the client that it refused waits for it."""
    planner.beat("i-seed", capacity=1)
    planner.ask("i-client")
    planner.report("refused", reason="busy")
    assert planner.ask("i-client") is None
    planner.advance(planner.policy.busy_s + 1, "i-seed")
    assert [c.instance_id for c in planner.last("i-client").candidates] == ["i-seed"]


def test_a_client_that_gave_up_on_a_resting_seed_falls_back_at_once(planner):
    planner.beat("i-seed")
    planner.ask("i-client")
    planner.report("failed", reason="manifest_mismatch")
    assert planner.ask("i-client", exclude=["i-seed"]).reason == "all_excluded"


def test_a_seed_that_was_struck_is_no_reason_to_wait(planner):
    planner.beat("i-seed")
    planner.ask("i-client")
    planner.report("failed", reason="seed_lost")
    assert isinstance(planner.ask("i-client", exclude=["i-seed"]), ReadDisk)
