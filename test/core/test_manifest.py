"""Manifest and pairing: both ways, all or nothing, before a byte moves."""

import contextlib
import math
import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rfork.errors import ManifestMismatch
from rfork.identity import RankIdentity
from rfork.manifest import (
    MAX_INLINE_NBYTES,
    InlineEntry,
    Manifest,
    StateEntry,
    TensorEntry,
    decode_manifest,
    encode_manifest,
    pair,
)


def tensor(name: str = "w", **changes: object) -> TensorEntry:
    fields = {"dtype": "bfloat16", "shape": (2, 3), "stride": (3, 1), "group": 0, "offset": 0, "kind": "parameter"}
    return TensorEntry(name=name, **(fields | changes))  # type: ignore[arg-type]


def manifest(*tensors: TensorEntry, **changes: object) -> Manifest:
    groups = 1 + max((t.group for t in tensors), default=-1)
    fields = {"rank": RankIdentity(), "tensors": tensors, "group_nbytes": (12,) * groups}
    return Manifest(**(fields | changes))  # type: ignore[arg-type]


FULL = manifest(
    tensor("a"),
    tensor("b", group=1),
    tensor("empty", shape=(0,), stride=(1,), group=-1),
    states=(StateEntry("flag", True, False), StateEntry("scale", 0.5, True)),
    inline=(InlineEntry("cpu", "int64", (1,), b"\1" + bytes(7)),),
)


def test_the_digest_is_pinned() -> None:
    """A change of this value is a change of the protocol."""
    assert FULL.digest == "64bc6a9d78305ba1787c211c801ce17c3e5879ae635d8e121bb464a8d7c9d59e"


def test_a_manifest_survives_the_wire() -> None:
    assert decode_manifest(encode_manifest(FULL)) == FULL
    assert decode_manifest(encode_manifest(FULL)).digest == FULL.digest


def test_floats_and_flags_keep_their_types_on_the_wire() -> None:
    values = [1, 1.0, True, None, "1", -0.0, math.inf]
    states = tuple(StateEntry(str(i), v, isinstance(v, float)) for i, v in enumerate(values))
    back = [s.value for s in decode_manifest(encode_manifest(manifest(states=states))).states]
    assert [(type(v), v) for v in back] == [(type(v), v) for v in values]
    nan = manifest(states=(StateEntry("x", math.nan, True),))
    assert math.isnan(decode_manifest(encode_manifest(nan)).states[0].value)


@pytest.mark.parametrize(
    ("other", "says"),
    [
        (tensor(dtype="float16"), r"w: bfloat16\[2, 3\] here, float16\[2, 3\] there"),
        (tensor(shape=(3, 2), stride=(2, 1)), r"bfloat16\[2, 3\] here, bfloat16\[3, 2\] there"),
        (tensor(stride=(1, 2)), r"bfloat16\[2, 3\] here, bfloat16\[2, 3\] stride \[1, 2\] there"),
        (tensor(offset=2), r"shares memory differently \(group 0\+0 here, 0\+2 there\)"),
        (tensor("v"), r"v: only there .*\n  w: only here"),
    ],
)
def test_one_different_property_is_refused_and_named(other: TensorEntry, says: str) -> None:
    with pytest.raises(ManifestMismatch, match=says):
        pair(manifest(other), manifest(tensor()))


def test_one_tensor_more_on_either_side_is_refused() -> None:
    few, many = manifest(tensor("a")), manifest(tensor("a"), tensor("b", group=1))
    with pytest.raises(ManifestMismatch, match="b: only there"):
        pair(many, few)
    with pytest.raises(ManifestMismatch, match="b: only here"):
        pair(few, many)


def test_tied_against_untied_is_refused() -> None:
    tied = manifest(tensor("embed"), tensor("head"))
    apart = manifest(tensor("embed"), tensor("head", group=1))
    with pytest.raises(ManifestMismatch, match=r"head: shares memory differently \(group 1\+0 here, 0\+0 there\)"):
        pair(tied, apart)


def test_empty_on_one_side_only_is_refused_and_on_both_is_equal() -> None:
    empty = tensor(shape=(0, 3), group=-1)
    assert pair(manifest(empty), manifest(empty)).nbytes == 0
    with pytest.raises(ManifestMismatch, match=r"bfloat16\[2, 3\] here, bfloat16\[0, 3\] there"):
        pair(manifest(empty), manifest(tensor()))


def test_another_span_is_refused_although_every_tensor_agrees() -> None:
    with pytest.raises(ManifestMismatch, match="group 0: 12 bytes here, 16 there"):
        pair(manifest(tensor(), group_nbytes=(16,)), manifest(tensor()))


def test_another_shard_is_refused() -> None:
    one, two = (manifest(tensor(), rank=RankIdentity(tp_rank=r, tp_size=2)) for r in (0, 1))
    with pytest.raises(ManifestMismatch, match=r"shard: target.tp1of2.* here, target.tp0of2"):
        pair(one, two)


