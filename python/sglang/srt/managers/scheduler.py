"""The scheduler process: start R-Fork before the models load, publish when they are final, fence whatever changes
them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from rfork.seed.offer import SeedShard, StockTable
from sglang_rfork.srt.managers import nodes, rank
from sglang_rfork.srt.managers.rank import LoadedShard, RankState
from sglang_rfork.srt.plugin import announce


def around_init_model_worker(original: Callable[..., Any], self: Any) -> Any:
    """AROUND Scheduler.init_model_worker: state before, publication after every post-load, draft and capture step."""
    state = rank.start(self)
    if state is not None:
        announce("scheduler", state.request.backend)
    result = original(self)
    if state is not None:
        runners = state.release.runners(self)
        state.agent.publish(
            [seed_shard(state, shard, runner) for shard, (_, runner) in zip(state.shards, runners, strict=False)]
        )
        nodes.join(state)
    return result


def around_run_event_loop(original: Callable[..., Any], self: Any) -> Any:
    """AROUND Scheduler.run_event_loop: engines are destroyed when the loop ends, however it ends."""
    try:
        return original(self)
    finally:
        state = rank.current()
        if state is not None:
            state.agent.close()


def seed_shard(state: RankState, shard: LoadedShard, runner: Any) -> SeedShard:
    """How the agent sees one model; its callables run again after every change."""
    return SeedShard(
        resolve=shard.resolve,
        identity=shard.identity,
        content=shard.content,
        verified=shard.report.origin_verified,
        origin_digests=shard.origin_digests,
        weight_version=lambda: weight_version(state),
        stock_table=functools.partial(stock_table, state, shard, runner),
    )


def weight_version(state: RankState) -> str | None:
    """SGLang's own label of the weights, carried along and never interpreted: as the scheduler keeps it, else that of
    the last update, else that of the command line.
    """
    if state.release.find("update.version"):
        return str(state.release.get("update.version")().weight_version)
    return state.weight_version or getattr(state.release.arguments(state.server_args), "weight_version", None)


def stock_table(state: RankState, shard: LoadedShard, runner: Any) -> StockTable | str:
    """SGLang's own table {name: (address, number of elements, element size)}, or why a stock client would misread
    it.
    """
    who = shard.rank
    if who.role != "target":
        return "a draft model: SGLang's own client would take it for the target"
    if who.pp_size > 1:
        return f"pipeline parallel size {who.pp_size}: SGLang's own client asks by TP rank alone"
    if who.attn_dp_size > 1 or state.placement.num_replicas > 1:
        return "data parallel ranks: SGLang's own client asks by TP rank alone"
    if not shard.layout_is_raw:
        return "weights that were post-processed after loading: SGLang's own client would not build this layout"
    return {n: (p.data_ptr(), p.numel(), p.element_size()) for n, p in runner.model.named_parameters() if p.numel()}


def fenced(why: str, **how: bool) -> Callable[..., Any]:
    """An AROUND hook for a call that changes weights: readers are shut out before it and let in again after it.

    `how` goes to RankAgent.changing. A result of False, or (False, …), is SGLang's way to report a failure.
    """

    def hook(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        state = rank.current()
        if state is None:
            return original(*args, **kwargs)
        with state.agent.changing(why, **how) as change:
            result = original(*args, **kwargs)
            success = result[0] if isinstance(result, tuple) and result else getattr(result, "success", True)
            change.failed = success is False
            return result

    return hook


def updating(why: str, **how: bool) -> Callable[..., Any]:
    """As `fenced`, for a request that may bring a new label: all models of this rank change as one."""
    fence = fenced(why, **how)

    def hook(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
        def run(*args: Any) -> Any:
            result = original(*args)
            state = rank.current()
            if state is not None and getattr(result, "success", True):
                state.weight_version = getattr(recv_req, "weight_version", None) or state.weight_version
            return result

        return fence(run, self, recv_req)

    return hook


def around_release(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND release_memory_occupation: engines are destroyed before the memory of weights goes."""
    state = rank.current()
    if state is None or not _moves_weights(recv_req):
        return original(self, recv_req)
    with state.agent.changing("release_memory_occupation", alters=False, settles=False, unmaps=True):
        return original(self, recv_req)


def around_resume(original: Callable[..., Any], self: Any, recv_req: Any) -> Any:
    """AROUND resume_memory_occupation. SGLang restores buffers only, unless it keeps a copy of the weights: digests
    tell.
    """
    state = rank.current()
    if state is None or not _moves_weights(recv_req):
        return original(self, recv_req)
    with state.agent.changing("resume_memory_occupation", alters=False, maps=True):
        return original(self, recv_req)


def _moves_weights(recv_req: Any) -> bool:
    """No tags mean all of them."""
    return not recv_req.tags or "weights" in recv_req.tags


def after_continue(result: Any, self: Any, recv_req: Any) -> Any:
    """AFTER continue_generation, in releases where an update is many calls: what they made is whole now."""
    state = rank.current()
    if state is not None:
        state.agent.settle()
    return result


def retiring(why: str) -> Callable[..., None]:
    """A BEFORE hook for a call after which the same bytes are other experts: whoever forks has the map of a new start,
    so this rank is no seed any more, whatever updates follow.
    """

    def hook(*args: Any, **kwargs: Any) -> None:
        state = rank.current()
        if state is not None:
            state.agent.retire(why)

    return hook
