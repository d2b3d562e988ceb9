"""What the inventory has to know of SGLang: which objects hold weights, and what is not carried."""

from __future__ import annotations

from typing import Any

from torch import nn

PURE_MODULES = frozenset({"RotaryEmbedding"})
"""Base classes whose tensors are pure functions of the config: rebuilt here, resized later, shared by the whole
process.
"""

HOLDERS = ("sglang.srt.layers.quantization.", "sglang.srt.layers.moe.moe_runner.", "sglang.srt.layers.moe.fused_moe")
"""Packages whose objects hang on layers and hold tensors and scales that the kernels read."""

LOCAL = ("sglang.srt.distributed.", "sglang.srt.layers.moe.token_dispatcher", "sglang.srt.layers.attention.")
"""Packages whose objects belong to the process: communicators with their buffers, dispatchers, attention workspaces."""

RUNTIME_NAMES = frozenset({
    "layer_id", "gpu_id", "device", "device_id", "local_rank", "prefix",
    "use_padded_loading",  # left behind on expert layers by the weight loader, for the weight loader
})  # fmt: skip
"""Attributes that are neither carried nor compared. Shard coordinates are compared through the rank identity."""


class SGLangRules:
    """InventoryRules for models built by SGLang."""

    def is_pure(self, module: nn.Module) -> bool:
        return any(base.__name__ in PURE_MODULES for base in type(module).__mro__)

    def descend(self, value: object) -> bool:
        return type(value).__module__.startswith(HOLDERS)

    def is_runtime(self, owner: object, name: str) -> bool:
        if name in RUNTIME_NAMES:
            return True
        value = getattr(owner, "__dict__", {}).get(name)
        return type(value).__module__.startswith(LOCAL) and not isinstance(value, nn.Module)


def without_lora(value: Any) -> Any:
    """The layer that SGLang has put an adapter's wrapper around, itself untouched; anything else as it is."""
    if any(base.__name__ == "BaseLayerWithLoRA" for base in type(value).__mro__):
        return value._modules["base_layer"]
    return value
