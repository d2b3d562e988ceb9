"""Updates on the oldest SGLang that is supported: many calls without a beginning and an end."""

from __future__ import annotations

import importlib.metadata

import pytest
from safetensors.torch import load_file
from support.forking import serving, start_seed, status
from support.models import Models
from support.outside import lease_on
from support.server import Fleet
from support.updates import assert_refuses, change, serialized

from sglang_rfork.srt.compat import FIRST

SGLANG = importlib.metadata.version("sglang")

pytestmark = [
    pytest.mark.server,
    pytest.mark.spawn,
    pytest.mark.skipif(not SGLANG.startswith(f"0.5.{FIRST}"), reason=f"SGLang {SGLANG} is not the oldest supported"),
    pytest.mark.timeout(600),
]


def test_an_update_of_many_calls_is_over_when_generation_continues(fleet: Fleet, models: Models) -> None:
    seed = start_seed(fleet, models.path("llama"), cold=True, deadline_s=300.0)
    before = seed.generate()
    other = load_file(models.path("llama", seed=1) / "model.safetensors")
    names = list(other)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        tensors = serialized(**{name: other[name] for name in part})
        change(seed, "/update_weights_from_tensor", serialized_named_tensors=tensors, weight_version="v7")
        assert_refuses(seed, "paused")
    change(seed, "/continue_generation")
    serving(seed)
    assert status(seed)["content"].startswith("live:")
    with lease_on(seed, weights="live") as lease:
        assert lease.reply.weight_version == "v7"
    assert seed.generate() != before
