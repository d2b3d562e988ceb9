"""The inventory finds everything, and what it lists is enough to make another model equal."""

import ctypes
import functools
import math

import torch
from support.every_kind import CPU, EveryKind, Pair, holder, resolved

from rfork.binding import Binding, bind
from rfork.fence import FencePage
from rfork.inventory import ResolvedShard
from rfork.inventory.target import PullTarget
from rfork.manifest import decode_manifest, encode_manifest, pair


def binding_of(shard: ResolvedShard, fence: FencePage) -> Binding:
    return Binding(
        manifest_digest=shard.manifest.digest,
        generation=2,
        regions=shard.regions_for([fence.tensor]),
        addresses=shard.addresses,
        group_nbytes=shard.manifest.group_nbytes,
        fence_address=fence.address,
        fence_nbytes=fence.nbytes,
    )


def fork(seed: ResolvedShard, client: ResolvedShard) -> None:
    """All that a pull does, without a network."""
    plan = pair(decode_manifest(encode_manifest(seed.manifest)), client.manifest)
    bindings = [binding_of(s, FencePage("i", CPU)) for s in (client, seed)]
    for part in bind(plan, *bindings, max_slice_nbytes=100):
        ctypes.memmove(part.local, part.remote, part.nbytes)
    client.apply(plan.set_states, plan.set_inline)


def raw_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_that_the_model_made_lies_in_the_manifest() -> None:
    model = EveryKind(seed=1)
    shard = resolved(model)
    covered = set()
    for address, nbytes in zip(shard.addresses, shard.manifest.group_nbytes, strict=True):
        covered.update(range(address, address + nbytes))
    for made in model.made():
        assert covered >= set(range(made.data_ptr(), made.data_ptr() + made.nbytes)), made.shape


def test_groups_that_one_model_lends_another_make_the_two_equal() -> None:
    """What a draft does with what its target has already."""
    seed_model, client_model = EveryKind(seed=1), EveryKind(seed=2)
    seed, client = resolved(seed_model), resolved(client_model)
    before = {n: t.data_ptr() for n, t in client.tensors.items()}
    assert seed.digests() != client.digests()

    target = PullTarget(client)
    for group in range(len(seed.addresses)):
        lent = seed.group_bytes(group)
        assert lent is not None
        assert (lent.data_ptr(), lent.nbytes) == (seed.addresses[group], seed.manifest.group_nbytes[group])
        target.copy_in(group, lent)

    again = resolved(client_model)
    assert again.digests() == seed.digests()
    assert {n: t.data_ptr() for n, t in again.tensors.items()} == before


def test_bytes_moved_by_the_manifest_alone_make_two_models_equal() -> None:
    seed_model, client_model = EveryKind(seed=1), EveryKind(seed=2)
    seed, client = resolved(seed_model), resolved(client_model)
    before = {n: t.data_ptr() for n, t in client.tensors.items()}
    assert any(raw_bytes(t) != raw_bytes(client.tensors[n]) for n, t in seed.tensors.items())

    fork(seed, client)

    again = resolved(client_model)
    for name, theirs in seed.tensors.items():
        mine = again.tensors[name]
        assert raw_bytes(mine) == raw_bytes(theirs), name
        assert (mine.dtype, mine.shape, mine.data_ptr()) == (theirs.dtype, theirs.shape, before[name]), name
    assert again.manifest.states == seed.manifest.states
    assert again.manifest.tensors == seed.manifest.tensors
    assert again.digests().values == seed.digests().values


def test_carried_floats_reach_parameters_records_slots_and_tuples() -> None:
    model, other = EveryKind(seed=1), EveryKind(seed=2)
    fork(resolved(other), resolved(model))
    assert model.layers[1]["attn"].k_scale_float == other.layers[1]["attn"].k_scale_float
    assert model.proj.weight.scale_float == other.proj.weight.scale_float
    assert model.proj.scheme.scale_float == other.proj.scheme.scale_float
    assert model.proj.quant_method.scales[7][1] == other.proj.quant_method.scales[7][1]
    assert model.record.factor == other.record.factor
    assert model.slotted.factor == other.slotted.factor
    assert model.nested[1][0].factor == other.nested[1][0].factor
    assert isinstance(model.pair, Pair)
    assert model.pair.factor == other.pair.factor


def test_names_say_where_a_tensor_hangs() -> None:
    names = set(resolved(EveryKind(seed=1)).tensors)
    assert {
        "embed.weight",
        "lm_head.weight",
        "layers.0.attn.w_kc",
        "final.gemma_weight",
        "final.eps_table",
        "proj.weight.shards[0]",
        "proj.quant_method.scales['k'][0]",
        "proj.quant_method.scales[7][0]",
        "proj.scheme.scale",
        "hidden_list[0].weight",
        "hidden_dict['a']['b'].kept",
        "record.table",
        "slotted.table",
        "nested[1][0][0]",
        "odd['hostile'].hidden",
    } <= names


def test_tied_weights_are_two_names_in_one_group() -> None:
    entries = {t.name: t for t in resolved(EveryKind(seed=1)).manifest.tensors}
    tied, head = entries["embed.weight"], entries["lm_head.weight"]
    assert (tied.group, tied.offset) == (head.group, head.offset) == (tied.group, 0)


