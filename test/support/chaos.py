"""A whole fleet in one process, without SGLang: real node services, agents, listeners and forks of a torch model, and a
stand-in for the disk.

A `Stage` has seeds; `Stage.load` is what an instance does at its start, the fallback included.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field

import torch
from torch import nn

from rfork.client.agreement import Agreement
from rfork.client.contract import LocalShard
from rfork.client.fork import Fork, ForkOutcome
from rfork.client.sources import Addresses
from rfork.clock import Clock, ManualClock
from rfork.config import Config
from rfork.errors import NoSeedAvailable, NotQuiet, RForkError
from rfork.fence import check_fence
from rfork.identity import Content, InstanceId, RankIdentity
from rfork.inventory import ResolvedShard
from rfork.inventory.target import PullTarget
from rfork.seed.rank import RankAgent
from rfork.transports.base import Transport
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import WeightsReport
from support.every_kind import noted
from support.leaks import old_objects_aside
from support.seed_node import Seed
from support.seed_rank import CHECKPOINT, IDENTITY

RANK = RankIdentity()
ROWS = (1, 7, 64, 300, 1000, 2, 90, 700)
"""Of the weights, 256 bytes each row: from 256 bytes to 250 KiB, the largest in four chunks."""


class TinyModel(nn.Module):
    """Weights of many sizes, a tied one, a buffer, an empty one, a tensor in a dict, and a float set by loading."""

    def __init__(self, fill: int | None) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(fill or 0)

        def made(rows: int) -> torch.Tensor:
            raw = torch.zeros(rows, 256, dtype=torch.uint8)
            return raw if fill is None else raw.random_(0, 256, generator=generator)

        self.layers = nn.ParameterList(nn.Parameter(made(rows), requires_grad=False) for rows in ROWS)
        self.head = self.layers[3]
        self.register_buffer("scales", made(3), persistent=False)
        self.empty = nn.Parameter(torch.empty(0), requires_grad=False)
        self.tables = {"w_kc": made(5)}
        self.k_scale_float = 1.0 if fill is None else 0.5 + fill

    def image(self) -> tuple[bytes | float, ...]:
        """Everything that inference would read."""
        tensors = [*self.layers, self.head, self.scales, *self.tables.values()]
        return (*(t.numpy().tobytes() for t in tensors), self.k_scale_float)


@dataclass
class ModelShard:
    """A model as a seed's agent wants it."""

    model: TinyModel
    rank: RankIdentity = RANK

    def __post_init__(self) -> None:
        self.inventory = noted(self.model)

    def resolve(self) -> ResolvedShard:
        return self.inventory.resolve()


@dataclass
class Ending:
    """How a start ended: where the weights are from (`seed`, `disk`, or `exit` where the process must end)."""

    source: str
    reason: str
    detail: str
    elapsed_s: float
    model: TinyModel | None = None
    report: WeightsReport | None = None
    content: Content | None = None
    abandoned: list[weakref.ref[TinyModel]] = field(default_factory=list)


class Stage:
    """Seeds of the same weights on one fabric; `right` is what every instance must hold in the end."""

    FILL = 3

    def __init__(self, stack: ExitStack, *, num_seeds: int = 1, **config: object) -> None:
        torch.set_num_threads(1)  # its pool is slower than one thread for tensors like these
        stack.enter_context(old_objects_aside())
        self.right = TinyModel(self.FILL).image()
        self.fabric = MemoryFabric()
        self.seeds: list[Seed] = []
        self.models: list[TinyModel] = []
        for _ in range(num_seeds):
            seed = Seed(stack, **{"lease_ttl_s": 30, "capacity": 64, **config})
            seed.fabric = self.fabric
            self.models.append(TinyModel(self.FILL))
            seed.start().add(ModelShard(self.models[-1]))  # type: ignore[arg-type]
            seed.node.ready()
            self.seeds.append(seed)
        for seed in self.seeds:
            seed.wait("serving")

    @property
    def addresses(self) -> list[str]:
        return [str(seed.http.base_url).rstrip("/") for seed in self.seeds]

    @property
    def agent(self) -> RankAgent:
        """The first seed's."""
        return self.seeds[0].agents[0]

    def transport(self) -> Transport:
        return MemoryTransport(self.fabric)

    def load(
        self,
        transport: Transport | None = None,
        *,
        addresses: Sequence[str] | None = None,
        clock: Clock | None = None,
        wrap: Callable[[PullTarget], LocalShard] | None = None,
        **settings: object,
    ) -> Ending:
        """Fork from the seeds in order, else read the "disk"."""
        clock = clock or ManualClock()
        config = Config(**{"seek_timeout_s": 2.0, "match_timeout_s": 5.0, **settings})  # type: ignore[arg-type]
        addresses = self.addresses if addresses is None else addresses
        started_s, built = clock.now(), []
        try:
            model, outcome = self._fork(transport or self.transport(), addresses, config, clock, wrap, built)
            elapsed_s = clock.now() - started_s
            return Ending("seed", "", "", elapsed_s, model, outcome.report, outcome.content)
        except NotQuiet as error:
            return Ending("exit", error.reason, str(error), clock.now() - started_s)
        except NoSeedAvailable as error:
            reason, detail = error.reason, str(error)
        except Exception as error:
            if isinstance(error, RForkError):
                raise
            reason, detail = "error", str(error)
        ending = Ending("disk", reason, detail, clock.now() - started_s, abandoned=built)
        ending.model = TinyModel(self.FILL)
        return ending

    def _fork(
        self,
        transport: Transport,
        addresses: Sequence[str],
        config: Config,
        clock: Clock,
        wrap: Callable[[PullTarget], LocalShard] | None,
        built: list[weakref.ref[TinyModel]],
    ) -> tuple[TinyModel, ForkOutcome]:
        models: list[TinyModel] = []

        def build() -> LocalShard:
            models.append(TinyModel(None))
            built.append(weakref.ref(models[-1]))
            target = PullTarget(noted(models[-1]).resolve())
            return wrap(target) if wrap else target

        outcome = Fork(
            who=RANK,
            identity=IDENTITY,
            content=CHECKPOINT,
            instance_id=InstanceId("i-client"),
            seeds=Addresses(addresses, (), config, clock),
            settings=config,
            fabrics=GivenFabrics([transport]),
            agreement=Agreement(None, rank=0, num_ranks=1, name="target", timeout_s=5),
            check_fence=check_fence,
            clock=clock,
        ).run(build)
        return models[-1], outcome

    def assert_right(self, ending: Ending) -> None:
        """It serves the right weights, and nothing is left of what it tried."""
        assert ending.model is not None, ending
        assert ending.model.image() == self.right, f"wrong weights: {ending}"
        assert self.fabric.num_open == sum(len(s.agents) for s in self.seeds), "a pull engine is left"
        if any(ref() is not None for ref in ending.abandoned):
            gc.collect()
        assert all(ref() is None for ref in ending.abandoned), "the half-built model is still there"
