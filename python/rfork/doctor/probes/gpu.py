"""GPUs, and whether they reach each other's memory."""

from __future__ import annotations

import importlib.util
import itertools
import os
from pathlib import Path
from typing import Any

from rfork.config import Config
from rfork.doctor.finding import Finding, ok, warn

SUBJECT = "GPUs"


def has_gpu_device() -> bool:
    """Whether the kernel shows a device of a GPU driver. Costs nothing, proves nothing."""
    dev = Path("/dev")
    return any(dev.glob("nvidia[0-9]*")) or any((dev / name).exists() for name in ("kfd", "dxg", "davinci0"))


def probe(config: Config) -> list[Finding]:
    if importlib.util.find_spec("torch") is None:
        return [warn(SUBJECT, "torch is not installed here, so nobody can look", "it comes with SGLang")]
    import torch

    if not torch.cuda.is_available():
        if has_gpu_device():
            return [
                warn(
                    SUBJECT,
                    f"there is a device, but torch {torch.__version__} can't use it",
                    "check the driver (nvidia-smi), CUDA_VISIBLE_DEVICES, and that this torch is built for that GPU",
                )
            ]
        return [_none()]
    count = torch.cuda.device_count()
    names = ", ".join(sorted({torch.cuda.get_device_name(i) for i in range(count)}))
    found = [ok(SUBJECT, f"{count} × {names}, CUDA {torch.version.cuda}, torch {torch.__version__}")]
    if count > 1:
        found.append(_peers(torch, count))
    return [*found, *_allocator()]


def _none() -> Finding:
    if os.environ.get("SGLANG_PLATFORM") == "host_cpu":
        return ok(SUBJECT, "none; SGLang runs on the CPU (SGLANG_PLATFORM=host_cpu)")
    install = "" if importlib.util.find_spec("sglang_host_cpu") else "pip install sglang-host-cpu, then "
    return warn(SUBJECT, "none", f"SGLang runs without one, for trying things out: {install}SGLANG_PLATFORM=host_cpu")


def _peers(torch: Any, count: int) -> Finding:
    pairs = list(itertools.permutations(range(count), 2))
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if not apart:
        return ok("peer access", f"all {count} GPUs reach each other's memory")
    shown = ", ".join(f"{a}→{b}" for a, b in apart[:4])
    return warn(
        "peer access",
        f"{len(apart)} of {len(pairs)} pairs of GPUs can't reach each other's memory ({shown})",
        "forks between those go over the host; look at `nvidia-smi topo -m`, at virtualisation and at IOMMU settings",
    )


def _allocator() -> list[Finding]:
    for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        if "expandable_segments:true" in os.environ.get(variable, "").lower().replace(" ", ""):
            return [
                warn(
                    "allocator",
                    f"{variable} has expandable_segments, whose memory NVLink and RDMA transports can't register",
                    f"take expandable_segments out of {variable} for servers that fork or seed",
                )
            ]
    return []
