"""A rank's agent: what it publishes, and that nothing it says is true for longer than it is true."""

import logging

import pytest
from support.seed_node import until
from support.seed_rank import CHECKPOINT, BufferShard, make_agent, report, seed_shard

from rfork.errors import NotQuiet, TransportError, UnsupportedModel
from rfork.identity import Content, RankIdentity
from rfork.transports.memory import MemoryFabric, MemoryTransport


def published(seed):
    """What the node has been told last of the only shard."""
    return seed.node.shard_of_rank(0)


def wait_generation(seed, generation):
    until(lambda: published(seed) is not None and published(seed).generation == generation)
    return published(seed)


class Refusing(MemoryTransport):
    def open(self):
        raise TransportError("no such device")


class Stuck(MemoryTransport):
    """Its engines can't be destroyed while `is_stuck`."""

    is_stuck = True

    def open(self):
        engine = super().open()
        close = engine.close
        engine.close = lambda timeout_s: self.refuse() if self.is_stuck else close(timeout_s)
        return engine

    def refuse(self):
        raise NotQuiet("still writing")


def test_engines_are_opened_at_publication_and_not_before(seed):
    agent = seed.start().add(publish=False)
    assert seed.fabric.num_open == 0
    assert agent.publish([seed_shard(seed.shards[0])])
    assert seed.fabric.num_open == 1


def test_published_bytes_and_fence_can_be_read_over_the_endpoint(serving):
    record = published(serving)
    engine = serving.fabric.find(record.published.binding.endpoints[0].session_id)
    assert all(engine.holds(a, n) for a, n in zip(record.published.binding.addresses, BufferShard().sizes, strict=True))
    assert engine.holds(record.published.binding.fence_address, record.published.binding.fence_nbytes)


def test_seed_off_never_opens_an_engine(seed):
    agent = seed.start().add(agent={"is_on": False})
    assert agent.publish([seed_shard(seed.shards[0])]) is False
    assert (seed.fabric.num_open, agent.generation) == (0, 0)
    seed.wait("stopped")
    assert "switched off" in seed.node.status_reply().ranks[0].state


def test_one_warning_names_address_and_port_of_the_open_data_plane(seed, caplog):
    with caplog.at_level(logging.WARNING):
        agent = seed.start().add()
        with agent.changing("update"):
            pass
    warnings = [r.message for r in caplog.records if "no authentication" in r.message]
    assert len(warnings) == 1
    assert "memory:1 (memory)" in warnings[0]
    assert "on all interfaces, whatever the server binds" in warnings[0]


def test_fabric_that_can_not_open_costs_that_fabric_only(seed, caplog):
    good, bad = MemoryTransport(seed.fabric), Refusing(seed.fabric)
    agent = seed.start().add(agent={"transports": lambda: [bad, good]})
    assert agent.generation == 2
    assert "not served over memory: no such device" in caplog.text


@pytest.mark.parametrize("error", [UnsupportedModel("conv.weight: sparse"), RuntimeError("device lost")])
def test_publication_that_fails_is_a_reason_and_not_a_crash(seed, error, caplog):
    agent = seed.start().add(publish=False)

    def resolve():
        raise error

    source = seed_shard(seed.shards[0])
    broken = type(source)(resolve=resolve, identity=source.identity, content=source.content)
    assert agent.publish([broken]) is False
    assert agent.publish([broken]) is False
    seed.wait("stopped")
    assert str(error) in seed.node.status_reply().ranks[0].state
    assert len([r for r in caplog.records if "rank 0 is no seed" in r.message]) == 1
    with agent.changing("update"):  # and the server lives on
        pass


def test_no_fabric_at_all_is_a_reason(seed):
    agent = seed.start().add(agent={"transports": lambda: [Refusing(seed.fabric)]})
    assert agent.generation == 1  # born closed, never opened
    seed.wait("stopped")
    assert "no fabric can serve: memory: no such device" in seed.node.status_reply().ranks[0].state


def test_fence_is_odd_inside_a_change_and_a_new_generation_follows(serving):
    agent = serving.agents[0]
    with agent.changing("update"):
        assert agent.generation % 2 == 1
        serving.wait("paused")
    record = wait_generation(serving, 4)
    assert agent.generation == 4
    assert record.content.kind == "live"
    serving.wait("serving")


def test_nested_changes_are_one_change(serving):
    agent = serving.agents[0]
    with agent.changing("outer"):
        with agent.changing("inner"):
            pass
        assert agent.generation % 2 == 1
    assert wait_generation(serving, 4).generation == agent.generation


