"""A resolved shard: the manifest, where its bytes are now, and what setting, copying and digesting need."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch

from rfork.binding import Region
from rfork.digest import DEFAULT_CHUNK_NBYTES, GroupDigests, digest_groups
from rfork.errors import ManifestMismatch, UnsupportedModel
from rfork.fence import synchronize
from rfork.identity import RankIdentity
from rfork.inventory.access import How, fetch, rebuilt, store
from rfork.manifest import MAX_INLINE_NBYTES, InlineEntry, Manifest, StateEntry, TensorEntry
from rfork.regions import Span, regions_of, span_of
from rfork.wire.seed import DigestTable


class Found(NamedTuple):
    """A tensor that resolution found."""

    name: str
    kind: str
    tensor: torch.Tensor


class Place(NamedTuple):
    """Where a carried value is written: steps from a mutable owner down to the value, through tuples if need be."""

    chain: tuple[tuple[Any, How, Any], ...]

    def put(self, value: float) -> None:
        owner, how, key = self.chain[-1]
        old = fetch(owner, how, key)
        kind: Any = type(old)
        new = kind(value)
        for owner, how, key in reversed(self.chain):
            if store(owner, how, key, new):
                return
            new = rebuilt(owner, key, new)


@dataclass(frozen=True, eq=False, repr=False)
class ResolvedShard:
    """What one shard holds at this moment. Keeps its tensors alive, so `addresses` stay true as long as this object
    lives.

    `addresses[g]` is where alias group g of the manifest starts on `device`; `slack[g]` bytes behind it are nobody's.
    """

    manifest: Manifest
    addresses: tuple[int, ...]
    device: torch.device
    tensors: Mapping[str, torch.Tensor]
    slack: tuple[int, ...]
    _spans: tuple[Span, ...]
    _places: Mapping[str, Place]

    def __repr__(self) -> str:
        size = f"{len(self.addresses)} groups, {self.manifest.nbytes} bytes"
        return (
            f"<ResolvedShard {self.manifest.rank.key} {len(self.manifest.tensors)} tensors in {size} on {self.device}>"
        )

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        """Memory to register so that every byte of the manifest can be read."""
        return self.regions_for()

    def regions_for(self, extra_tensors: Sequence[torch.Tensor] = ()) -> tuple[Region, ...]:
        """The same with other tensors on the device (the fence page) included. Raises UnsupportedModel if it can't be
        registered.
        """
        extra = [span_of(f"extra tensor {i}", t) for i, t in enumerate(extra_tensors)]
        return regions_of([*self._spans, *extra], self.device)

    def synchronize(self) -> None:
        """Wait until everything queued on the shard's device is done."""
        synchronize(self.device)

    def group_bytes(self, group: int) -> torch.Tensor | None:
        """The bytes of one alias group, as a view of them; None where they lie in more than one storage."""
        storage = self._storage_of[group]
        at, nbytes = self.addresses[group] - storage.data_ptr(), self.manifest.group_nbytes[group]
        if at < 0 or at + nbytes > storage.nbytes():
            return None
        with torch.inference_mode():
            return torch.empty(0, dtype=torch.uint8, device=self.device).set_(storage, at, (nbytes,), (1,))

    @cached_property
    def _storage_of(self) -> dict[int, torch.UntypedStorage]:
        """Of each alias group the storage of one of its tensors."""
        return {t.group: self.tensors[t.name].untyped_storage() for t in self.manifest.tensors if t.group >= 0}

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        """Set carried values and copy inline bytes, in place. Raises ManifestMismatch on anything that this shard does
        not have.
        """
        for state in states:
            place = self._places.get(state.name)
            if place is None or not isinstance(state.value, (float, int)) or isinstance(state.value, bool):
                raise ManifestMismatch(f"{state.name}: no carried value {state.value!r} is expected here")
            place.put(float(state.value))
        for entry in inline:
            _copy_inline(entry, self.tensors.get(entry.name))

    def digests(self, chunk_nbytes: int = DEFAULT_CHUNK_NBYTES, groups: Sequence[int] | None = None) -> DigestTable:
        """Digest the bytes as they are now, all groups or those given; the others' rows are empty."""
        return digest_groups(self.addresses, self.manifest.group_nbytes, self.device, chunk_nbytes, groups)

    def begin_digests(self, chunk_nbytes: int) -> GroupDigests:
        """Digests group by group, for bytes that are still on their way."""
        return GroupDigests(self.addresses, self.manifest.group_nbytes, self.device, chunk_nbytes)


