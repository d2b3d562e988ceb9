"""The one moment where a model has just left its loader: on seeds and clients, for the target and for every draft."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Callable
from typing import Any

import msgspec
import torch

from rfork.client.pause import freeze_what_exists
from rfork.errors import RForkError, UnsupportedModel
from rfork.identity import Content, ModelIdentity, RankIdentity
from rfork.inventory import Inventory, ResolvedShard
from rfork.wire.seed import WeightsReport
from sglang_rfork.srt.managers import rank
from sglang_rfork.srt.managers.rank import LoadedShard, RankState
from sglang_rfork.srt.model_loader.content import disk_format, expected_content, format_of
from sglang_rfork.srt.model_loader.identity import model_identity
from sglang_rfork.srt.model_loader.inventory_rules import SGLangRules, without_lora
from sglang_rfork.srt.model_loader.remote_instance_loader import RemoteInstanceModelLoader

log = logging.getLogger("rfork")


def around_load_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND load_model_utils.load_model_with_memory_saver: fork where asked, note the structure, report the source."""
    state = rank.current()
    if state is None:
        return original(*args, **kwargs)
    freeze_what_exists()
    model_config, load_config, is_draft = kwargs["model_config"], kwargs["load_config"], kwargs["is_draft_worker"]
    role = state.next_role(is_draft)
    who = msgspec.structs.replace(state.place, role=role)
    identity = model_identity(state.release, state.server_args, model_config, role, state.sizes)
    client = state.request.draft_client if is_draft else state.request.client
    asked = _content_on_disk(
        state, model_config, disk_format(state.settings, load_config) if client else format_of(load_config)
    )
    if role == "target":
        _tell_planner(state, identity, asked)
    if client:
        loader = RemoteInstanceModelLoader(state, who, identity, load_config)
        loaded = _with_loader(loader, original, args, kwargs)
        report, content, digests, there = loader.report, loader.content, loader.origin_digests, loader.there
    else:
        started_s = time.monotonic()
        loaded = original(*args, **kwargs)
        report = WeightsReport(source="checkpoint", seconds=time.monotonic() - started_s)
        content = digests = there = None
    resolve = _note(state, loaded.model, who)
    content = content or content_loaded(asked, _content_on_disk(state, model_config, format_of(load_config)))
    raw = _layout_is_raw(loaded.model)
    state.loaded(LoadedShard(who, identity, content, resolve, report, raw, digests, there, weakref.ref(loaded.model)))
    return loaded


def _tell_planner(state: RankState, identity: ModelIdentity, content: Content | None) -> None:
    """Say what this instance will hold before it loads, so that others may wait for it instead of reading the disk."""
    if state.settings.planner_url is not None and content is not None:
        state.agent.seeking(identity, content)


def _note(state: RankState, model: torch.nn.Module, who: RankIdentity) -> Callable[[], ResolvedShard]:
    """How to resolve this model later. One that can't be carried serves on; asking for it says why, by name."""
    try:
        rules = SGLangRules()
        return Inventory.note(model, rank=who, device=state.device, rules=rules, unwrap=without_lora).resolve
    except UnsupportedModel as error:
        refusal = str(error)

    def refuse() -> ResolvedShard:
        raise UnsupportedModel(refusal)

    return refuse


def _with_loader(loader: RemoteInstanceModelLoader, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Run SGLang's own load with our loader in place of the one that it would choose, here and nowhere else."""
    from sglang.srt.model_executor.model_runner_components import load_model_utils

    stock = load_model_utils.get_model_loader

    def choose(load_config: Any, model_config: Any = None) -> RemoteInstanceModelLoader:
        loader.fallback = lambda: stock(load_config=load_config, model_config=model_config)
        return loader

    load_model_utils.get_model_loader = choose
    try:
        return original(*args, **kwargs)
    finally:
        load_model_utils.get_model_loader = stock


def _content_on_disk(state: RankState, model_config: Any, load_format: str) -> Content | None:
    """What lies there now for this load format to read; None where no file can vouch for it."""
    try:
        return expected_content(state.settings, model_config.model_path, model_config.revision, load_format)
    except RForkError:
        return None


def content_loaded(before: Content | None, after: Content | None) -> Content:
    """What was loaded between two looks at the disk. Bytes that no file vouches for are this instance's alone."""
    if after is None:
        return Content.live()
    if before != after:
        log.warning(
            "rfork: the weight files changed while they were loaded (%s before, %s after): nobody can tell which bytes "
            "these are, so no other instance takes them for the checkpoint's",
            *(before, after),
        )
        return Content.live()
    return after


def _layout_is_raw(model: torch.nn.Module) -> bool:
    """Whether parameters are as the constructor made them, so that SGLang's own client builds the same."""
    methods = {type(m.quant_method).__name__ for m in model.modules() if getattr(m, "quant_method", None) is not None}
    return all(name.startswith("Unquantized") for name in methods)
