"""Several ranks on one host: let them share its cores instead of refusing."""

import os
from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_host_cpu.additions.base import Addition


def share_cores(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Name all cores for each rank, unless the user bound ranks to cores.

    SGLang wants a NUMA node per rank, for its AMX kernels' sake, and refuses to start TP=2 on a laptop. Torch-native
    kernels bind nothing: the answer is logged and no more.
    """
    if os.environ.get("SGLANG_CPU_OMP_THREADS_BIND"):
        return original(*args, **kwargs)
    return ",".join(str(core) for core in sorted(os.sched_getaffinity(0)))


ADDITIONS = (Addition("sglang.srt.utils.numa_utils.init_threads_binding", share_cores, HookType.AROUND),)
