"""Prefill and decode on different servers: the KV cache goes over Mooncake's TCP, from plain memory to plain memory."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def indices_at_hand(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Let the sender take page numbers at once: its other way copies them from a device, on a stream of CUDA's."""
    original(self, *args, **kwargs)
    self.supports_host_tensor_indices = False


def leave_unregistered(*args: Any, **kwargs: Any) -> None:
    """Register no host memory with CUDA: the pool of requests that wait is read by the CPU alone."""


ADDITIONS = (
    Addition("sglang.srt.disaggregation.mooncake.conn.MooncakeKVSender.__init__", indices_at_hand, HookType.AROUND),
    Addition("sglang.srt.mem_cache.pool_host.common._cuda_host_register", leave_unregistered),
)
