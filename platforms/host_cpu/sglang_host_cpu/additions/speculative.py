"""EAGLE: enough to load target and draft, and so to fork them. Drafting itself needs kernels that a CPU has not."""

from typing import Any

from sglang_host_cpu.additions.base import Addition


def skip(self: Any) -> None:
    """Set up nothing."""


def no_draft_attention(self: Any) -> None:
    """Leave the worker as it is where no backend could be made."""
    self.draft_attn_backend = None
    self.draft_extend_attn_backend = None
    self.draft_runner.draft_attn_backend = None


ADDITIONS = (
    # Moves KV slots of rejected drafts, in Triton.
    Addition("sglang.srt.mem_cache.memory_pool.MHATokenToKVPool._init_kv_copy_and_warmup", skip),
    # Draft attention; there is no torch-native one.
    Addition("sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_attention_backend", no_draft_attention),
)
