"""Model identity and rank identity of a model that this process is about to load, from SGLang's resolved settings."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from rfork.identity import ModelIdentity, RankIdentity, Scalar, digest_of_mapping
from sglang_rfork.srt.compat import LAYOUT_FIELDS, PARALLEL_DIMENSIONS, Release, layout_environment
from sglang_rfork.srt.model_loader.content import checkpoint_folder

ENGINE = "sglang"
LAYOUT_CODE_VERSION = 1
"""Raised whenever this package changes how it builds, inventories or numbers a model."""

_NOT_IDENTITY = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "architectures")
"""Entries of a Hugging Face config that are paths or versions, or stand in the identity by themselves."""

_NOTES = "original_"
"""Prefix of what SGLang notes in the config of a running rank, before it pads heads for its parallel size."""

_KERNEL_PACKAGES = ("sgl-kernel", "flashinfer-python", "deep-gemm", "triton", "aiter")
"""Packages whose presence and version choose kernels, and with them layouts."""

_FILES = ("init_expert_location", "quantization_param_path")
"""Server arguments that may name a file: its content counts, not its path."""

_BESIDE_CONFIG = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
"""Files of a checkpoint, beside its config, that say how its weights are to be read."""

_MAX_VALUE_NCHARS = 120


def model_identity(
    release: Release, server_args: Any, model_config: Any, role: str, sizes: Mapping[str, int]
) -> ModelIdentity:
    """All that decides the layout and meaning of this model, without building it. `sizes` are those of the deployment.

    What is not set is left out. Raises OSError on a file that an argument names and that can't be read.
    """
    view = release.arguments(server_args)
    fields: dict[str, Scalar] = {
        "engine.version": release.version,
        "engine.layout_code": LAYOUT_CODE_VERSION,
        "engine.torch": str(torch.__version__),
        "engine.platform": os.environ.get("SGLANG_PLATFORM"),
        "device.type": torch.device(str(view.device or "cpu")).type,
        "device.capability": device_capability(),
        "model.role": "draft" if role != "target" else role,
        "model.architecture": ",".join(model_config.hf_config.architectures or []),
        "model.dtype": str(model_config.dtype),
        "model.quantization": model_config.quantization,
        "model.files": digest_of_files(model_config),
    }
    fields |= {f"package.{name}": package_version(name) for name in _KERNEL_PACKAGES}
    fields |= {f"config.{name}": value for name, value in flat(config_mapping(model_config.hf_config))}
    fields |= {f"parallel.{dimension}_size": sizes[dimension] for dimension in PARALLEL_DIMENSIONS}
    fields |= {f"args.{name}": argument_value(name, getattr(view, name, None)) for name in (*LAYOUT_FIELDS, *_FILES)}
    fields |= {f"env.{name}": value for name, value in layout_environment(os.environ).items()}
    return ModelIdentity(ENGINE, {name: value for name, value in fields.items() if value is not None})


def parallel_sizes(release: Release) -> dict[str, int]:
    """Sizes of this process's parallel groups; to be asked outside of a draft's narrowed context."""
    parallel = release.get("rank.parallel")()
    return {d: int(getattr(parallel, f"{d}_size", 1) or 1) for d in PARALLEL_DIMENSIONS}


def rank_identity(release: Release) -> RankIdentity:
    """Coordinates of this process, as the role `target`; to be asked outside of a draft's narrowed context."""
    parallel = release.get("rank.parallel")()

    def axis(name: str) -> tuple[int, int]:
        size = int(getattr(parallel, f"{name}_size", 1) or 1)
        return (int(getattr(parallel, f"{name}_rank", 0) or 0), size) if size > 1 else (0, 1)

    tp, pp, ep, moe_tp, attn_dp = (axis(n) for n in ("tp", "pp", "moe_ep", "moe_tp", "attn_dp"))
    return RankIdentity(
        tp_rank=tp[0], tp_size=tp[1], pp_rank=pp[0], pp_size=pp[1], ep_rank=ep[0], ep_size=ep[1],
        moe_tp_rank=moe_tp[0], moe_tp_size=moe_tp[1], attn_dp_rank=attn_dp[0], attn_dp_size=attn_dp[1],
    )  # fmt: skip


def config_mapping(hf_config: Any) -> Mapping[str, Any]:
    """A Hugging Face config without what differs between equal models."""
    found = hf_config.to_dict()
    return {k: v for k, v in found.items() if k not in _NOT_IDENTITY and not k.startswith(_NOTES)}


def flat(mapping: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Scalar]]:
    """Nested settings as (dotted name, scalar), so that a difference can be named; lists are scalars as their text."""
    for key, value in mapping.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", scalar(value)


def argument_value(name: str, value: Any) -> Scalar:
    """A server argument as a scalar; a file counts by its content, so that two mount paths agree."""
    if name in _FILES and isinstance(value, str) and Path(value).is_file():
        return "sha256:" + hashlib.sha256(Path(value).read_bytes()).hexdigest()
    return scalar(value)


def scalar(value: Any) -> Scalar:
    """A setting as it stands in an identity: itself, its JSON, or the digest of that where it is long."""
    if value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    text = value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)
    return text if len(text) <= _MAX_VALUE_NCHARS else "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def digest_of_files(model_config: Any) -> str | None:
    """Digest of the files beside a config that say how weights are read, and of the code that a model brings along."""
    folder = checkpoint_folder(model_config.model_path, model_config.revision)
    if folder is None:
        return None
    names = list(_BESIDE_CONFIG)
    if getattr(model_config, "trust_remote_code", False):
        names += sorted(path.name for path in folder.glob("*.py"))
    found = {n: hashlib.sha256((folder / n).read_bytes()).hexdigest() for n in names if (folder / n).is_file()}
    return digest_of_mapping(found) if found else None


@functools.cache
def package_version(name: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def device_capability() -> str | None:
    """Compute capability of this process's device, such as 9.0; None on a CPU."""
    if not torch.cuda.is_available():
        return None
    return ".".join(map(str, torch.cuda.get_device_capability()))
