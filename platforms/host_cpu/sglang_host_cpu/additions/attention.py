"""Data-parallel attention, whose ranks pad and exchange their batches."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def padded_sequence_length(self: Any) -> int:
    """Return the length that stands for "no sequence here". The torch-native backend inherits a method that raises."""
    return 1


def unpinned(original: Callable[..., Any], *args: Any, pin_memory: bool = False, **kwargs: Any) -> Any:
    """Make a tensor in plain memory. Exchanging batch sizes asks for pinned memory outright, and only CUDA pins."""
    return original(*args, **kwargs)


def copy_rows(dst: Any, src: Any, dim: int, offset: Any, num_rows: Any, offset_is_in_src: bool) -> None:
    """Copy rows between a rank's batch and everyone's, with `offset` into the latter. SGLang has this in Triton."""
    start, size = int(offset), int(num_rows)
    if offset_is_in_src:
        dst[:size].copy_(src[start : start + size])
    else:
        dst[start : start + size].copy_(src[:size])


def rotated(
    original: Callable[..., Any], self: Any, positions: Any, query: Any, key: Any, *args: Any, **kwargs: Any
) -> Any:
    """Rotate, unless there is nothing: a rank without a batch would ask how many heads no tokens have."""
    return original(self, positions, query, key, *args, **kwargs) if positions.numel() else (query, key)


ADDITIONS = (
    Addition(
        "sglang.srt.layers.attention.base_attn_backend.AttentionBackend.get_cuda_graph_seq_len_fill_value",
        padded_sequence_length,
    ),
    Addition("sglang.kernels.ops.memory.memcpy_triton.memcpy_triton", copy_rows),
    Addition("torch.tensor", unpinned, HookType.AROUND),
    Addition("sglang.srt.layers.rotary_embedding.base.RotaryEmbedding.forward_native", rotated, HookType.AROUND),
)
