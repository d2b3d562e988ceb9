"""The shape of an addition."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookType


@dataclass(frozen=True)
class Addition:
    """A hook of `kind` on SGLang's (or torch's) function or method `target`."""

    target: str
    hook: Callable[..., Any]
    kind: HookType = HookType.REPLACE
    everywhere: bool = False
    """Also in processes that run no model."""
