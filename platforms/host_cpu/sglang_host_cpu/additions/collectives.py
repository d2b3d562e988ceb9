"""Collectives between ranks, over gloo."""

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def without_nccl(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
    """Make a group that has no NCCL communicator. Older releases give one to every out-of-tree platform."""
    if "use_pynccl" in kwargs:
        kwargs["use_pynccl"] = False
    original(self, *args, **kwargs)


def all_gather(self: Any, output: Any, input: Any) -> None:
    """Gather right away. SGLang goes through an operator of its own that it registers for accelerators only."""
    self._all_gather_into_tensor(output, input)


def reduce_scatter(self: Any, output: Any, input: Any) -> None:
    """Reduce and scatter right away, for the same reason."""
    self._reduce_scatter_tensor(output, input)


GROUP = "sglang.srt.distributed.parallel_state.GroupCoordinator"

ADDITIONS = (
    Addition(f"{GROUP}.__init__", without_nccl, HookType.AROUND),
    Addition(f"{GROUP}.all_gather_into_tensor", all_gather),
    Addition(f"{GROUP}.reduce_scatter_tensor", reduce_scatter),
)
