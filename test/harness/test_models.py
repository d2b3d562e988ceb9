"""The tiny checkpoints."""

import hashlib
from pathlib import Path

import pytest
from safetensors import safe_open
from support.models import RECIPES, Models


def digest(path: Path) -> str:
    return hashlib.sha256((path / "model.safetensors").read_bytes()).hexdigest()


@pytest.mark.parametrize("name", RECIPES)
def test_equal_recipes_and_seeds_give_equal_bytes(name: str, models: Models, tmp_path: Path) -> None:
    assert digest(models.path(name)) == digest(Models(tmp_path).path(name))


def test_another_seed_changes_the_weights_and_nothing_else(models: Models) -> None:
    one, other = models.path("llama", seed=1), models.path("llama", seed=2)
    assert digest(one) != digest(other)
    for file in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        assert (one / file).read_bytes() == (other / file).read_bytes()


def test_shards_hold_each_tensor_once(models: Models) -> None:
    whole, sharded = models.path("llama"), models.path("llama", num_shards=3)
    names = []
    for file in sorted(sharded.glob("*.safetensors")):
        with safe_open(file, "pt") as part:
            names += part.keys()
    with safe_open(whole / "model.safetensors", "pt") as all_of_it:
        assert sorted(names) == sorted(all_of_it.keys())


def test_config_changes_reach_the_checkpoint(models: Models) -> None:
    assert models.path("llama", num_hidden_layers=3) != models.path("llama")
    with safe_open(models.path("llama", num_hidden_layers=3) / "model.safetensors", "pt") as checkpoint:
        assert "model.layers.2.mlp.down_proj.weight" in checkpoint.keys()  # noqa: SIM118 (not a dict)
