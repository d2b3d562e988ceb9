"""What kind of thing a value is, and the questions that only the engine's side can answer."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any, Protocol

import numpy as np
import torch
import xxhash
from torch import nn

from rfork.identity import Scalar, canonical_digest

_MAX_TEXT = 256


class InventoryRules(Protocol):
    """What depends on the engine. Answers must not depend on the process: both sides of a fork must give the same."""

    def is_pure(self, module: nn.Module) -> bool:
        """A pure function of the configuration (a rotary cache): left out with all below it, and not in the
        manifest.
        """

    def descend(self, value: object) -> bool:
        """Look for tensors and state inside this object (quantization methods, schemes, attention backends).

        Asked for whatever is no module, container, tensor, plain value, function or handle of the operating system.
        An object that is not entered must not hold tensors (the fork would be refused): it is entered, or runtime.
        """

    def is_runtime(self, owner: object, name: str) -> bool:
        """This attribute is local to the process (ids, devices, ports, counters, workspaces): neither carried nor
        compared.
        """


class Sort(enum.Enum):
    """How the walk treats a value."""

    TENSOR = enum.auto()
    MODULE = enum.auto()
    MAPPING = enum.auto()
    SEQUENCE = enum.auto()
    FLOAT = enum.auto()
    PLAIN = enum.auto()
    SET = enum.auto()
    OBJECT = enum.auto()
    IGNORED = enum.auto()


_MAPPINGS = (dict, types.MappingProxyType)
_PLAIN = (
    *(type(None), bool, int, str, bytes, bytearray, complex, range, slice, enum.Enum),
    *(torch.dtype, torch.Size, torch.layout, torch.memory_format, np.generic, np.ndarray, np.dtype),
)
_IGNORED = (
    *(type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial),
    *(types.GeneratorType, types.CoroutineType, property, staticmethod, classmethod, torch.device, torch.Generator),
)
# Handles and configurations: nothing in them is part of the weights. The first list counts for derived classes too.
_IGNORED_FAMILIES = (
    *("asyncio", "logging", "multiprocessing", "pathlib", "socket", "threading", "transformers"),
    *("torch._C", "torch.cuda", "torch.distributed", "torch.jit", "torch.npu", "torch.xpu"),
)
_IGNORED_PACKAGES = (
    *("_asyncio", "_io", "_thread", "_weakref", "concurrent", "contextlib", "ctypes", "functools", "inspect", "io"),
    *("queue", "re", "triton", "typing", "weakref", "zmq"),
)
_IGNORED_BUILTINS = ("ReferenceType", "weakref", "weakproxy", "weakcallableproxy", "builtin_function_or_method")


def sort_of(value: object) -> Sort:
    """Decided by the type alone: objects may raise or lie when looked at, `isinstance` included."""
    kind: Any = type(value)
    return _sort_of_type(kind)


@functools.lru_cache(maxsize=4096)
def _sort_of_type(kind: Any) -> Sort:
    if issubclass(kind, torch.Tensor):
        return Sort.TENSOR
    if issubclass(kind, nn.Module):
        return Sort.MODULE
    if issubclass(kind, (float, np.floating)):
        return Sort.FLOAT
    if issubclass(kind, _PLAIN):
        return Sort.PLAIN
    if issubclass(kind, _MAPPINGS):
        return Sort.MAPPING
    if issubclass(kind, (list, tuple)) or kind.__name__ == "deque":
        return Sort.SEQUENCE
    if issubclass(kind, (set, frozenset)):
        return Sort.SET
    if issubclass(kind, _IGNORED) or kind.__name__ in _IGNORED_BUILTINS or _in_ignored_package(kind):
        return Sort.IGNORED
    return Sort.OBJECT


def _in_ignored_package(kind: type) -> bool:
    if _in_packages(kind, _IGNORED_PACKAGES):
        return True
    return any(_in_packages(base, _IGNORED_FAMILIES) for base in kind.__mro__[:-1])


def _in_packages(kind: type, packages: tuple[str, ...]) -> bool:
    name = str(kind.__module__)
    return any(name == package or name.startswith(package + ".") for package in packages)


def plain_text(value: object, depth: int = 4) -> str | None:
    """Canonical text of a plain value or of a container of nothing else; None if there is more to it, floats
    included.
    """
    sort = sort_of(value)
    if sort is Sort.PLAIN:
        return _plain(value)
    if sort not in (Sort.MAPPING, Sort.SEQUENCE, Sort.SET) or not depth:
        return None
    pairs = value.items() if sort is Sort.MAPPING else ((None, v) for v in value)  # type: ignore[attr-defined]
    parts = []
    for key, item in pairs:
        text, key_text = plain_text(item, depth - 1), "" if key is None else key_name(key)
        if text is None or key_text is None:
            return None
        parts.append(f"{key_text}:{text}" if sort is Sort.MAPPING else text)
    if sort is not Sort.SEQUENCE:
        parts.sort()
    return f"{type(value).__name__}({', '.join(parts)})"


def _plain(value: object) -> str:
    if isinstance(value, enum.Enum):
        return f"{type(value).__name__}.{value.name}"
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            return f"ndarray object{list(value.shape)}"
        return f"ndarray {value.dtype}{list(value.shape)} {xxhash.xxh3_128_hexdigest(value.tobytes())}"
    if isinstance(value, np.generic):
        return repr(value.item())
    return str(value) if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)) else repr(value)


def state_value(value: Any) -> Scalar:
    """A plain value as the manifest holds it: itself where MessagePack can, else its text, long texts as their
    digest.
    """
    if value is None or type(value) is bool:
        return value
    if type(value) is int and -(1 << 63) <= value < 1 << 63:
        return value
    text = value if type(value) is str else plain_text(value)
    assert text is not None
    text = text if text.isascii() else ascii(text)[1:-1]
    if len(text) <= _MAX_TEXT:
        return text
    return f"{text[:64]}… {len(text)} characters, sha256 {canonical_digest(text)[:32]}"


def key_name(key: object) -> str | None:
    """A dictionary key as it stands in a canonical name; None if it has no form that another process would give it
    too.
    """
    sort = sort_of(key)
    if sort in (Sort.PLAIN, Sort.FLOAT):
        return _plain(key)
    if isinstance(key, torch.device):
        return str(key.type)
    if sort is Sort.SEQUENCE:
        return plain_text(key)
    return None
