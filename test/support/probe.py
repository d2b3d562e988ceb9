"""What a rank holds, seen without R-Fork: a second, independent look at every model, for comparisons.

SGLang loads this as one more general plugin of a server under test. When a scheduler has its models, it writes for each
of them to `$PROBE_FOLDER/<role>.<coordinates>.json` every tensor (digest of its bytes, dtype, shape, stride, what it
shares memory with) and every plain value that hangs on a module, a Parameter or a quantization object. Nothing here is
shared with the product's inventory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

FOLDER_ENV = "PROBE_FOLDER"
ENTERED = ("sglang.srt.layers.quantization.", "sglang.srt.layers.moe.moe_runner.")
LOCAL = {
    *("device", "device_id", "gpu_id", "layer_communicator", "tp_group", "training"),
    "use_padded_loading",  # left behind on experts by the disk loader, for itself
}


def register() -> None:
    """Entry point `sglang.srt.plugins: probe`."""
    if FOLDER_ENV not in os.environ:
        return
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", after_models, HookType.AFTER)


def after_models(result: Any, scheduler: Any) -> None:
    runners = [("target", scheduler.tp_worker.model_runner)]
    if scheduler.draft_worker is not None:
        drafts = scheduler.draft_worker.weight_update_runners()
        runners += [(f"draft-{i}", runner) for i, (_, runner) in enumerate(drafts)]
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    where = f"tp{parallel.tp_rank}.pp{parallel.pp_rank}.dp{parallel.dp_rank or 0}"
    first_at: dict[int, str] = {}
    for role, runner in runners:
        path = Path(os.environ[FOLDER_ENV]) / f"{role}.{where}.json"
        path.with_suffix(".part").write_text(json.dumps(look_at(role, runner.model, first_at), indent=0))
        path.with_suffix(".part").rename(path)


def look_at(role: str, model: nn.Module, first_at: dict[int, str]) -> dict[str, Any]:
    """{"tensors": {name: facts}, "values": {name: value}}; equal on two ranks that hold the same.

    `first_at` is where an address was first met, in this model or one looked at before.
    """
    tensors: dict[str, Any] = {}
    values: dict[str, Any] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, value in walk(prefix, module, 0):
            if isinstance(value, torch.Tensor):
                shares = first_at.setdefault(value.data_ptr(), f"{role}:{name}") if value.numel() else ""
                tensors[name] = [digest(value), str(value.dtype), list(value.shape), list(value.stride()), shares]
            else:
                values[name] = value
    return {"tensors": tensors, "values": values}


def walk(prefix: str, holder: Any, depth: int) -> Iterator[tuple[str, Any]]:
    for key, value in held(holder):
        name = f"{prefix}.{key}"
        if key in LOCAL or isinstance(value, nn.Module):
            continue
        if isinstance(value, torch.Tensor):
            yield name, value
            yield from walk(name, value, depth + 1)
        elif isinstance(value, (bool, int, float, str)) or value is None:
            yield name, value
        elif depth < 4 and (isinstance(value, (dict, list, tuple)) or type(value).__module__.startswith(ENTERED)):
            yield from walk(name, value, depth + 1)


def held(holder: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(holder, dict):
        yield from ((str(k), v) for k, v in holder.items())
    elif isinstance(holder, (list, tuple)):
        yield from ((str(i), v) for i, v in enumerate(holder))
    elif isinstance(holder, nn.Module):
        own = {k: v for k, v in vars(holder).items() if not k.startswith("_") or isinstance(v, torch.Tensor)}
        yield from {**own, **holder._parameters, **holder._buffers}.items()
    else:
        yield from getattr(holder, "__dict__", {}).items()


def digest(tensor: torch.Tensor) -> str:
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(flat.numpy().tobytes()).hexdigest()[:16]
