"""The manifest: what a shard holds, without a single address; and pairing, which compares two of them.

Tensors whose bytes overlap form one *alias group*. A group is the unit that moves: one contiguous span of `nbytes`.
Groups are numbered by the first tensor name in them, so two sides with the same tensors and the same aliasing number
them alike.
"""

from __future__ import annotations

import hashlib
import itertools
import operator
from functools import cached_property

import msgspec

from rfork.errors import ManifestMismatch
from rfork.identity import RankIdentity, Scalar

MAX_TENSORS = 1_000_000
MAX_INLINE_NBYTES = 1 << 20
_SHOWN = 6


class TensorEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. `shape` and `stride` count elements, `offset` is in bytes from the start of its group.

    `kind` is where it hangs: parameter, buffer or attribute (plain attributes, containers, quantization objects).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    group: int
    offset: int
    kind: str

    def describe(self) -> str:
        text = f"{self.dtype}{list(self.shape)}"
        dense = list(itertools.accumulate(reversed(self.shape[1:]), operator.mul, initial=1))[::-1][: len(self.shape)]
        return text if tuple(dense) == self.stride or 0 in self.shape else f"{text} stride {list(self.stride)}"


class StateEntry(msgspec.Struct, frozen=True, array_like=True):
    """A value that loading sets and inference reads, and that is no tensor.

    `carried` values (derived from weights) are set on the client; others are compared and must be equal.
    """

    name: str
    value: Scalar
    carried: bool


class InlineEntry(msgspec.Struct, frozen=True, array_like=True):
    """A small tensor that lives off the shard's device and travels inside the manifest."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Manifest(msgspec.Struct, frozen=True, dict=True):
    """Everything one shard holds. `group_nbytes[g]` is the span of group g; zero-byte tensors have group -1."""

    rank: RankIdentity
    tensors: tuple[TensorEntry, ...]
    group_nbytes: tuple[int, ...]
    states: tuple[StateEntry, ...] = ()
    inline: tuple[InlineEntry, ...] = ()

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise ValueError(f"a manifest holds at most {MAX_TENSORS} tensors, got {len(self.tensors)}")
        names = [t.name for t in self.tensors] + [t.name for t in self.inline]
        if len(set(names)) != len(names):
            raise ValueError("a manifest names a tensor twice")
        if len({s.name for s in self.states}) != len(self.states):
            raise ValueError("a manifest names a value twice")
        if any(n <= 0 for n in self.group_nbytes):
            raise ValueError("an alias group must span at least one byte")
        for t in self.tensors:
            _check_entry(t, self.group_nbytes)
        if sum(len(t.data) for t in self.inline) > MAX_INLINE_NBYTES:
            raise ValueError(f"inline tensors exceed {MAX_INLINE_NBYTES} bytes")

    @property
    def nbytes(self) -> int:
        """Bytes that move: each alias group once."""
        return sum(self.group_nbytes)

    @cached_property
    def digest(self) -> str:
        """Digest of the layout: equal digests mean that pairing succeeds. Carried values and inline bytes are not in
        it.

        Nor is the order in which tensors and values are listed.
        """
        layout = (
            self.rank,
            sorted(self.tensors, key=_name),
            self.group_nbytes,
            [(s.name, None if s.carried else s.value, s.carried) for s in sorted(self.states, key=_name)],
            [(i.name, i.dtype, i.shape) for i in sorted(self.inline, key=_name)],
        )
        return hashlib.sha256(msgspec.msgpack.encode(layout)).hexdigest()


_name = operator.attrgetter("name")


def _check_entry(t: TensorEntry, group_nbytes: tuple[int, ...]) -> None:
    if len(t.shape) != len(t.stride) or any(d < 0 for d in t.shape):
        raise ValueError(f"{t.name}: shape {t.shape} and stride {t.stride} do not belong together")
    if t.group == -1:
        return
    if not 0 <= t.group < len(group_nbytes) or not 0 <= t.offset < group_nbytes[t.group]:
        raise ValueError(f"{t.name}: group {t.group} offset {t.offset} is outside the manifest")


def encode_manifest(manifest: Manifest) -> bytes:
    """Compact binary form (MessagePack); compression is the listener's business."""
    return msgspec.msgpack.encode(manifest)


