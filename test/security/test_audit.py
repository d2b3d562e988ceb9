"""`rfork audit`: what serves now is held against what was published, and what differs serves nobody any more."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import typer
from support.host_shard import HostShard
from support.seed_node import Seed
from typer.testing import CliRunner

from rfork.cli import audit
from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.pull import pull
from rfork.clock import SystemClock
from rfork.fence import check_fence
from rfork.transports.memory import MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import AuditReply

from . import KEY
from .test_seed_door import request_for, signer, url_of


def run(seed: Seed, *arguments: str, key: str | None = KEY) -> Any:
    app = typer.Typer()
    app.command()(audit.command)
    return CliRunner().invoke(app, [url_of(seed), *arguments], env={"RFORK_KEY": key or ""})


def test_weights_that_nobody_touched_are_equal(seed: Seed) -> None:
    shown = run(seed)
    assert shown.exit_code == 0
    assert "1 of 1 shards are equal" in shown.output
    (shard,) = json.loads(run(seed, "--json").output)[0]["shards"]
    assert (shard["verdict"], shard["nbytes"], shard["num_differing"]) == ("equal", sum(seed.shards[0].sizes), 0)
    assert seed.node.state.value == "serving"


def test_one_flipped_byte_is_found_by_name_and_the_seed_serves_nobody_any_more(seed: Seed) -> None:
    seed.shards[0].buffer.view[64 + 17] ^= 1
    shown = run(seed)
    assert shown.exit_code == 1
    assert "layers.1.weight" in shown.output
    assert "0 of 1 shards are equal" in shown.output
    assert seed.node.state.value == "stopped"
    refusal = seed.node.closed()
    assert refusal is not None
    assert "an audit found other bytes than it published: layers.1.weight" in refusal.message


def test_a_fork_was_read_right_from_a_seed_that_stands_an_audit(seed: Seed) -> None:
    """The same bytes over the transport, before and after."""
    assert run(seed).exit_code == 0
    shard = HostShard(seed.shards[0].resolve().manifest)
    with take_lease(url_of(seed), request_for(seed), timeout_s=5, signer=signer()) as lease:
        fabrics = GivenFabrics([MemoryTransport(seed.fabric)])
        pull(shard, lease, fabrics, PullSettings(), check_fence=check_fence, clock=SystemClock())
    assert shard.buffer.view == seed.shards[0].buffer.view
    assert run(seed).exit_code == 0


def test_updated_weights_are_audited_against_their_own_table(seed: Seed) -> None:
    with seed.agents[0].changing("an update"):
        seed.shards[0].buffer.fill(9)
    seed.wait("serving")
    assert run(seed).exit_code == 0
    seed.shards[0].buffer.view[0] ^= 1
    assert run(seed).exit_code == 1


def test_weights_that_change_meanwhile_are_not_checked_and_not_condemned(seed: Seed) -> None:
    with seed.agents[0].changing("an update"):
        found = seed.node.auditor.run()
        assert isinstance(found, AuditReply)
        assert [s.verdict for s in found.shards] == ["not_checked"]
        assert run(seed).exit_code == 1
    seed.wait("serving")
    assert run(seed).exit_code == 0


def test_one_audit_runs_at_a_time(seed: Seed) -> None:
    with seed.node.auditor._running:
        shown = run(seed)
    assert shown.exit_code == 1
    assert "an audit is under way" in shown.output


@pytest.mark.parametrize("key", [None, "another key, of another fleet"])
def test_an_audit_of_a_fleet_with_a_key_needs_the_key(seed: Seed, key: str | None) -> None:
    shown = run(seed, key=key)
    assert shown.exit_code == 1
    assert "key" in shown.output
    assert KEY not in shown.output


def test_an_audit_of_what_has_published_nothing_says_so(make_seed: Callable[..., Seed]) -> None:
    seed = make_seed(key=None)
    seed.agents[0].close()
    seed.wait("stopped")
    shown = run(seed, key=None)
    assert shown.exit_code == 1
    assert len(shown.output.splitlines()) == 1