def build_shard(
    *,
    rank: RankIdentity,
    device: torch.device,
    tensors: list[Found],
    states: list[StateEntry],
    places: Mapping[str, Place],
) -> ResolvedShard:
    """Group tensors that share bytes, number the groups by their first name, and write the manifest."""
    tensors = sorted(tensors, key=operator.attrgetter("name"))
    spans: dict[int, Span] = {}
    inline: list[InlineEntry] = []
    inline_nbytes = 0
    for i, (name, _, tensor) in enumerate(tensors):
        _check_carriable(name, tensor)
        if not tensor.numel():
            continue
        if tensor.device == device:
            spans[i] = span_of(name, tensor)
        else:
            inline.append(_inline_entry(name, tensor, device, inline_nbytes))
            inline_nbytes += len(inline[-1].data)
    group_of, addresses, group_nbytes = _alias_groups([(s.start, s.end, i) for i, s in spans.items()])
    slack = [0] * len(addresses)
    for i, span in spans.items():
        group, _ = group_of[i]
        if span.end == addresses[group] + group_nbytes[group]:
            slack[group] = max(slack[group], span.slack)
    carried_inline = {e.name for e in inline}
    entries = []
    for i, (name, kind, tensor) in enumerate(tensors):
        if name in carried_inline:
            continue
        group, offset = group_of.get(i, (-1, 0))
        shape = tuple(tensor.shape)
        stride = tensor.stride() if group >= 0 else _dense_stride(shape)
        entries.append(TensorEntry(name, str(tensor.dtype).removeprefix("torch."), shape, stride, group, offset, kind))
    manifest = Manifest(
        rank=rank,
        tensors=tuple(entries),
        group_nbytes=group_nbytes,
        states=tuple(sorted(states, key=operator.attrgetter("name"))),
        inline=tuple(inline),
    )
    live = {f.name: f.tensor for f in tensors}
    return ResolvedShard(manifest, addresses, device, live, tuple(slack), tuple(spans.values()), places)


def exact_device(device: torch.device) -> torch.device:
    """`device` with its index, as tensors report theirs."""
    if device.index is not None or device.type in ("cpu", "meta"):
        return torch.device(device.type) if device.type == "cpu" else device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def _alias_groups(
    spans: list[tuple[int, int, int]],
) -> tuple[dict[int, tuple[int, int]], tuple[int, ...], tuple[int, ...]]:
    """Connected components of overlapping (start, end, tensor index): tensor → (group, offset), and each group's
    place.
    """
    components: list[tuple[int, int, int, list[tuple[int, int]]]] = []  # least tensor, first byte, end, tensors
    for start, end, i in sorted(spans):
        if components and start < components[-1][2]:
            least, first, last, members = components[-1]
            members.append((i, start))
            components[-1] = (min(least, i), first, max(last, end), members)
        else:
            components.append((i, start, end, [(i, start)]))
    components.sort()
    group_of = {i: (g, at - start) for g, (_, start, _, members) in enumerate(components) for i, at in members}
    return group_of, tuple(c[1] for c in components), tuple(c[2] - c[1] for c in components)


def _dense_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(itertools.accumulate(reversed([max(d, 1) for d in shape[1:]]), operator.mul, initial=1))[::-1][
        : len(shape)
    ]


def _check_carriable(name: str, tensor: torch.Tensor) -> None:
    """Refuse whatever is more, or less, than plain strided memory."""
    kind = type(tensor).__name__
    problem = None
    if getattr(type(tensor), "__torch_dispatch__", None) is not torch.Tensor.__torch_dispatch__:
        problem = f"a {kind} wraps other tensors"
    elif isinstance(tensor, torch.nn.parameter.UninitializedTensorMixin):
        problem = f"a {kind} has no shape yet"
    elif tensor.is_meta:
        problem = "it is on the meta device and has no bytes"
    elif tensor.layout is not torch.strided or tensor.is_nested:
        problem = f"its layout is {tensor.layout}{' (nested)' if tensor.is_nested else ''}, not strided"
    elif tensor.is_quantized:
        problem = f"torch quantization ({tensor.dtype}) keeps scales outside its bytes"
    elif tensor.is_conj() or tensor.is_neg():
        problem = "it is a lazy conjugate or negative view"
    if problem:
        raise UnsupportedModel(f"{name} can't be carried: {problem}")


def _inline_entry(name: str, tensor: torch.Tensor, device: torch.device, used: int) -> InlineEntry:
    nbytes = tensor.numel() * tensor.element_size()
    if used + nbytes > MAX_INLINE_NBYTES:
        raise UnsupportedModel(
            f"{name} ({nbytes} bytes) is on {tensor.device}, not on {device}, and at most {MAX_INLINE_NBYTES} bytes "
            "can travel beside a shard's own device. Is offloading on?"
        )
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return InlineEntry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), flat.numpy().tobytes())


def _copy_inline(entry: InlineEntry, tensor: torch.Tensor | None) -> None:
    if tensor is None or tuple(tensor.shape) != entry.shape or str(tensor.dtype) != f"torch.{entry.dtype}":
        raise ManifestMismatch(f"{entry.name}: no inline tensor {entry.dtype}{list(entry.shape)} is expected here")
    if len(entry.data) != math.prod(entry.shape) * tensor.element_size():
        raise ManifestMismatch(
            f"{entry.name}: {len(entry.data)} inline bytes do not fill {entry.dtype}{list(entry.shape)}"
        )
    source = torch.frombuffer(bytearray(entry.data), dtype=torch.uint8).view(tensor.dtype).reshape(entry.shape)
    with torch.inference_mode():
        target = tensor.detach()
        for dim, stride in enumerate(target.stride()):
            if not stride:
                source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
        target.copy_(source)
