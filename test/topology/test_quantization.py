"""Each form of quantized weights that SGLang loads on a CPU: a fork holds what the disk gives, and computes alike."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from support.holding import differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet
from torch import nn

from rfork.errors import UnsupportedModel
from sglang_rfork.srt.model_loader.remote_instance_weight_loader_utils import fill_raw_weights

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Row:
    """One row of the support table. `runs` is false where the CPU has no kernel for the forward pass; `carried` is a
    plain number that loading sets, as it has to be in the fork too.
    """

    model: str
    flags: str = ""
    runs: bool = True
    carried: tuple[str, float] | None = None

    @property
    def name(self) -> str:
        return f"{self.model} {self.flags}".replace("--", "").strip().replace(" ", "-")


ROWS = (
    Row("llama-fp8-kv", carried=("model.layers.1.self_attn.attn.k_scale_float", 0.016)),
    Row("llama-awq", "--dtype float16", runs=False),
)
MORE_ROWS = (
    Row("deepseek-v2-fp8-block", runs=False),
    Row("llama-fp8"),
    Row("llama", "--quantization fp8"),
    Row("llama-compressed-int8"),
    Row("llama-compressed-fp8"),
    Row("llama-w8a8-fp8", runs=False),
    Row("llama-modelopt-fp8", runs=False),
    Row("llama-awq", "--dtype float16 --tp 2", runs=False),
    Row("qwen3-int8-block", runs=False),
    Row("qwen3-moe-fp8-block", runs=False),
    Row("deepseek-v2", "--quantization fp8", runs=False),
)


@pytest.mark.parametrize(
    "row", [*ROWS, *(pytest.param(row, marks=pytest.mark.long) for row in MORE_ROWS)], ids=lambda row: row.name
)
def test_quantized_weights_are_forked_as_the_disk_gives_them(row: Row, models: Models, fleet: Fleet) -> None:
    """Bytes, dtypes, shapes, strides, sharing and plain values, and greedy tokens where they run."""
    flags, model = row.flags.split(), models.path(row.model)
    seed = start_seed(fleet, model, *flags)
    fork = start_fork(fleet, model, seed.server, *flags)
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert differences(fork, seed) == []
    if row.carried:
        name, expected = row.carried
        assert next(iter(fork.holdings.values()))["values"][name] == pytest.approx(expected), name
    if row.runs:
        assert fork.server.generate() == seed.server.generate()


def test_weights_that_get_their_shape_from_the_checkpoint_are_refused_by_name() -> None:
    """GGUF: no layout can be built without reading the file, so the disk is read."""
    model = nn.Sequential(nn.Linear(2, 2), nn.LazyLinear(2))
    with pytest.raises(UnsupportedModel, match=r"1\.weight gets its shape while SGLang reads the checkpoint"):
        fill_raw_weights(model)
