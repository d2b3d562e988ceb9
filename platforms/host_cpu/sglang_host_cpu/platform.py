"""The platform class: what SGLang's core asks about the device, answered for a host without accelerators."""

from typing import Any

import psutil
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import SRTPlatform

ATTENTION_BACKEND = "torch_native"


class HostCpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A CPU through plain PyTorch.

    Out-of-tree on purpose: SGLang's own CPU platform needs the AMX or ARM kernels of a special build, and an
    out-of-tree platform is sent to the torch-native paths instead. Its capabilities are the base class's: none.
    """

    _enum = PlatformEnum.OOT
    device_name = "cpu"
    device_type = "cpu"

    def get_device(self, device_id: int = 0) -> str:
        # The base class of this release promises a str and its CPU mixin returns torch.device, which breaks the parser.
        return "cpu"

    def get_available_memory(self, device_id: int = 0) -> tuple[int, int]:
        memory = psutil.virtual_memory()
        return memory.available, memory.total

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Choose what runs here, so that nobody has to type it; what was typed stays."""
        if server_args.attention_backend is None:
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.sampling_backend is None:
            server_args.sampling_backend = "pytorch"

    # Speculative decoding: the draft model loads and forks like any other (see additions/speculative.py).

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return True

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND


if hasattr(SRTPlatform, "get_mha_kv_pool_cls"):

    class HostCpuPlatform(HostCpuPlatform):  # type: ignore[no-redef]
        """The same for releases that ask an out-of-tree platform for its pools instead of falling back to their own.

        Later releases would log a deprecation for each of these methods: they exist only where they are asked for.
        """

        def get_mha_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

            return MHATokenToKVPool

        def get_mla_kv_pool_cls(self) -> type:
            from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

            class WithoutIndexer(MLATokenToKVPool):
                """The pool of models without a sparse-attention indexer, told of the indexer that they have not."""

                def __init__(self, *args: Any, index_head_dim: int | None = None, **kwargs: Any) -> None:
                    if index_head_dim is not None:
                        raise ValueError("host_cpu has no pool for sparse attention; take a model without an indexer")
                    super().__init__(*args, **kwargs)

            return WithoutIndexer

        def get_paged_allocator_cls(self) -> type:
            from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator

            class PagesOfOneToken(TokenToKVPoolAllocator):
                """The allocator that needs no kernel, taking what is given to the one that does."""

                def __init__(self, size: int, *, page_size: int, **kwargs: Any) -> None:
                    if page_size != 1:
                        raise ValueError(f"host_cpu has pages of one token, got {page_size}; start with --page-size 1")
                    super().__init__(size, **kwargs)

            return PagesOfOneToken
