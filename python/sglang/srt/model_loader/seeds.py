"""Whom a model asks for its weights: the address typed, the planner, the list; a draft asks its target's seed."""

from __future__ import annotations

import os

from rfork.client.calls import bearer
from rfork.client.planned import Planned, planner_of
from rfork.client.resolve import Candidate
from rfork.client.sources import Addresses, InTurn, Known, SeedSource
from rfork.clock import SystemClock
from rfork.config import LISTENER_ENV
from rfork.identity import Content, ModelIdentity, RankIdentity
from sglang_rfork.srt.managers.rank import RankState
from sglang_rfork.srt.server_args import api_key_of


def seeds_for(state: RankState, who: RankIdentity, identity: ModelIdentity, content: Content) -> SeedSource:
    """The sources of one model, in order. Raises ConfigError on a planner's address that is none."""
    if who.role != "target" and state.request.client:
        return _seed_of_target(state)
    clock = SystemClock()
    typed = [state.request.seed_address] if state.request.seed_address else []
    own = (state.instance_id,)
    api_key = api_key_of(state.release.arguments(state.server_args))
    headers = bearer(api_key) if api_key else None
    planner = planner_of(state.settings) if who.role == "target" else None  # it knows instances by their targets
    if planner is None:
        return Addresses(typed, state.settings.seeds, state.settings, clock, own_instance_ids=own, headers=headers)
    planned = Planned(
        planner,
        lambda: Addresses([], state.settings.seeds, state.settings, clock, own_instance_ids=own),
        state.settings,
        clock,
        instance_id=state.instance_id,
        identity=identity,
        content=content,
        tell=state.agent.tell,
        elected=lambda: state.agent.seeking(identity, content, reads_disk=True),
        listener=os.environ.get(LISTENER_ENV, ""),
    )
    if not typed:
        return planned
    return InTurn([Addresses(typed, [], state.settings, clock, own_instance_ids=own, headers=headers), planned])


def _seed_of_target(state: RankState) -> Known:
    """A draft goes where its target went, so that both come from one instance at one generation."""
    report = state.shards[0].report
    if report.seed is None:
        return Known(None, "its target was read from a checkpoint")
    seed = report.seed
    return Known(
        Candidate(
            address=seed.address,
            instance_id=seed.instance_id,
            listener=seed.address,
            state="serving",
            generation=seed.generation,
        )
    )
