"""Reading and writing an object's parts without running its code: no properties, no `__getattr__`, no `__setattr__`."""

from __future__ import annotations

import enum
import functools
import types
from typing import Any, NamedTuple

import torch
from torch import nn

from rfork.errors import UnsupportedModel
from rfork.inventory.rules import Sort, sort_of


class How(enum.Enum):
    """A step from an owner to its part."""

    ATTRIBUTE = enum.auto()
    ITEM = enum.auto()
    INDEX = enum.auto()


class Part(NamedTuple):
    """One part of an owner. `kind` is `parameter`, `buffer` or `attribute`."""

    how: How
    key: Any
    value: object
    kind: str = "attribute"


class _Gone(enum.Enum):
    GONE = enum.auto()


GONE = _Gone.GONE
_MODULE_INTERNALS = frozenset(vars(nn.Module())) | {"_compiled_call_impl", "_version", "_is_hf_initialized"}
_TENSOR_TABLES = (("parameter", "_parameters"), ("buffer", "_buffers"))
_MODULE_TABLES = ("_parameters", "_buffers", "_modules")


def own_dict(value: object) -> dict[str, Any]:
    """`vars(value)`, or nothing where the object has none or refuses."""
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except Exception:  # a strange object: it has no plain attributes that we could carry
        return {}
    return attributes if type(attributes) is dict else {}


def slots(value: object) -> dict[str, types.MemberDescriptorType]:
    """Slots of an object's class and its bases, by name: `__slots__`, slotted dataclasses, msgspec structs."""
    kind: Any = type(value)
    return _slots_of_type(kind)


@functools.lru_cache(maxsize=4096)
def _slots_of_type(kind: Any) -> dict[str, types.MemberDescriptorType]:
    out: dict[str, types.MemberDescriptorType] = {}
    for base in reversed(kind.__mro__):
        if issubclass(base, (nn.Module, torch.Tensor)) and base.__module__.startswith("torch"):
            continue
        out.update((k, v) for k, v in vars(base).items() if isinstance(v, types.MemberDescriptorType))
    return out


def _class_tensors(module: object) -> dict[str, torch.Tensor]:
    kind: Any = type(module)
    return _class_tensors_of_type(kind)


@functools.lru_cache(maxsize=4096)
def _class_tensors_of_type(kind: Any) -> dict[str, torch.Tensor]:
    out: dict[str, torch.Tensor] = {}
    for base in reversed(kind.__mro__):
        if not base.__module__.startswith("torch."):
            out.update((k, v) for k, v in vars(base).items() if sort_of(v) is Sort.TENSOR)
    return out


def parts(owner: Any, name: str) -> list[Part]:
    """What hangs on `owner`, registered modules aside, in an order that does not depend on how it was built.

    `name` is for messages.
    """
    sort = sort_of(owner)
    if sort is Sort.MAPPING:
        return [Part(How.ITEM, k, v) for k, v in owner.items()]
    if sort is Sort.SEQUENCE:
        return [Part(How.INDEX, i, v) for i, v in enumerate(owner)]
    hidden = _MODULE_INTERNALS if sort is Sort.MODULE else frozenset[str]()
    found = [Part(How.ATTRIBUTE, k, v) for k, v in own_dict(owner).items() if k not in hidden]
    if sort is Sort.MODULE:
        for kind, table in _TENSOR_TABLES:
            found += [Part(How.ATTRIBUTE, k, v, kind) for k, v in _table(owner, table, name).items()]
        if shared := _class_tensors(owner):
            seen = {p.key for p in found}
            found += [Part(How.ATTRIBUTE, k, v) for k, v in shared.items() if k not in seen]
    if sort is not Sort.TENSOR and (fields := slots(owner)):
        found += [Part(How.ATTRIBUTE, k, v) for k, s in fields.items() if (v := _slot(s, owner)) is not GONE]
    found.sort(key=_by_key)
    return found


def _by_key(part: Part) -> str:
    return str(part.key)


def registered_modules(module: object, name: str) -> list[tuple[str, object]]:
    """Child modules by name, sorted. Raises UnsupportedModel for modules that torch keeps elsewhere (scripted ones)."""
    return sorted((k, v) for k, v in _table(module, "_modules", name).items() if v is not None)


def _table(module: object, table: str, name: str) -> dict[str, Any]:
    entries = own_dict(module).get(table)
    if not isinstance(entries, dict):
        raise UnsupportedModel(f"{name or 'the model'} ({type(module).__name__}): its {table} can't be listed")
    return entries


def fetch(owner: Any, how: How, key: Any) -> object:
    """The part now, or GONE."""
    sort = sort_of(owner)
    if how is How.ITEM:
        return owner.get(key, GONE) if sort is Sort.MAPPING else GONE
    if how is How.INDEX:
        return owner[key] if sort is Sort.SEQUENCE and key < len(owner) else GONE
    attributes = own_dict(owner)
    if key in attributes:
        return attributes[key]
    if sort is Sort.MODULE:
        for table in _MODULE_TABLES:
            if key in attributes[table]:
                return attributes[table][key]
        if key in (shared := _class_tensors(owner)):
            return shared[key]
    slot = slots(owner).get(key)
    return GONE if slot is None else _slot(slot, owner)


def _slot(slot: types.MemberDescriptorType, owner: object) -> object:
    try:
        return slot.__get__(owner, type(owner))
    except AttributeError:
        return GONE


def store(owner: Any, how: How, key: Any, value: object) -> bool:
    """Put `value` where `fetch` found the old one. False if the owner is a tuple, which must be rebuilt by its own
    owner.
    """
    if how is How.ATTRIBUTE:
        attributes = own_dict(owner)
        if key not in attributes and key in slots(owner):
            slots(owner)[key].__set__(owner, value)
        else:
            attributes[key] = value
        return True
    if isinstance(owner, (tuple, types.MappingProxyType)):
        return False
    owner[key] = value
    return True


def rebuilt(old: tuple[Any, ...], index: int, value: object) -> tuple[Any, ...]:
    """A tuple of the same type with one item replaced."""
    items = [*old[:index], value, *old[index + 1 :]]
    return type(old)(*items) if hasattr(type(old), "_fields") else type(old)(items)
