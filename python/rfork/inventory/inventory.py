"""The walk that notes a model's structure, and its resolution against what the model holds now."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rfork.errors import UnsupportedModel
from rfork.identity import RankIdentity
from rfork.inventory.access import GONE, How, Part, fetch, parts, registered_modules
from rfork.inventory.rules import InventoryRules, Sort, key_name, plain_text, sort_of, state_value
from rfork.inventory.shard import Found, Place, ResolvedShard, build_shard, exact_device
from rfork.manifest import MAX_TENSORS, StateEntry

MAX_DEPTH = 32
MAX_ENTRIES = 4 * MAX_TENSORS


class _Owner(NamedTuple):
    """Something that was entered. `parent` indexes the list of owners; parents come first."""

    parent: int
    how: How
    key: Any
    name: str
    depth: int
    shared_with: str | None = None


class _Entry(NamedTuple):
    """A tensor or a float, to be fetched again at resolution."""

    owner: int
    how: How
    key: Any
    name: str
    kind: str


class Inventory:
    """The structure of one shard, noted when its loader returned. Holds the model, but none of its tensors."""

    def __init__(self, model: nn.Module, rank: RankIdentity, device: torch.device) -> None:
        self.rank = rank
        self.device = exact_device(device)
        self._model = model
        self._owners: list[_Owner] = []
        self._tensors: list[_Entry] = []
        self._floats: list[_Entry] = []
        self._states: list[StateEntry] = []
        self._unwrap: Callable[[Any], Any] = lambda value: value

    @classmethod
    def note(
        cls,
        model: nn.Module,
        *,
        rank: RankIdentity,
        device: torch.device,
        rules: InventoryRules,
        unwrap: Callable[[Any], Any] = lambda value: value,
    ) -> Inventory:
        """Note every tensor and value that inference can read. Call when the loader returns, before anything runs.

        What appears later (lazy caches, workspaces) stays out. Plain values are taken now, tensors and floats at
        `resolve()`. `unwrap` gives the module that was noted where another has been put around it since (LoRA). Raises
        UnsupportedModel naming what can't be listed.
        """
        inventory = cls(model, rank, device)
        inventory._unwrap = unwrap
        _Walk(inventory, model, rules).run()
        return inventory

    def __repr__(self) -> str:
        counts = f"{len(self._tensors)} tensors, {len(self._floats)} floats, {len(self._states)} plain values"
        return f"<Inventory {self.rank.key} {counts}>"

    def resolve(self) -> ResolvedShard:
        """Follow every noted path now. Raises UnsupportedModel naming what can't be carried.

        A noted tensor or float that is missing or None by now was dropped on purpose (a draft gives up its own
        embedding); it is recorded as absent, so that pairing with a side that has it sees the difference. One that
        became something else is refused.
        """
        live: list[object] = []
        modules: dict[str, object] = {}
        absent: list[StateEntry] = []
        for owner in self._owners:
            value = self._model if owner.parent < 0 else fetch(live[owner.parent], owner.how, owner.key)
            value = self._unwrap(value)
            if owner.shared_with is not None:
                if value is GONE or value is None:
                    absent.append(StateEntry(owner.name, "absent", False))
                elif value is not modules.get(owner.shared_with):
                    raise UnsupportedModel(
                        f"{owner.name} was {owner.shared_with} when the loader returned, and is not any more"
                    )
                value = GONE
            elif sort_of(value) is Sort.MODULE:
                modules[owner.name] = value
            live.append(value)
        tensors = self._fetch(self._tensors, live, absent, Sort.TENSOR)
        floats = self._fetch(self._floats, live, absent, Sort.FLOAT)
        places = {e.name: self._place(e, live) for e, _ in floats}
        carried = [StateEntry(e.name, float(value), True) for e, value in floats]
        return build_shard(
            rank=self.rank,
            device=self.device,
            tensors=[Found(e.name, e.kind, value) for e, value in tensors],
            states=[*self._states, *carried, *absent],
            places=places,
        )

    def _fetch(
        self, entries: list[_Entry], live: list[object], absent: list[StateEntry], sort: Sort
    ) -> list[tuple[_Entry, Any]]:
        out: list[tuple[_Entry, Any]] = []
        for entry in entries:
            value = fetch(live[entry.owner], entry.how, entry.key)
            if value is GONE or value is None:
                absent.append(StateEntry(entry.name, "absent", False))
            elif sort_of(value) is not sort:
                noun = "a tensor" if sort is Sort.TENSOR else "a float"
                raise UnsupportedModel(
                    f"{entry.name} was {noun} when the loader returned and is a {type(value).__name__} now: "
                    "it can't be carried"
                )
            else:
                out.append((entry, value))
        return out

    def _place(self, entry: _Entry, live: list[object]) -> Place:
        """The chain of (owner, how, key) from an owner that can be written down to the value; longer than one for
        tuples.
        """
        chain = [(live[entry.owner], entry.how, entry.key)]
        index = entry.owner
        while isinstance(chain[0][0], tuple):
            owner = self._owners[index]
            index = owner.parent
            chain.insert(0, (live[index], owner.how, owner.key))
        return Place(tuple(chain))


class _Walk:
    """One pass over a model. Registered modules come first, so that they keep the names that state dictionaries use."""

    def __init__(self, into: Inventory, model: nn.Module, rules: InventoryRules) -> None:
        self._into = into
        self._rules = rules
        self._objects: list[object] = []
        self._seen: dict[int, str] = {}
        self._names: set[str] = set()
        self._noted: dict[int, Any] = {}
        self._closed: list[tuple[str, object]] = []
        self._enter(model, -1, How.ATTRIBUTE, None, "")

    def run(self) -> None:
        index = 0
        while index < len(self._objects):
            owner, value = self._into._owners[index], self._objects[index]
            if owner.shared_with is None:
                for part in parts(value, owner.name):
                    self._visit(index, owner, value, part)
            index += 1
        self._check_closed()

    def _check_closed(self) -> None:
        """Whatever the rules left closed must not be the only way to a tensor or a module."""
        storages: set[int | None] | None = None
        for name, value in self._closed:
            for held in near(value):
                sort = sort_of(held)
                if sort is Sort.TENSOR and id(held) not in self._noted:
                    storages = storages or {storage_of(t) for t in self._noted.values()} - {None}
                    known = storage_of(held) in storages or not held.numel()
                elif sort is Sort.MODULE:
                    known = id(held) in self._seen or self._rules.is_pure(held)
                else:
                    known = True
                if not known:
                    noun = "tensors" if sort is Sort.TENSOR else "a module"
                    raise UnsupportedModel(
                        f"{name} ({type(value).__module__}.{type(value).__qualname__}) holds {noun}, and nobody has "
                        "said whether they are weights or local to the process"
                    )

    def _visit(self, index: int, owner: _Owner, holder: object, part: Part) -> None:
        name = self._name(owner.name, holder, part)
        if name is None:
            return
        value, sort = part.value, sort_of(part.value)
        if sort is Sort.TENSOR:
            self._noted[id(value)] = value
            self._into._tensors.append(_Entry(index, part.how, part.key, self._unique(name), part.kind))
            self._enter(value, index, part.how, part.key, name)
        elif sort is Sort.FLOAT:
            self._into._floats.append(_Entry(index, part.how, part.key, self._unique(name), part.kind))
        elif sort is Sort.PLAIN:
            self._into._states.append(StateEntry(self._unique(name), state_value(value), False))
        elif sort is Sort.SET:
            self._visit_set(name, value)
        elif sort in (Sort.MAPPING, Sort.SEQUENCE):
            if plain_text(value) is not None:
                self._into._states.append(StateEntry(self._unique(name), state_value(value), False))
            else:
                self._enter(value, index, part.how, part.key, name)
        elif sort is Sort.MODULE or (sort is Sort.OBJECT and self._rules.descend(value)):
            self._enter(value, index, part.how, part.key, name)
        elif sort is Sort.OBJECT:
            self._closed.append((name, value))
        elif binds_tensors(value):
            self._enter(value, index, part.how, part.key, name)

    def _visit_set(self, name: str, value: object) -> None:
        if plain_text(value) is not None:
            self._into._states.append(StateEntry(self._unique(name), state_value(value), False))
        elif any(sort_of(v) in (Sort.TENSOR, Sort.MODULE) for v in value):  # type: ignore[attr-defined]
            raise UnsupportedModel(f"{name} is a set that holds tensors or modules: a set has no order to name them by")

    def _name(self, prefix: str, holder: object, part: Part) -> str | None:
        """Canonical name of a part, or None if it is local to the process."""
        if part.how is How.ATTRIBUTE:
            key = str(part.key)
            return None if self._rules.is_runtime(holder, key) else f"{prefix}.{key}" if prefix else key
        if part.how is How.INDEX:
            return f"{prefix}[{part.key}]"
        key_text = key_name(part.key)
        if key_text is None:
            if sort_of(part.value) in (Sort.TENSOR, Sort.MODULE):
                raise UnsupportedModel(
                    f"{prefix} holds a tensor under a {type(part.key).__name__} key, which has no stable name"
                )
            return None
        return None if self._rules.is_runtime(holder, key_text) else f"{prefix}[{key_text}]"

    def _unique(self, name: str) -> str:
        if name in self._names:
            raise UnsupportedModel(f"two different values are called {name}: one hides the other")
        if len(self._names) >= MAX_ENTRIES:
            raise UnsupportedModel(f"more than {MAX_ENTRIES} tensors and values; the last one was {name}")
        self._names.add(name)
        return name

    def _enter(self, value: object, parent: int, how: How, key: object, name: str) -> None:
        """List `value` as an owner, once however many ways lead to it, with all registered modules below it."""
        sort = sort_of(value)
        if sort is Sort.MODULE and self._rules.is_pure(value):
            return
        if sort is Sort.TENSOR and not own_attributes(value):
            return
        depth = self._into._owners[parent].depth + 1 if parent >= 0 else 0
        if depth > MAX_DEPTH:
            raise UnsupportedModel(f"{name} is nested deeper than {MAX_DEPTH} levels")
        first = self._seen.get(id(value))
        if first is not None:
            if sort is Sort.MODULE:
                self._append(value, _Owner(parent, how, key, name, depth, shared_with=first))
                self._into._states.append(StateEntry(self._unique(f"{name} is"), first or "the model", False))
            return
        self._seen[id(value)] = name
        index = self._append(value, _Owner(parent, how, key, name, depth))
        if sort is Sort.MODULE:
            for key, child in registered_modules(value, name):
                self._enter(child, index, How.ATTRIBUTE, key, f"{name}.{key}" if name else key)

    def _append(self, value: object, owner: _Owner) -> int:
        self._objects.append(value)
        self._into._owners.append(owner)
        return len(self._objects) - 1


def own_attributes(tensor: object) -> bool:
    """Whether anything was hung on a tensor."""
    return bool(getattr(tensor, "__dict__", None))


def near(value: object) -> list[Any]:
    """What hangs on an object directly, and what is in the containers that do."""
    direct = [part.value for part in parts(value, "")]
    containers = [v for v in direct if sort_of(v) in (Sort.MAPPING, Sort.SEQUENCE)]
    return direct + [part.value for container in containers for part in parts(container, "")]


def binds_tensors(value: object) -> bool:
    """Whether this is a `functools.partial` with tensors among its arguments."""
    kind: Any = type(value)
    return issubclass(kind, functools.partial) and any(sort_of(v) is Sort.TENSOR for v in near(value))


def storage_of(tensor: torch.Tensor) -> int | None:
    """Where a tensor's storage starts, or None for tensors without one."""
    try:
        return int(tensor.untyped_storage().data_ptr()) or None
    except (RuntimeError, ValueError):  # sparse, wrapped or not there yet
        return None
