"""The platform that all tests run on, on the SGLang of this environment. `make test-compat` has the oldest one."""

import importlib.metadata

import pytest
from support.models import Models
from support.server import STOCK, Fleet

pytestmark = pytest.mark.server

LAYOUTS = {
    "dense": ("llama", ""),
    "tied": ("qwen2-tied", ""),
    "experts": ("qwen3-moe", ""),
    "latent attention": ("deepseek-v2", ""),
    "fp8": ("llama-fp8", ""),
    "fp8 blocks": ("qwen3-fp8-block", ""),
    "int8": ("llama-w8a8-int8", ""),
    "tensor parallel": ("llama", "--tp 2"),
    "pipeline parallel": ("llama", "--pp-size 2"),
    "data parallel": ("llama", "--dp 2"),
    "expert parallel": ("qwen3-moe", "--tp 2 --ep 2"),
    "attention data parallel": ("qwen3-moe", "--tp 2 --dp 2 --enable-dp-attention"),
}


@pytest.mark.parametrize(("model", "flags"), LAYOUTS.values(), ids=LAYOUTS)
def test_each_layout_serves(model: str, flags: str, fleet: Fleet, models: Models) -> None:
    tokens = fleet.start(models.path(model), *flags.split(), env=STOCK).generate().tokens
    assert len(set(tokens)) >= 8


def test_this_is_a_release_that_the_project_supports() -> None:
    assert importlib.metadata.version("sglang") in ("0.5.16", "0.5.23")
