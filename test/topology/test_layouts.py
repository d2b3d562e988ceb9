"""Every layout: each rank gets its own shard, and holds afterwards what a disk load in the same layout holds."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.holding import Probed, differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

PROMPTS = ("hello world", [5, 17, 300, 42, 8])


@dataclass(frozen=True)
class Row:
    """One row of the support table. `runs` is false where the CPU has no kernel for the forward pass."""

    model: str
    flags: str
    num_shards: int
    num_ranks: int
    runs: bool = True

    @property
    def name(self) -> str:
        return f"{self.model} {self.flags}".replace("--", "").replace("-size", "").replace(" ", "-")


ROWS = (
    Row("llama", "--tp 2", 2, 2),
    Row("qwen3-fp8-block", "--tp 2", 2, 2),
    Row("llama-w8a8-int8", "--tp 2", 2, 2),
    Row("deepseek-v2", "--tp 2", 2, 2),
    Row("qwen3", "--pp-size 2", 2, 2),
    Row("llama", "--tp 2 --pp-size 2", 4, 4),
    Row("qwen2-tied", "--dp 2", 1, 2),
    Row("qwen3-moe", "--tp 2 --ep 2", 2, 2),
    Row("deepseek-v2", "--tp 2 --dp 2 --enable-dp-attention", 2, 2),
)
MORE_ROWS = (
    Row("qwen3-moe", "--tp 2 --attn-cp-size 2 --moe-dp-size 2", 2, 2),
    Row("qwen2", "--tp 2 --dp 2 --enable-dp-attention", 2, 2),
)


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.long) for row in MORE_ROWS)], ids=lambda row: row.name
)
def test_every_rank_forks_its_own_shard_and_holds_what_the_disk_gives(row: Row, models: Models, fleet: Fleet) -> None:
    """Bytes, dtypes, shapes, strides, sharing and plain values of every rank, and greedy tokens where they run."""
    flags = row.flags.split()
    seed = start_seed(fleet, models.path(row.model), *flags)
    fork = start_fork(fleet, models.path(row.model), seed.server, *flags)
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert len(fork.sources) == row.num_shards
    assert len(fork.reports) == row.num_ranks
    assert len(fork.holdings) == row.num_ranks
    assert differences(fork, seed) == []
    if row.runs:
        assert tokens(fork) == tokens(seed)


def tokens(probed: Probed) -> list[tuple[int, ...]]:
    return [probed.server.generate(prompt).tokens for prompt in PROMPTS]
