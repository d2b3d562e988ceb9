"""Model identity and rank identity of a model that this process is about to load, from SGLang's resolved settings."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rfork.identity import ModelIdentity, RankIdentity, Scalar, digest_of_mapping
from sglang_rfork.srt.compat import LAYOUT_FIELDS, PARALLEL_DIMENSIONS, Release, layout_environment

ENGINE = "sglang"
LAYOUT_CODE_VERSION = 1
"""Raised whenever this package changes how it builds, inventories or numbers a model."""

_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Entries of a Hugging Face config that are paths or versions, or stand in the identity by themselves."""


def model_identity(release: Release, server_args: Any, model_config: Any, role: str) -> ModelIdentity:
    """All that decides the layout and meaning of this model, without building it. Raises OSError on an unreadable
    expert map.
    """
    fields: dict[str, Scalar] = {
        "engine.version": release.version,
        "engine.layout_code": LAYOUT_CODE_VERSION,
        "engine.torch": str(torch.__version__),
        "engine.plugins": os.environ.get("SGLANG_PLATFORM", ""),
        "device.type": torch.device(str(release.arguments(server_args).device or "cpu")).type,
        "device.capability": device_capability(),
        "model.role": "draft" if role != "target" else role,
        "model.architecture": ",".join(model_config.hf_config.architectures or []),
        "model.config": digest_of_mapping(config_mapping(model_config.hf_config)),
        "model.dtype": str(model_config.dtype),
        "model.quantization": model_config.quantization,
        "model.is_draft": bool(getattr(model_config, "is_draft_model", False)),
    }
    parallel = release.get("rank.parallel")()
    for dimension in PARALLEL_DIMENSIONS:
        fields[f"parallel.{dimension}_size"] = int(getattr(parallel, f"{dimension}_size", 1) or 1)
    view = release.arguments(server_args)
    for name in LAYOUT_FIELDS:
        if hasattr(view, name):
            fields[f"args.{name}"] = argument_value(name, getattr(view, name))
    fields |= {f"env.{name}": value for name, value in layout_environment(os.environ).items()}
    return ModelIdentity(ENGINE, fields)


def rank_identity(release: Release, role: str) -> RankIdentity:
    """Coordinates of the shard that this process holds for `role`, those of the deployment for drafts too."""
    parallel = release.get("rank.parallel")()

    def axis(name: str) -> tuple[int, int]:
        size = int(getattr(parallel, f"{name}_size", 1) or 1)
        return (int(getattr(parallel, f"{name}_rank", 0) or 0), size) if size > 1 else (0, 1)

    tp, pp, ep, moe_tp, attn_dp = (axis(n) for n in ("tp", "pp", "moe_ep", "moe_tp", "attn_dp"))
    return RankIdentity(
        role=role, tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1], ep_rank=ep[0], ep_size=ep[1],
        moe_tp_rank=moe_tp[0], moe_tp_size=moe_tp[1], attn_dp_rank=attn_dp[0], attn_dp_size=attn_dp[1],
    )  # fmt: skip


def config_mapping(hf_config: Any) -> Mapping[str, Any]:
    """A Hugging Face config without what differs between equal models."""
    return {k: v for k, v in hf_config.to_dict().items() if k not in _NOT_IDENTITY}


def argument_value(name: str, value: Any) -> Scalar:
    """A server argument as a scalar; an expert map in a file counts by its content, so two mount paths agree."""
    if name == "init_expert_location" and isinstance(value, str) and Path(value).is_file():
        return "sha256:" + hashlib.sha256(Path(value).read_bytes()).hexdigest()
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    return digest_of_mapping({"value": value})


def device_capability() -> str:
    """Compute capability of this process's device, such as 9.0; empty on a CPU."""
    if not torch.cuda.is_available():
        return ""
    return ".".join(map(str, torch.cuda.get_device_capability()))
