"""What can't be carried is refused by name; what changed since it was noted is followed, or named."""

import time
import weakref

import pytest
import torch
from support.every_kind import Rules, holder, noted, resolved
from torch import nn

from rfork.errors import ManifestMismatch, UnsupportedModel
from rfork.manifest import InlineEntry, StateEntry, pair


class Method:
    """A quantization method, before anything was set on it."""


META = torch.device("meta")


class Wrapper(torch.Tensor):
    """A tensor made of another tensor, as quantization libraries and DTensor have them."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "Wrapper":
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        raise NotImplementedError


@pytest.mark.parametrize(
    ("tensor", "why"),
    [
        (torch.empty(3, device="meta"), "meta device"),
        (torch.eye(3).to_sparse(), "not strided"),
        (torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8), "torch quantization"),
        (Wrapper(torch.ones(3)), "wraps other tensors"),
        (nn.UninitializedParameter(), "no shape yet"),
        (torch.ones(3, dtype=torch.complex64).conj(), "lazy conjugate"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "wraps other tensors"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_a_tensor_that_is_no_plain_memory_is_refused_by_name(tensor: torch.Tensor, why: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"scales\['k'\].*{why}"):
        resolved(holder(scales={"k": tensor, "fine": torch.ones(1)}))


def test_released_memory_is_refused_by_name() -> None:
    tensor = torch.ones(8)
    inventory = noted(holder(t=tensor))
    tensor.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedModel, match="t: its memory is released"):
        inventory.resolve()


def test_a_set_of_tensors_is_refused_by_name() -> None:
    with pytest.raises(UnsupportedModel, match="bag is a set that holds tensors"):
        noted(holder(bag={torch.ones(1)}))


def test_a_tensor_under_a_nameless_key_is_refused() -> None:
    with pytest.raises(UnsupportedModel, match="cache holds a tensor under a object key"):
        noted(holder(cache={object(): torch.ones(1)}))


class Closed(Rules):
    def descend(self, value: object) -> bool:
        return False


@pytest.mark.parametrize(
    "state", [torch.ones(1), {"s": torch.ones(1)}, [torch.ones(1)]], ids=["direct", "dict", "list"]
)
def test_an_unknown_object_that_holds_tensors_is_refused_by_name(state: object) -> None:
    method = Method()
    method.state = state
    with pytest.raises(UnsupportedModel, match=r"method \(.*Method\) holds tensors"):
        noted(holder(method=method), rules=Closed())


def test_an_unknown_object_that_hides_a_module_is_refused_by_name() -> None:
    method = Method()
    method.layers = [nn.Linear(1, 1)]
    with pytest.raises(UnsupportedModel, match=r"method \(.*Method\) holds a module"):
        noted(holder(method=method), rules=Closed())


def test_an_unknown_object_may_hold_what_is_listed_already() -> None:
    model, method = nn.ModuleDict({"linear": nn.Linear(2, 2)}), Method()
    method.linear, method.weight, method.row = model["linear"], model["linear"].weight, model["linear"].weight[0]
    model.method = method
    assert list(noted(model, rules=Closed()).resolve().tensors) == ["linear.bias", "linear.weight"]


def test_an_unknown_object_without_tensors_is_left_alone() -> None:
    method = Method()
    method.flag, method.names = True, ["a"]
    assert not noted(holder(method=method), rules=Closed()).resolve().manifest.states


def test_a_scripted_module_is_refused_by_name() -> None:
    model = holder()
    model.inner = torch.jit.script(nn.Linear(2, 2))
    with pytest.raises(UnsupportedModel, match=r"inner \(RecursiveScriptModule\)"):
        noted(model)


def test_nesting_without_end_is_refused_by_name() -> None:
    value: object = torch.ones(1)
    for _ in range(40):
        value = [value]
    with pytest.raises(UnsupportedModel, match=r"deep\[0\].* nested deeper than 32"):
        noted(holder(deep=value))


def test_two_values_of_one_name_are_refused() -> None:
    model = nn.Linear(2, 2)
    model.__dict__["weight"] = torch.ones(1)
    with pytest.raises(UnsupportedModel, match="two different values are called weight"):
        noted(model)


def test_reallocated_weights_are_followed() -> None:
    model = nn.Linear(2, 2)
    inventory = noted(model)
    model.weight = nn.Parameter(torch.zeros(2, 2))
    shard = inventory.resolve()
    assert shard.tensors["weight"] is model.weight
    assert model.weight.data_ptr() in shard.addresses


def test_a_weight_shared_after_loading_joins_its_group() -> None:
    """Drafts take the target's embedding once both are loaded."""
    model = holder(embed=nn.Parameter(torch.ones(4)), head=nn.Parameter(torch.ones(4)))
    inventory = noted(model)
    assert [t.group for t in inventory.resolve().manifest.tensors] == [0, 1]
    model.head = model.embed
    assert [t.group for t in inventory.resolve().manifest.tensors] == [0, 0]


