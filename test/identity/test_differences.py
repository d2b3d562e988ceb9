"""Two sides that differ in exactly one thing: refused before a byte moves, and the thing is named.

Real ends in one process: the seed service, its rank, the client's `Fork`, and a transport that moves real bytes. What
an identity can tell is refused by the seed; a layout that differs in spite of equal identities, by the client.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from support.seed_node import Seed
from support.seed_rank import make_agent, report
from torch import nn

from rfork.client.agreement import Agreement
from rfork.client.fork import Fork, ForkOutcome
from rfork.client.sources import Addresses
from rfork.clock import SystemClock
from rfork.config import load_config
from rfork.errors import NoSeedAvailable
from rfork.fence import check_fence
from rfork.identity import Content, ModelIdentity, RankIdentity, new_instance_id
from rfork.inventory import Inventory
from rfork.inventory.target import PullTarget
from rfork.seed.offer import SeedShard
from rfork.transports.memory import MemoryTransport
from rfork.transports.select import GivenFabrics

CPU = torch.device("cpu")
CONTENT = Content("checkpoint", "aaaa")
FIELDS = {
    "engine.version": "0.5.23",
    "config.rope_theta": 10000.0,
    "config.tie_word_embeddings": False,
    "model.quantization": None,
    "args.fp8_gemm_runner_backend": "auto",
    "parallel.tp_size": 1,
}


class NoRules:
    """Rules for a model in which everything is weights."""

    def is_pure(self, module: nn.Module) -> bool:
        return False

    def descend(self, value: object) -> bool:
        return False

    def is_runtime(self, owner: object, name: str) -> bool:
        return False


class Model(nn.Module):
    """Two matrices and a scale; `value` is in every element."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.full((8, 16), value, dtype=torch.bfloat16), requires_grad=False)
        self.head = nn.Parameter(torch.full((8, 16), value, dtype=torch.bfloat16), requires_grad=False)
        self.register_buffer("scale", torch.full((4,), value, dtype=torch.float32))
        self.is_transposed = False
        self.k_scale_float = float(value)


def noted(model: Model) -> Inventory:
    return Inventory.note(model, rank=RankIdentity(), device=CPU, rules=NoRules())


@pytest.fixture
def seed() -> Iterator[Seed]:
    with ExitStack() as stack:
        seed = Seed(stack).start()
        inventory = noted(Model(7))
        agent = make_agent(seed.node.environment(), seed.fabric)
        stack.callback(agent.close)
        agent.loaded(RankIdentity(), report())
        agent.publish([SeedShard(resolve=inventory.resolve, identity=ModelIdentity("test", FIELDS), content=CONTENT)])
        seed.node.ready()
        seed.wait("serving")
        yield seed


def fork(seed: Seed, model: Model, *, content: Content = CONTENT, **fields: Any) -> ForkOutcome:
    settings = load_config(None, {"RFORK_SEEK_TIMEOUT_S": "5"})
    clock = SystemClock()
    return Fork(
        who=RankIdentity(),
        identity=ModelIdentity("test", {**FIELDS, **fields}),
        content=content,
        instance_id=new_instance_id(),
        seeds=Addresses([str(seed.http.base_url).rstrip("/")], [], settings, clock),
        settings=settings,
        fabrics=GivenFabrics([MemoryTransport(seed.fabric)]),
        agreement=Agreement(None, rank=0, num_ranks=1, name="target/1", timeout_s=5),
        check_fence=check_fence,
    ).run(lambda: PullTarget(noted(model).resolve()))


def untouched(model: Model) -> bool:
    return all(not t.any() for t in (model.embed, model.head, model.scale)) and not model.k_scale_float


def test_two_sides_that_are_equal_fork(seed: Seed) -> None:
    """Else the rest of this file would prove nothing."""
    model = Model(0)
    outcome = fork(seed, model)
    assert outcome.report.verify == "full"
    assert {float(t.mean()) for t in (model.embed, model.head, model.scale)} == {7.0}
    assert model.k_scale_float == 7.0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("engine.version", "0.5.22"),
        ("config.rope_theta", 20000.0),
        ("config.tie_word_embeddings", True),
        ("model.quantization", "fp8"),
        ("args.fp8_gemm_runner_backend", "triton"),
        ("parallel.tp_size", 2),
        ("env.SGLANG_MOE_PADDING", "1"),
    ],
)
def test_a_field_of_the_identity_is_refused_by_the_seed_and_named(field: str, value: object, seed: Seed) -> None:
    model = Model(0)
    with pytest.raises(NoSeedAvailable, match=field) as caught:
        fork(seed, model, **{field: value})
    assert caught.value.reason == "key_mismatch"
    assert untouched(model)


def test_other_weights_of_an_equal_model_are_refused_by_the_seed(seed: Seed) -> None:
    model = Model(0)
    with pytest.raises(NoSeedAvailable, match="other weights of the same model") as caught:
        fork(seed, model, content=Content("checkpoint", "bbbb"))
    assert caught.value.reason == "key_mismatch"
    assert untouched(model)


def float16(model: Model) -> None:
    model.embed.data = model.embed.data.to(torch.float16)


def transposed_shape(model: Model) -> None:
    model.embed.data = torch.zeros(16, 8, dtype=torch.bfloat16)


def other_stride(model: Model) -> None:
    model.embed.data = torch.zeros(16, 8, dtype=torch.bfloat16).t()


def tied(model: Model) -> None:
    model.head = model.embed


def one_more(model: Model) -> None:
    model.register_buffer("zero_point", torch.zeros(4))


def one_fewer(model: Model) -> None:
    del model.scale
    model.scale = None  # type: ignore[assignment]


def other_flag(model: Model) -> None:
    model.is_transposed = True


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (float16, r"embed: float16\[8, 16\] here, bfloat16\[8, 16\] there"),
        (transposed_shape, r"embed: bfloat16\[16, 8\] here, bfloat16\[8, 16\] there"),
        (other_stride, r"embed: bfloat16\[8, 16\] stride \[1, 8\] here, bfloat16\[8, 16\] there"),
        (tied, "head: "),
        (one_more, "zero_point: only here"),
        (one_fewer, "scale: only there"),
        (other_flag, "is_transposed: True here, False there"),
    ],
)
def test_a_layout_that_differs_is_refused_by_the_client_and_named(
    change: Callable[[Model], None], named: str, seed: Seed
) -> None:
    """Identities are equal, as if the difference had been forgotten in them: sizes in bytes are equal too, mostly."""
    model = Model(0)
    change(model)
    with pytest.raises(NoSeedAvailable, match=named) as caught:
        fork(seed, model)
    assert caught.value.reason == "manifest_mismatch"
    assert not any(t.any() for t in (*model.parameters(), *model.buffers()))
