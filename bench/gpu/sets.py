"""Sets of tensors that look like models, made in seconds: sizes and counts are what a loader feels, values are not."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from rfork.identity import RankIdentity
from rfork.inventory import Inventory


class Shape(NamedTuple):
    """One tensor of a set."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


class Plain:
    """InventoryRules for modules that hold parameters and nothing else."""

    def is_pure(self, module: nn.Module) -> bool:
        return False

    def descend(self, value: object) -> bool:
        return False

    def is_runtime(self, owner: object, name: str) -> bool:
        return False


def llama(layers: int, hidden: int, inner: int, kv: int, vocab: int) -> Iterator[Shape]:
    """A Llama as SGLang holds it: QKV and gate/up fused."""
    yield Shape("embed", (vocab, hidden))
    for i in range(layers):
        yield Shape(f"l{i}.norm1", (hidden,))
        yield Shape(f"l{i}.qkv", (hidden + 2 * kv, hidden))
        yield Shape(f"l{i}.o", (hidden, hidden))
        yield Shape(f"l{i}.norm2", (hidden,))
        yield Shape(f"l{i}.gate_up", (2 * inner, hidden))
        yield Shape(f"l{i}.down", (hidden, inner))
    yield Shape("norm", (hidden,))
    yield Shape("head", (vocab, hidden))


def small(pairs: int) -> Iterator[Shape]:
    """Tensors of 64 KiB and 2 KiB in turn: adapters, scales, experts of experts."""
    for i in range(pairs):
        yield Shape(f"t{i}.weight", (128, 256))
        yield Shape(f"t{i}.scale", (512,), torch.float32)


def experts(layers: int, num_experts: int, hidden: int, inner: int) -> Iterator[Shape]:
    """A block-FP8 mixture of experts: fused expert tensors, and a scale for each block of 128 x 128."""
    for i in range(layers):
        yield Shape(f"l{i}.router", (num_experts, hidden))
        yield Shape(f"l{i}.w13", (num_experts, 2 * inner, hidden), torch.float8_e4m3fn)
        yield Shape(f"l{i}.w13_scale", (num_experts, 2 * inner // 128, hidden // 128), torch.float32)
        yield Shape(f"l{i}.w2", (num_experts, hidden, inner), torch.float8_e4m3fn)
        yield Shape(f"l{i}.w2_scale", (num_experts, hidden // 128, inner // 128), torch.float32)


def shapes_of(name: str) -> list[Shape]:
    """The set called `name`. Raises KeyError."""
    return list(_SETS[name]())


_SETS = {
    "tiny": lambda: llama(layers=4, hidden=1024, inner=2816, kv=256, vocab=4096),  # 0.1 GB, for a rehearsal
    "llama-2g": lambda: llama(layers=16, hidden=2048, inner=8192, kv=512, vocab=32000),
    "llama-31g": lambda: llama(layers=40, hidden=5120, inner=20480, kv=1024, vocab=32000),
    "llama-82g": lambda: llama(layers=80, hidden=8192, inner=14336, kv=1024, vocab=32000),
    "small-1k": lambda: small(500),
    "small-24k": lambda: small(12_000),
    "fp8-moe": lambda: experts(layers=24, num_experts=64, hidden=2048, inner=1024),
}


def allocate(shapes: list[Shape], device: torch.device, *, fill: bool) -> nn.Module:
    """The set as a module. `fill`: random bytes; else memory as an engine gets it, host pages touched."""
    model = nn.Module()
    for name, shape, dtype in shapes:
        *path, last = name.split(".")
        owner = model
        for part in path:
            if part not in owner._modules:
                owner.add_module(part, nn.Module())
            owner = owner.get_submodule(part)
        data = torch.empty(shape, dtype=dtype, device=device)
        raw = data.view(torch.uint8)
        if fill:
            raw.random_(0, 256)
        elif device.type == "cpu":
            raw.zero_()
        owner.register_parameter(last, nn.Parameter(data, requires_grad=False))
    return model


def inventory_of(model: nn.Module, device: torch.device) -> Inventory:
    return Inventory.note(model, rank=RankIdentity(), device=device, rules=Plain())