def test_flags_are_compared_and_carried_values_are_not() -> None:
    def with_states(flag: object, scale: object, carried: bool = True) -> Manifest:
        return manifest(states=(StateEntry("flag", flag, False), StateEntry("scale", scale, carried)))  # type: ignore[arg-type]

    plan = pair(with_states(True, 0.25), with_states(True, 1.0))
    assert plan.set_states == (StateEntry("scale", 0.25, True),)
    with pytest.raises(ManifestMismatch, match="flag: True here, False there"):
        pair(with_states(False, 1.0), with_states(True, 1.0))
    with pytest.raises(ManifestMismatch, match="flag: True here, 1 there"):
        pair(with_states(1, 1.0), with_states(True, 1.0))
    with pytest.raises(ManifestMismatch, match=r"scale: 1\.0 here, 1\.0 there"):
        pair(with_states(True, 1.0, carried=False), with_states(True, 1.0))
    with pytest.raises(ManifestMismatch, match="flag: value only here"):
        pair(manifest(), manifest(states=(StateEntry("flag", True, False),)))


def test_inline_bytes_are_carried_and_inline_layout_is_compared() -> None:
    def inline(shape: tuple[int, ...], data: bytes) -> Manifest:
        return manifest(inline=(InlineEntry("i", "uint8", shape, data),))

    assert pair(inline((2,), b"ab"), inline((2,), b"xy")).set_inline == (InlineEntry("i", "uint8", (2,), b"ab"),)
    with pytest.raises(ManifestMismatch, match="i: inline tensor differs"):
        pair(inline((1, 2), b"ab"), inline((2,), b"ab"))


def test_the_order_of_listing_does_not_count() -> None:
    shuffled = msgspec.structs.replace(FULL, tensors=FULL.tensors[::-1], states=FULL.states[::-1])
    assert shuffled.digest == FULL.digest


def test_a_long_list_of_differences_is_cut() -> None:
    many = manifest(*(tensor(f"t{i}") for i in range(20)))
    with pytest.raises(ManifestMismatch, match=r"20 differences to s-7f3a(.|\n)*… and 14 more\n  The seed is healthy"):
        pair(many, manifest(), seed_name="s-7f3a")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tensors": (tensor(), tensor())}, "names a tensor twice"),
        ({"tensors": (tensor("i"),), "inline": (InlineEntry("i", "int8", (1,), b"x"),)}, "names a tensor twice"),
        ({"states": (StateEntry("s", 1, False), StateEntry("s", 2, False))}, "names a value twice"),
        ({"tensors": (tensor(group=1),)}, "outside the manifest"),
        ({"tensors": (tensor(group=-2),)}, "outside the manifest"),
        ({"tensors": (tensor(offset=12),)}, "outside the manifest"),
        ({"tensors": (tensor(offset=-1),)}, "outside the manifest"),
        ({"tensors": (tensor(shape=(2,)),)}, "do not belong together"),
        ({"tensors": (tensor(shape=(2, -3)),)}, "do not belong together"),
        ({"group_nbytes": (0,)}, "at least one byte"),
        ({"inline": (InlineEntry("i", "int8", (1,), bytes(MAX_INLINE_NBYTES + 1)),)}, "inline tensors exceed"),
    ],
)
def test_a_broken_manifest_is_refused_at_birth_and_from_the_wire(changes: dict[str, object], says: str) -> None:
    fields = {"rank": RankIdentity(), "tensors": (), "group_nbytes": (12,), "states": (), "inline": ()} | changes
    with pytest.raises(ValueError, match=says):
        Manifest(**fields)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=says):
        decode_manifest(msgspec.msgpack.encode(fields))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_manifest_or_a_value_error(data: bytes) -> None:
    with pytest.raises(ValueError, match="not a manifest"):
        decode_manifest(data)


@given(st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_manifest_is_refused_or_does_not_pair_silently(at: int, value: int) -> None:
    data = bytearray(encode_manifest(FULL))
    data[at % len(data)] = value
    with contextlib.suppress(ValueError, ManifestMismatch):
        pair(decode_manifest(bytes(data)), FULL)


def test_bottomless_nesting_from_a_peer_is_refused() -> None:
    with pytest.raises(ValueError, match="not a manifest"):
        decode_manifest(b"\x81\xa1x" + b"\x91" * 100_000)


@given(st.integers(0, 8), st.randoms(use_true_random=False))
def test_a_plan_holds_every_group_once(count: int, rng: random.Random) -> None:
    sizes = tuple(rng.randint(1, 1 << 40) for _ in range(count))
    tensors = [tensor(f"t{i}", shape=(1,), stride=(1,), group=i) for i in range(count)]
    both = manifest(*tensors, group_nbytes=sizes)
    plan = pair(both, both)
    assert (plan.group_nbytes, plan.nbytes) == (sizes, sum(sizes))


def test_a_scalar_reads_as_one() -> None:
    assert tensor(shape=(), stride=()).describe() == "bfloat16[]"
    assert tensor(stride=(1, 2)).describe() == "bfloat16[2, 3] stride [1, 2]"