@pytest.mark.parametrize("gone", ["deleted", "none"])
def test_a_dropped_tensor_is_absent_and_pairing_sees_it(gone: str) -> None:
    model, whole = holder(a=torch.ones(1), b=torch.ones(1)), holder(a=torch.ones(1), b=torch.ones(1))
    inventory = noted(model)
    if gone == "deleted":
        del model.b
    else:
        model.b = None
    shard = inventory.resolve()
    assert list(shard.tensors) == ["a"]
    assert StateEntry("b", "absent", False) in shard.manifest.states
    with pytest.raises(ManifestMismatch, match="b: only there"):
        pair(resolved(whole).manifest, shard.manifest)


def test_a_container_that_shrank_loses_its_tensors_only() -> None:
    model = holder(items=[torch.ones(1), torch.ones(1)], quant={"s": [torch.ones(1)]})
    inventory = noted(model)
    model.items.pop()
    model.quant = None
    shard = inventory.resolve()
    assert list(shard.tensors) == ["items[0]"]
    assert [s.name for s in shard.manifest.states] == ["items[1]", "quant['s'][0]"]


def test_a_tensor_that_became_something_else_is_refused_by_name() -> None:
    model = holder(a=torch.ones(1))
    inventory = noted(model)
    model.a = [1]
    with pytest.raises(UnsupportedModel, match="a was a tensor when the loader returned and is a list now"):
        inventory.resolve()


def test_a_module_that_is_no_longer_shared_is_refused_by_name() -> None:
    model = nn.ModuleDict({"a": nn.Linear(1, 1)})
    model["b"] = model["a"]
    inventory = noted(model)
    model["b"] = nn.Linear(1, 1)
    with pytest.raises(UnsupportedModel, match="b was a when the loader returned"):
        inventory.resolve()


def test_what_is_born_later_stays_out() -> None:
    model = holder(a=torch.ones(1), cache={})
    inventory = noted(model)
    model.cache["lazy"], model.workspace = torch.ones(1), torch.ones(1)
    assert list(inventory.resolve().tensors) == ["a"]


def test_a_counter_that_serving_moves_does_not_matter() -> None:
    model = holder(calls=0, factor=1.0)
    inventory = noted(model)
    model.calls, model.factor = 17, 2.0
    assert inventory.resolve().manifest.states == (StateEntry("calls", 0, False), StateEntry("factor", 2.0, True))


def test_an_inventory_keeps_no_tensor_alive() -> None:
    model = nn.Linear(4, 4)
    inventory = noted(model)
    raw = weakref.ref(model.weight)
    model.weight = nn.Parameter(torch.zeros(4, 4))
    assert raw() is None
    assert inventory.resolve().tensors["weight"] is model.weight


def test_small_tensors_off_the_device_travel_inside_the_manifest() -> None:
    seed = holder(t=torch.tensor([[1.5, 2.5]], dtype=torch.bfloat16), wide=torch.ones(1).expand(3), n=torch.tensor(7))
    client = holder(t=torch.zeros(2, 1, dtype=torch.bfloat16).t(), wide=torch.zeros(1).expand(3), n=torch.tensor(0))
    here, there = resolved(client, device=META), resolved(seed, device=META)
    assert not there.manifest.tensors
    plan = pair(there.manifest, here.manifest)
    here.apply(plan.set_states, plan.set_inline)
    assert torch.equal(client.t, seed.t)
    assert client.t.stride() == (1, 1)
    assert torch.equal(client.wide, seed.wide)
    assert client.n.item() == 7


def test_large_tensors_off_the_device_are_refused_by_name() -> None:
    model = holder(a=torch.ones(100), offloaded=torch.ones(1 << 18))
    with pytest.raises(UnsupportedModel, match=r"offloaded \(1048576 bytes\) is on cpu, not on meta"):
        resolved(model, device=META)


def test_values_that_the_shard_does_not_have_are_not_set() -> None:
    shard = resolved(holder(a=1.0, n=1, t=torch.ones(2)), device=META)
    for state in (StateEntry("b", 1.0, True), StateEntry("n", 2.0, True), StateEntry("a", "x", True)):
        with pytest.raises(ManifestMismatch, match="no carried value"):
            shard.apply([state], [])
    for entry in (InlineEntry("t", "float32", (3,), b"\0" * 12), InlineEntry("t", "float32", (2,), b"\0" * 7)):
        with pytest.raises(ManifestMismatch, match="t:"):
            shard.apply([], [entry])


def test_weights_made_under_inference_mode_are_set_too() -> None:
    with torch.inference_mode():
        model = holder(t=torch.zeros(2))
    shard = resolved(model, device=META)
    shard.apply([], [InlineEntry("t", "float32", (2,), torch.ones(2).numpy().tobytes())])
    assert model.t.tolist() == [1.0, 1.0]


def test_twenty_four_thousand_tensors_are_listed_in_seconds() -> None:
    layers = nn.ModuleList(holder(weight=nn.Parameter(torch.ones(1)), scale=1.0, bias=None) for _ in range(24_000))
    start = time.process_time()
    shard = noted(layers, rules=Rules()).resolve()
    assert len(shard.manifest.tensors) == 24_000
    assert time.process_time() - start < 10  # 1 s of work; a look at all of them for each takes minutes
