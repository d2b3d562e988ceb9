"""Mixture of experts under expert parallelism."""

from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def local_experts_forward(original: Any, layer: Any, x: torch.Tensor, topk_output: Any, config: Any) -> torch.Tensor:
    """Add up what this rank's experts contribute; a token's experts on other ranks have the id -1 here.

    SGLang's native form counts tokens by id and so fails on -1. It stays in charge wherever there is none.
    """
    weights, ids, _ = topk_output
    if getattr(layer, "moe_ep_size", 1) == 1:
        return original(layer, x, topk_output, config)
    if config.activation != "silu":
        raise ValueError(
            f"expert parallelism on host_cpu knows silu only, got {config.activation!r}; start the model with --ep 1"
        )
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert, (up, down) in enumerate(zip(layer.w13_weight, layer.w2_weight, strict=True)):
        tokens, choices = (ids == expert).nonzero(as_tuple=True)
        if tokens.numel():
            gate, value = F.linear(x[tokens], up).chunk(2, dim=-1)
            result = F.linear(F.silu(gate) * value, down).float()
            out.index_add_(0, tokens, result * weights[tokens, choices, None].float())
    return out.to(x.dtype)


ADDITIONS = (
    Addition("sglang.srt.layers.moe.fused_moe_native.moe_forward_native", local_experts_forward, HookType.AROUND),
)
