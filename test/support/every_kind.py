"""A model with one of every kind of thing that inference can read, and rules that know it."""

from __future__ import annotations

import dataclasses
import enum
from collections import OrderedDict, deque
from typing import NamedTuple

import msgspec
import torch
from torch import nn

from rfork.identity import RankIdentity
from rfork.inventory import Inventory, ResolvedShard

CPU = torch.device("cpu")


class Maker:
    """Random tensors and floats from one seed; remembers every tensor, so that tests can ask whether all were found."""

    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        self._device = device
        self._generator = torch.Generator().manual_seed(seed)
        self.made: list[torch.Tensor] = []

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        nbytes = torch.empty(0, dtype=dtype).element_size()
        raw = torch.randint(0, 256, (*shape[:-1], shape[-1] * nbytes), generator=self._generator, dtype=torch.uint8)
        raw = raw.to(self._device)
        self.made.append(raw)
        return raw.view(dtype)

    def parameter(self, *shape: int, dtype: torch.dtype = torch.float32) -> nn.Parameter:
        return nn.Parameter(self.tensor(*shape, dtype=dtype), requires_grad=False)

    def number(self) -> float:
        return float(torch.rand((), generator=self._generator, dtype=torch.float64))


class Backend(enum.Enum):
    TRITON = "triton"


class PackedParameter(nn.Parameter):
    """Quantization code marks its parameters with subclasses and hangs values on them."""


@dataclasses.dataclass(frozen=True)
class FrozenScales:
    scale: torch.Tensor
    scale_float: float
    backend: Backend = Backend.TRITON


class Slotted:
    __slots__ = ("factor", "never_set", "table")

    def __init__(self, make: Maker) -> None:
        self.table, self.factor = make.tensor(3), make.number()


class Record(msgspec.Struct, frozen=True):
    table: torch.Tensor
    factor: float


class Pair(NamedTuple):
    tensor: torch.Tensor
    factor: float


class Hostile:
    """Raises whenever its code is run, as half-initialised engine objects do."""

    def __init__(self, make: Maker) -> None:
        object.__setattr__(self, "hidden", make.tensor(5))

    @property
    def weight(self) -> torch.Tensor:
        raise RuntimeError("a property was called")

    @property
    def __class__(self) -> type:
        raise RuntimeError("somebody asked isinstance")

    def __getattr__(self, name: str) -> object:
        raise RuntimeError(f"__getattr__({name})")

    def __setattr__(self, name: str, value: object) -> None:
        raise RuntimeError(f"__setattr__({name})")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("compared")

    __hash__ = None  # type: ignore[assignment]


class QuantMethod:
    def __init__(self, make: Maker, layer: nn.Module) -> None:
        self.layer = layer
        self.scales = {"k": [make.tensor(2), make.tensor(3)], 7: (make.tensor(1), make.number())}
        self.block_shape = [128, 128]
        self.dtype = torch.float8_e4m3fn


class Rotary(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("cos_sin_cache", torch.ones(length, 2), persistent=False)


class Norm(nn.Module):
    eps_table = torch.tensor([1e-6])

    def __init__(self, make: Maker) -> None:
        super().__init__()
        self.weight = make.parameter(8, dtype=torch.bfloat16)
        self.register_buffer("kept", make.tensor(4))
        self.register_buffer("gemma_weight", make.tensor(8), persistent=False)
        self.register_parameter("bias", None)
        self.variance_epsilon = 1e-6


class Fp8Linear(nn.Module):
    def __init__(self, make: Maker) -> None:
        super().__init__()
        self.weight = PackedParameter(make.tensor(6, 8, dtype=torch.float8_e4m3fn).t(), requires_grad=False)
        self.weight.scale_float = make.number()
        self.weight.output_dim = 0
        self.weight.shards = [make.tensor(2)]
        self.scale = nn.Parameter(torch.as_strided(make.tensor(1), (), ()), requires_grad=False)
        self.quant_method = QuantMethod(make, self)
        self.scheme = FrozenScales(make.tensor(2), make.number())


class Attention(nn.Module):
    def __init__(self, make: Maker, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary
        fused = make.tensor(4, 16)
        self.w_kc, self.w_vc = fused[:2].transpose(0, 1), fused[2:].transpose(0, 1)
        qkv = make.tensor(32)
        self.whole, self.window = qkv[:24], qkv[8:32]
        self.k_scale_float = make.number()
        self.broadcast = make.tensor(1).expand(9)
        self.port = 30000
        self.empty = torch.empty(0, 4, device=make.made[-1].device)


class EveryKind(nn.Module):
    def __init__(self, seed: int, device: torch.device = CPU) -> None:
        super().__init__()
        make = Maker(seed, device)
        self.embed = nn.Module()
        self.embed.weight = make.parameter(16, 8)
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed.weight
        rotary = Rotary(4 + seed)
        self.layers = nn.ModuleList(nn.ModuleDict({"attn": Attention(make, rotary)}) for _ in range(2))
        self.norm, self.proj = Norm(make), Fp8Linear(make)
        self.final = self.norm
        self.hidden_list, self.hidden_dict = [Norm(make)], {"a": {"b": Norm(make)}}
        self.slotted, self.record = Slotted(make), Record(make.tensor(2), make.number())
        self.pair = Pair(make.tensor(2), make.number())
        self.nested = (1, (Pair(make.tensor(2), make.number()),))
        self.queue, self.ordered = deque([make.tensor(2)]), OrderedDict(z=make.tensor(1), a=make.tensor(1))
        self.odd = {"hostile": Hostile(make)}
        self.mask = make.tensor(7, dtype=torch.uint8).gt(3)
        self.itself = self
        self.names, self.sizes = {"b", "a"}, (1, 2, 3)
        make.made[-1] = self.mask
        self._made = lambda: make.made

    def made(self) -> list[torch.Tensor]:
        return self._made()


class Rules:
    """What an engine would say about this model."""

    def is_pure(self, module: nn.Module) -> bool:
        return isinstance(module, Rotary)

    def descend(self, value: object) -> bool:
        return True

    def is_runtime(self, owner: object, name: str) -> bool:
        return name == "port"


def noted(model: nn.Module, *, device: torch.device = CPU, rules: Rules | None = None) -> Inventory:
    return Inventory.note(model, rank=RankIdentity(), device=device, rules=rules or Rules())


def resolved(model: nn.Module, *, device: torch.device = CPU, rules: Rules | None = None) -> ResolvedShard:
    return noted(model, device=device, rules=rules).resolve()


def holder(**attributes: object) -> nn.Module:
    """A module with these plain attributes."""
    module = nn.Module()
    for name, value in attributes.items():
        setattr(module, name, value)
    return module
