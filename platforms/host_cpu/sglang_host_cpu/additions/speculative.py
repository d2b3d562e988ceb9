"""Drafts: enough to load target and draft, and so to fork them. Drafting itself needs kernels that a CPU has not."""

import sys
from types import ModuleType
from typing import Any

from sglang_host_cpu.additions.base import Addition

TREES = "sglang.kernels.ops.speculative.reconstruct_tree"


def skip(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


def no_draft_attention(self: Any) -> None:
    """Leave the worker as it is where no backend could be made."""
    self.draft_attn_backend = None
    self.draft_extend_attn_backend = None
    self.draft_runner.draft_attn_backend = None


def draft_backend(**kwargs: Any) -> str:
    """Return the one backend that there is, for drafts too; SGLang's list of those has only kernels."""
    return "torch_native"


def no_tree(*args: Any, **kwargs: Any) -> None:
    raise RuntimeError(
        "host_cpu loads a model for n-gram speculation and has no kernel to serve it; ask it for no tokens"
    )


# N-gram workers import this module, which can't be imported without SGLang's kernels.
sys.modules[TREES] = ModuleType(TREES)
sys.modules[TREES].reconstruct_indices_from_tree_mask_func = no_tree  # type: ignore[attr-defined]

ADDITIONS = (
    # Moves KV slots of rejected drafts, in Triton.
    Addition("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", skip),
    # Waited for when a draft takes over embedding and head.
    Addition("torch.cuda.synchronize", skip),
    Addition("sglang.srt.speculative.draft_worker_common.resolve_draft_worker_attention_backend", draft_backend),
    # Draft attention; there is no torch-native one.
    Addition("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backend", no_draft_attention),
)
