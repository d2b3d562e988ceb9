"""Layers that something else wraps: carried where that is proven, refused by name where it is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from support.forking import serving, status
from support.holding import differences, start_fork, start_seed
from support.models import DENSE, Models
from support.outside import image_of
from support.plugins import install_plugin
from support.server import Fleet
from support.updates import assert_refuses, change

pytestmark = pytest.mark.server

LORA = ("--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "--lora-backend", "torch_native")


def adapter(folder: Path) -> Path:
    """One of rank 8 for what SGLang has as one layer, of which it wants to see `v_proj` too."""
    folder.mkdir()
    rows = {"q_proj": DENSE["num_attention_heads"], "v_proj": DENSE["num_key_value_heads"]}
    config = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": list(rows), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    tensors = {}
    for layer in range(DENSE["num_hidden_layers"]):
        for name, heads in rows.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.ones(8, DENSE["hidden_size"], dtype=torch.bfloat16)
            tensors[f"{prefix}.lora_B.weight"] = torch.ones(heads * DENSE["head_dim"], 8, dtype=torch.bfloat16)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def test_layers_wrapped_for_adapters_are_forked_by_what_is_in_them(models: Models, fleet: Fleet) -> None:
    """Both sides list their layers before SGLang wraps them; a forked one seeds the next, wrapped as it is by then. An
    adapter that a running seed loads changes no byte of what it serves.
    """
    seed = start_seed(fleet, models.path("llama"), *LORA)
    before, generation = image_of(seed.server), status(seed.server)["generation"]
    change(seed.server, "/load_lora_adapter", lora_name="a", lora_path=str(adapter(fleet.folder / "adapter")))
    assert status(seed.server)["generation"] == generation
    assert image_of(seed.server).differences(before) == []
    fork = start_fork(fleet, models.path("llama"), seed.server, *LORA)
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert differences(fork, seed) == []
    serving(fork.server)


def test_a_server_without_adapters_does_not_fork_from_one_with_them(models: Models, fleet: Fleet) -> None:
    seed = start_seed(fleet, models.path("llama"), *LORA)
    fork = start_fork(fleet, models.path("llama"), seed.server)
    assert "args.enable_lora" in str(fork.sources), fork.sources


EPLB = (
    *("--tp", "2", "--ep", "2", "--enable-eplb"),
    *("--eplb-rebalance-num-iterations", "8", "--expert-distribution-recorder-buffer-size", "8"),
)


def test_experts_that_move_end_the_seed_for_good(models: Models, fleet: Fleet) -> None:
    """Dynamic EPLB: afterwards the same bytes are other experts, and a fork has the map of a new start. No update that
    follows makes this a seed again.
    """
    install_plugin(fleet.folder, "cpu_cache", "import torch; torch.cpu.empty_cache = lambda: None")
    model = models.path("qwen3-moe")
    seed = start_seed(fleet, model, *EPLB).server
    right = seed.generate()
    seed.wait_for("to have moved experts", lambda: status(seed)["state"] == "stopped", 30)
    log = seed.log()
    assert 0 < log.index("is no seed: experts move between ranks (EPLB)") < log.index("[EPLBManager] rebalance end")
    change(seed, "/update_weights_from_disk", model_path=str(model))
    assert status(seed)["state"] == "stopped"
    assert_refuses(seed, "not_a_seed")
    assert seed.generate() == right


def test_start_up_overlap_is_switched_off_where_a_fork_or_a_seed_is_asked_for(models: Models, fleet: Fleet) -> None:
    """With it a model is not whole when its loader returns."""
    flags = ("--startup-weight-load-mode", "overlap")
    seed = start_seed(fleet, models.path("llama"), *flags)
    fork = start_fork(fleet, models.path("llama"), seed.server, *flags)
    for probed in (seed, fork):
        assert "--startup-weight-load-mode overlap has no effect where R-Fork is asked for" in probed.server.log()
    assert set(fork.sources.values()) == {"seed"}, fork.sources
    assert differences(fork, seed) == []