def test_a_module_under_two_names_is_listed_once_and_the_second_name_is_compared() -> None:
    manifest = resolved(EveryKind(seed=1)).manifest
    assert not [t.name for t in manifest.tensors if t.name.startswith("norm.")]
    assert {s.name: s.value for s in manifest.states}["norm is"] == "final"


def test_overlapping_views_share_a_group_and_separate_halves_do_not() -> None:
    entries = {t.name: t for t in resolved(EveryKind(seed=1)).manifest.tensors}
    whole, window = entries["layers.0.attn.whole"], entries["layers.0.attn.window"]
    assert (whole.group, whole.offset, window.offset) == (window.group, 0, 32)
    assert entries["layers.0.attn.w_kc"].group != entries["layers.0.attn.w_vc"].group


def test_a_chain_of_overlaps_is_one_group_even_where_its_ends_do_not_touch() -> None:
    storage = torch.arange(30)
    shard = resolved(holder(a=storage[0:10], b=storage[20:30], c=storage[8:22]))
    assert [(t.group, t.offset) for t in shard.manifest.tensors] == [(0, 0), (0, 160), (0, 64)]
    assert shard.manifest.group_nbytes == (240,)


def test_groups_are_numbered_by_their_first_name_wherever_they_lie() -> None:
    storage = torch.arange(20)
    low_first = resolved(holder(a=storage[:10], b=storage[10:]))
    high_first = resolved(holder(a=storage[10:], b=storage[:10]))
    assert low_first.manifest == high_first.manifest
    assert low_first.addresses == high_first.addresses[::-1]


def test_the_order_of_assignment_does_not_change_the_manifest() -> None:
    a, b = torch.ones(2), torch.zeros(3)
    one, two = holder(a=a, b=b, n=1), holder(n=1, b=b, a=a)
    one.d, two.d = {"x": a, "y": b}, {"y": b, "x": a}
    assert resolved(one).manifest == resolved(two).manifest


def test_a_strided_tensor_moves_its_whole_span() -> None:
    storage = torch.arange(100, dtype=torch.int32)
    shard = resolved(holder(t=storage.as_strided((3, 4), (20, 2), 5)))
    (entry,) = shard.manifest.tensors
    assert (entry.stride, shard.manifest.group_nbytes) == ((20, 2), (4 * (2 * 20 + 3 * 2 + 1),))
    assert shard.addresses == (storage.data_ptr() + 20,)


def test_empty_tensors_have_no_bytes_but_a_name_and_shape() -> None:
    shard = resolved(holder(a=torch.empty(0), b=torch.empty(0), c=torch.empty(3, 0, 5)[:, :, ::2], d=torch.ones(1)))
    a, b, c, d = shard.manifest.tensors
    assert [(t.group, t.offset) for t in (a, b, c, d)] == [(-1, 0)] * 3 + [(0, 0)]
    assert c.stride == (3, 3, 1)
    assert len(shard.regions) == 1


def test_pure_modules_and_runtime_values_are_in_no_manifest() -> None:
    manifest = resolved(EveryKind(seed=1)).manifest
    names = [t.name for t in manifest.tensors] + [s.name for s in manifest.states]
    assert not [n for n in names if "rotary" in n or n.endswith("port")]


def test_flags_are_compared_and_floats_are_carried() -> None:
    shard = resolved(
        holder(flag=True, size=3, text="x", nothing=None, dtype=torch.bfloat16, factor=0.5, shape=(1, (2,)))
    )
    assert [(s.name, s.value, s.carried) for s in shard.manifest.states] == [
        ("dtype", "torch.bfloat16", False),
        ("factor", 0.5, True),
        ("flag", True, False),
        ("nothing", None, False),
        ("shape", "tuple(1, tuple(2))", False),
        ("size", 3, False),
        ("text", "x", False),
    ]


def test_nan_and_infinity_survive_the_journey() -> None:
    seed = holder(a=math.nan, b=math.inf, c=-math.inf, t=torch.ones(1))
    client = holder(a=1.0, b=1.0, c=1.0, t=torch.zeros(1))
    fork(resolved(seed), resolved(client))
    assert math.isnan(client.a)
    assert (client.b, client.c) == (math.inf, -math.inf)


def test_huge_integers_and_odd_texts_have_a_form_on_the_wire() -> None:
    shard = resolved(holder(big=1 << 80, odd="\udcff", long="x" * 1000, data=b"\xff"))
    values = {s.name: s.value for s in decode_manifest(encode_manifest(shard.manifest)).states}
    assert values["big"] == str(1 << 80)
    assert values["odd"] == "\\udcff"
    assert len(str(values["long"])) < 200


def test_a_cycle_of_containers_ends() -> None:
    loop: list[object] = [torch.ones(1)]
    loop.append(loop)
    assert list(resolved(holder(loop=loop)).tensors) == ["loop[0]"]


def test_tensors_bound_into_a_partial_are_found() -> None:
    shard = resolved(
        holder(kernel=functools.partial(print, torch.ones(1), scale=torch.ones(2)), plain=functools.partial(print))
    )
    assert list(shard.tensors) == ["kernel.args[0]", "kernel.keywords['scale']"]
