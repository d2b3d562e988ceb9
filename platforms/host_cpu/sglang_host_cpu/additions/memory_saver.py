"""Releasing and resuming memory: the calls and their order, without the GPU library that unmaps it."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def create_saver(original: Callable[..., Any], enable: bool) -> Any:
    """Return a saver that says it is on and does nothing.

    The real one preloads a library that needs libcuda, and every child process would fail to start.
    """
    saver = original(False)
    if not enable:
        return saver
    return type("HostMemorySaver", (type(saver),), {"enabled": True})()


def device_module(original: Callable[..., Any], device: Any = None) -> Any:
    """Return torch.cpu by default: a CUDA build of torch without a GPU would return torch.cuda, which then fails."""
    return original("cpu" if device is None else device)


ADDITIONS = (
    Addition(
        "sglang.srt.utils.torch_memory_saver_adapter.TorchMemorySaverAdapter.create",
        create_saver,
        HookType.AROUND,
        everywhere=True,
    ),
    Addition("torch.get_device_module", device_module, HookType.AROUND),
)
