"""What SGLang's torch-native paths lack on a CPU, each a named hook on one function of SGLang's, one file per subject.

An addition applies only where its target exists, so one table serves every release; a target that is gone takes its
feature with it and nothing else. All but those marked `everywhere` go into scheduler processes only: that is where
models run, and resolving a target imports its module, which other processes should not pay for.
"""

import logging
import pkgutil
import sys

from sglang.srt.plugins.hook_registry import HookRegistry

from sglang_host_cpu.additions import (
    attention,
    collectives,
    disaggregation,
    memory_saver,
    moe,
    quantization,
    speculative,
    threads,
)
from sglang_host_cpu.additions.base import Addition

logger = logging.getLogger(__name__)

ADDITIONS: tuple[Addition, ...] = (
    *attention.ADDITIONS,
    *collectives.ADDITIONS,
    *disaggregation.ADDITIONS,
    *memory_saver.ADDITIONS,
    *moe.ADDITIONS,
    *quantization.ADDITIONS,
    *speculative.ADDITIONS,
    *threads.ADDITIONS,
)


def register() -> None:
    """Register what this process needs; SGLang applies it right after."""
    in_scheduler = _called_by("run_scheduler_process")
    for addition in ADDITIONS:
        if (in_scheduler or addition.everywhere) and _exists(addition.target):
            HookRegistry.register(addition.target, addition.hook, addition.kind)


def _called_by(function: str) -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name == function:
            return True
        frame = frame.f_back
    return False


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (AttributeError, ImportError):
        logger.debug("%s is not in this SGLang release; left out", target)
        return False
    return True