def test_ranks_of_one_instance_name_new_content_alike(seed):
    seed.start(num_local_ranks=2)
    agents = [
        seed.add(BufferShard(RankIdentity(tp_rank=r, tp_size=2)), agent={"rank": r, "num_ranks": 2}) for r in (0, 1)
    ]
    for agent in agents:
        with agent.changing("update"):
            pass
    until(lambda: all((s := seed.node.shard_of_rank(r)) and s.generation == 4 for r in (0, 1)))
    contents = {seed.node.shard_of_rank(r).content for r in (0, 1)}
    assert len(contents) == 1
    assert contents.pop().kind == "live"


def test_series_of_updates_stays_paused_until_settled(serving):
    agent = serving.agents[0]
    for _ in range(3):
        with agent.changing("update_weights_from_tensor", settles=False):
            pass
        assert agent.generation % 2 == 1
    serving.wait("paused")
    agent.settle()
    assert wait_generation(serving, 4).content.kind == "live"
    agent.settle()  # nothing more to say
    assert agent.generation == 4


def test_failed_change_that_touched_nothing_keeps_the_content(serving):
    agent = serving.agents[0]
    with pytest.raises(AssertionError), agent.changing("release_memory_occupation"):
        raise AssertionError("server is busy")
    record = wait_generation(serving, 4)
    assert record.content == CHECKPOINT
    serving.wait("serving")


def test_failed_change_that_wrote_half_stays_closed_until_a_good_one(serving):
    agent, shard = serving.agents[0], serving.shards[0]
    with agent.changing("update_weights_from_disk") as change:
        shard.buffer.view[5] ^= 1
        change.failed = True
    assert agent.generation % 2 == 1
    serving.wait("paused")
    with agent.changing("update_weights_from_disk"):
        pass
    assert wait_generation(serving, 4).content.kind == "live"


def test_engine_is_destroyed_before_memory_is_unmapped_and_opened_again_after(serving):
    agent = serving.agents[0]
    before = published(serving).published.binding.endpoints[0].session_id
    with agent.changing("release", unmaps=True, alters=False, settles=False):
        assert serving.fabric.num_open == 0
    assert agent.generation % 2 == 1
    with agent.changing("resume", alters=False, maps=True):
        pass
    record = wait_generation(serving, 4)
    assert record.content == CHECKPOINT
    assert record.published.binding.endpoints[0].session_id != before


def test_memory_that_came_back_with_other_bytes_is_not_offered(serving):
    agent, shard = serving.agents[0], serving.shards[0]
    with agent.changing("release", unmaps=True, alters=False, settles=False):
        shard.move(seed=9)
    with agent.changing("resume", alters=False, maps=True):
        pass
    assert agent.generation % 2 == 1
    with agent.changing("update", settles=False):
        shard.buffer.fill(3)
    agent.settle()
    assert wait_generation(serving, 4).content.kind == "live"


def test_released_memory_is_read_by_nobody_until_it_is_mapped_again(serving):
    """Another part of the memory comes back first (its KV cache, say): digests of the weights would end the process."""
    agent = serving.agents[0]
    with agent.changing("release", unmaps=True, alters=False, settles=False):
        pass
    with agent.changing("resume of something else", alters=False):
        pass
    agent.settle()
    assert agent.generation % 2 == 1
    with agent.changing("resume", alters=False, maps=True):
        pass
    assert wait_generation(serving, 4).content == CHECKPOINT


def test_lost_weights_are_not_published_when_generation_continues(serving):
    agent, shard = serving.agents[0], serving.shards[0]
    with agent.changing("release", unmaps=True, alters=False, settles=False):
        shard.buffer.fill(8)
    with agent.changing("resume", alters=False, maps=True):
        pass
    agent.settle()
    assert agent.generation % 2 == 1
    with agent.changing("one call", settles=False, whole=False):
        shard.buffer.fill(3)
    agent.settle()
    assert wait_generation(serving, 4).content.kind == "live"


def test_one_failed_call_of_many_is_mended_by_a_whole_update_only(serving):
    agent = serving.agents[0]
    for failed in (False, True, False):
        with agent.changing("one call", settles=False, whole=False) as change:
            change.failed = failed
    agent.settle()
    assert agent.generation % 2 == 1
    with agent.changing("update_weights_from_disk"):
        pass
    assert wait_generation(serving, 4).content.kind == "live"


@pytest.mark.parametrize("has_retired", [False, True], ids=["serving", "no seed any more"])
def test_unmapping_is_refused_while_an_engine_can_not_be_destroyed(seed, has_retired):
    stuck = Stuck(seed.fabric)
    agent = seed.start().add(agent={"transports": lambda: [stuck]})
    if has_retired:
        agent.retire("its experts moved")
    for _ in range(2):  # an engine that was to be destroyed once is not forgotten
        with pytest.raises(NotQuiet), agent.changing("release", unmaps=True):
            raise AssertionError("this memory may still be read")
    stuck.is_stuck = False
    with agent.changing("release", unmaps=True):
        assert seed.fabric.num_open == 0