def decode_manifest(data: bytes) -> Manifest:
    """Parse and validate a peer's manifest. Raises ValueError on anything that is not one."""
    try:
        return msgspec.msgpack.decode(data, type=Manifest)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise ValueError(f"not a manifest: {error}") from error


class TransferPlan(msgspec.Struct, frozen=True):
    """Address-free list of reads: every group of the manifest, whole, plus the values to set afterwards."""

    group_nbytes: tuple[int, ...]
    set_states: tuple[StateEntry, ...]
    set_inline: tuple[InlineEntry, ...]

    @property
    def nbytes(self) -> int:
        return sum(self.group_nbytes)


def pair(seed: Manifest, client: Manifest, *, seed_name: str = "the seed") -> TransferPlan:
    """Compare both ways; all or nothing. Raises ManifestMismatch naming what differs, before a byte moves."""
    if seed.digest != client.digest:
        problems = _differences(seed, client)
        shown = "\n".join(f"  {p}" for p in problems[:_SHOWN])
        more = f"\n  … and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        raise ManifestMismatch(
            f"{len(problems)} differences to {seed_name} in shard {client.rank.key} "
            f"({len(client.tensors)} tensors here, {len(seed.tensors)} there)\n{shown}{more}\n"
            "  The seed is healthy. Were both started with the same model, quantization and parallel sizes?"
        )
    return TransferPlan(
        group_nbytes=client.group_nbytes,
        set_states=tuple(s for s in seed.states if s.carried),
        set_inline=seed.inline,
    )


def _differences(seed: Manifest, client: Manifest) -> list[str]:
    out: list[str] = []
    if seed.rank != client.rank:
        out.append(f"shard: {client.rank.key} here, {seed.rank.key} there")
    here, there = {t.name: t for t in client.tensors}, {t.name: t for t in seed.tensors}
    for name in sorted(here.keys() | there.keys()):
        mine, theirs = here.get(name), there.get(name)
        if mine is None or theirs is None:
            side, entry = ("here", mine) if theirs is None else ("there", theirs)
            assert entry is not None
            out.append(f"{name}: only {side} ({entry.describe()})")
        elif (mine.dtype, mine.shape, mine.stride) != (theirs.dtype, theirs.shape, theirs.stride):
            out.append(f"{name}: {mine.describe()} here, {theirs.describe()} there")
        elif mine != theirs:
            where = f"group {mine.group}+{mine.offset} here, {theirs.group}+{theirs.offset} there"
            out.append(f"{name}: shares memory differently ({where})")
    out += _state_differences(seed, client)
    here_inline = {(i.name, i.dtype, i.shape) for i in client.inline}
    there_inline = {(i.name, i.dtype, i.shape) for i in seed.inline}
    out += [f"{name}: inline tensor differs" for name, *_ in sorted(here_inline ^ there_inline)]
    if not out:
        sizes = itertools.zip_longest(client.group_nbytes, seed.group_nbytes, fillvalue=0)
        out += [f"group {g}: {m} bytes here, {t} there" for g, (m, t) in enumerate(sizes) if m != t]
    return out


def _state_differences(seed: Manifest, client: Manifest) -> list[str]:
    here, there = {s.name: s for s in client.states}, {s.name: s for s in seed.states}
    out = []
    for name in sorted(here.keys() | there.keys()):
        mine, theirs = here.get(name), there.get(name)
        if mine is None or theirs is None:
            out.append(f"{name}: value only {'here' if theirs is None else 'there'}")
        elif mine.carried != theirs.carried or (not mine.carried and repr(mine.value) != repr(theirs.value)):
            out.append(f"{name}: {mine.value!r} here, {theirs.value!r} there")
    return out