def test_moved_tensors_are_registered_again_and_the_old_place_is_not(serving):
    agent, shard = serving.agents[0], serving.shards[0]
    old = shard.buffer
    with agent.changing("update"):
        shard.move(seed=2)
    record = wait_generation(serving, 4)
    engine = serving.fabric.find(record.published.binding.endpoints[0].session_id)
    assert record.published.binding.addresses[0] == shard.buffer.address
    assert engine.holds(shard.buffer.address, shard.buffer.nbytes)
    assert not engine.holds(old.address, old.nbytes)


def test_change_of_layout_ends_the_seed_by_name(serving):
    with serving.agents[0].changing("lora merge"):
        serving.shards[0].names[0] = "base_layer.weight"
    serving.wait("stopped")
    assert "lora merge changed the layout" in serving.node.status_reply().ranks[0].state
    assert serving.fabric.num_open == 0


def test_retired_rank_is_no_seed_again_whatever_updates_follow(serving):
    agent, generation = serving.agents[0], serving.agents[0].generation
    agent.retire("experts move")
    assert agent.generation == generation + 1
    assert serving.fabric.num_open == 0
    with agent.changing("update_weights_from_disk"):
        pass
    assert agent.generation % 2 == 1
    serving.wait("stopped")
    assert "experts move" in serving.node.status_reply().ranks[0].state


def test_tensor_that_changed_unannounced_after_publication_is_named(seed):
    seed.start().add()
    until(lambda: published(seed))
    seed.shards[0].buffer.view[64] ^= 1
    seed.node.ready()
    seed.wait("stopped")
    assert "unannounced: layers.1.weight" in seed.node.status_reply().ranks[0].state


def test_forked_shard_passes_on_its_origins_digests_and_is_checked_against_them(seed):
    origin = BufferShard().resolve().digests()
    shard = BufferShard()
    shard.buffer.view[0] ^= 1  # its own pull was not verified, and went wrong
    seed.start().add(shard, origin_digests=origin, verified=False)
    until(lambda: published(seed))
    assert published(seed).published.digests == origin
    seed.node.ready()
    seed.wait("stopped")
    assert "layers.0.weight" in seed.node.status_reply().ranks[0].state


def test_change_before_publication_makes_the_content_live(seed):
    agent = seed.start().add(publish=False)
    with agent.changing("update"):
        pass
    agent.publish([seed_shard(seed.shards[0])])
    assert wait_generation(seed, 2).content.kind == "live"


def test_target_and_draft_share_one_engine_and_one_fence_and_memory_is_registered_once(seed):
    agent = seed.start().add(publish=False)
    target, draft = seed.shards[0], BufferShard(RankIdentity(role="draft-0"))
    draft.buffer = target.buffer  # the draft shares the target's embedding
    agent.loaded(draft.rank, report())
    assert agent.publish([seed_shard(target), seed_shard(draft)])
    until(lambda: len(seed.node.status_reply().ranks) == 2 and seed.node._core.table.is_complete(1))
    one, other = (seed.node._core.table.find(s.ref).published.binding for s in seed.node._core.table.shards())
    assert one.regions == other.regions
    assert one.fence_address == other.fence_address
    assert seed.fabric.num_open == 1


def test_dead_main_process_ends_serving(serving):
    serving.node._control.close()
    until(lambda: serving.fabric.num_open == 0)
    with serving.agents[0].changing("update"):
        pass
    assert serving.agents[0].generation % 2 == 1


def test_rank_without_a_main_process_serves_on_without_being_a_seed(caplog):
    environment = {"RFORK_CONTROL": "/nonexistent/control", "RFORK_INSTANCE_ID": "i-1"}
    fabric = MemoryFabric()
    agent = make_agent(environment, fabric)
    agent.loaded(RankIdentity(), report())
    assert agent.publish([seed_shard(BufferShard())]) is False
    assert "can't reach this node's main process" in caplog.text
    assert fabric.num_open == 0
    agent.close()


def test_digests_of_an_update_are_taken_when_somebody_asks(serving):
    agent = serving.agents[0]
    with agent.changing("update"):
        serving.shards[0].buffer.fill(7)
    record = wait_generation(serving, 4)
    assert record.digests is None
    serving.wait("serving")
    reply = serving.lease(weights="live").json()
    answer = serving.http.get(reply["digests_path"])
    assert answer.status_code == 200
    assert record.digests.raw == answer.content


def test_content_of_the_shard_is_what_was_given(seed):
    pinned = Content("checkpoint", "pinned")
    seed.start().add(content=pinned)
    until(lambda: published(seed))
    assert published(seed).content == pinned


def test_update_that_keeps_the_layout_does_not_encode_the_manifest_again(serving):
    before = published(serving).manifest
    with serving.agents[0].changing("update"):
        serving.shards[0].move(seed=5)
    assert wait_generation(serving, 4).manifest is before
