"""Weights that a training job pushes into a running seed: broadcast in a group, or handed over by checkpoint-engine.

The tests share one seed and change it in the order in which they stand here. The groups are gloo's, and real; the last
hop of checkpoint-engine is a stand-in, as its own code takes CUDA and NPU handles only (see support/updates.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from support.drills import percent
from support.forking import last_line, serving, start_fork, start_seed, status, weights
from support.models import Models
from support.outside import image_of, lease_on
from support.server import Fleet, Generation, Server
from support.updates import (
    Trainer,
    assert_refuses,
    binding_of,
    change,
    generation,
    install_checkpoint_engine,
    is_open,
    push_over_ipc,
    request,
)

pytestmark = pytest.mark.server

LARGER = {"num_hidden_layers": 8}
SLOWLY = {"RFORK_READ_GBPS_LIMIT": "0.001"}
LIVE = {"RFORK_WEIGHTS": "live"}


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    install_checkpoint_engine(module_fleet.folder)
    return start_seed(module_fleet, models.path("llama", **LARGER))


@pytest.fixture(scope="module")
def trainer(seed: Server, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainer]:
    with Trainer(seed, tmp_path_factory.mktemp("pushes")) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def new(models: Models) -> dict[str, torch.Tensor]:
    """What the training job has made."""
    return load_file(models.path("llama", seed=1, **LARGER) / "model.safetensors")


def halves(tensors: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    names = sorted(tensors)
    return [{n: tensors[n] for n in part} for part in (names[: len(names) // 2], names[len(names) // 2 :])]


def test_a_reader_in_the_middle_of_a_broadcast_update_gets_nothing_of_it(
    fleet: Fleet, models: Models, seed: Server, right: Generation, trainer: Trainer, new: dict[str, torch.Tensor]
) -> None:
    """Closed from begin to end, also between the calls; the reader ends on the disk with the checkpoint's weights."""
    binding, before = binding_of(seed), generation(seed)
    client = start_fork(fleet, models.path("llama", **LARGER), seed.port, env=SLOWLY, wait=False)
    client.wait_for("to have read a third", lambda: percent(client) >= 33, 120)
    assert percent(client) < 100, "it was too fast for this test"
    change(seed, "/begin_weight_update")
    for part in halves(new):
        assert trainer.push(part, weight_version="step-1").json()["success"]
        assert not is_open(binding)
        assert_refuses(seed, "paused")
    change(seed, "/end_weight_update")
    serving(seed)
    assert status(seed)["content"].startswith("live:")
    assert generation(seed) == before + 2
    client.wait_for("to end its start", lambda: last_line(client) is not None, 120)
    report = weights(client)
    assert (report["source"], report["fallback_reason"]) in [
        ("checkpoint", reason) for reason in ("fence", "stale_generation", "live_content", "digest_mismatch")
    ], report
    assert client.generate() == right


def test_only_a_client_of_live_weights_takes_what_was_broadcast(
    fleet: Fleet, models: Models, seed: Server, right: Generation
) -> None:
    path = models.path("llama", **LARGER)
    disk = start_fork(fleet, path, seed.port)
    assert weights(disk)["fallback_reason"] == "live_content", weights(disk)
    assert disk.generate() == right
    live = start_fork(fleet, path, seed.port, env=LIVE)
    assert weights(live)["source"] == "seed", weights(live)
    assert live.generate() == seed.generate() != right
    assert live.get("/model_info").json()["weight_version"] == "step-1"
    assert status(live)["content"] == status(seed)["content"]
    assert image_of(serving(live), weights="live").differences(image_of(seed, weights="live")) == []


def test_a_broadcast_that_does_not_fit_takes_the_seed_out_until_an_update_ends_well(
    models: Models, seed: Server, trainer: Trainer, new: dict[str, torch.Tensor]
) -> None:
    tokens = seed.generate()
    bent = dict(list(new.items())[:3])
    bent[next(n for n in new if n.endswith("down_proj.weight"))] = torch.zeros(3, 5, dtype=torch.bfloat16)
    change(seed, "/begin_weight_update")
    answer = trainer.push(bent)
    assert (answer.status_code, "partially updated" in answer.text) == (400, True), answer.text
    change(seed, "/end_weight_update")
    assert_refuses(seed, "paused")
    change(seed, "/update_weights_from_disk", model_path=str(models.path("llama", seed=1, **LARGER)))
    serving(seed)
    assert seed.generate() == tokens


def test_weights_handed_over_by_checkpoint_engine_are_live(
    tmp_path: Path, models: Models, seed: Server, right: Generation
) -> None:
    original = load_file(models.path("llama", **LARGER) / "model.safetensors")
    before, content = generation(seed), status(seed)["content"]
    answer = push_over_ipc(seed, tmp_path, halves(original), weight_version="step-2")
    assert answer.json()["success"], answer.text
    serving(seed)
    assert generation(seed) == before + 2
    assert status(seed)["content"].startswith("live:")
    assert status(seed)["content"] != content
    assert seed.generate() == right
    with lease_on(seed, weights="live") as lease:
        assert lease.reply.weight_version == "step-2"


def test_a_hand_over_that_fails_halfway_takes_the_seed_out_and_one_that_never_began_does_not(
    tmp_path: Path, models: Models, seed: Server, new: dict[str, torch.Tensor]
) -> None:
    """Digests tell the two apart, where somebody has asked for them since the last update."""
    content = status(seed)["content"]
    with lease_on(seed, weights="live") as lease:
        lease.digests()
    assert not request(seed, "/update_weights_from_ipc", zmq_handles={}).json()["success"]
    serving(seed)
    assert status(seed)["content"] == content
    first, _ = halves(new)
    bent = {next(n for n in new if n.endswith("down_proj.weight")): torch.zeros(3, 5, dtype=torch.bfloat16)}
    assert not push_over_ipc(seed, tmp_path, [first, bent]).json()["success"]
    assert_refuses(seed, "paused")
    assert push_over_ipc(seed, tmp_path, halves(new)).json()["success"]
    serving(seed)
    assert status(seed)["content"] != content


def test_a_trainer_that_dies_takes_the_seed_out_until_an_update_ends_well(
    models: Models, seed: Server, trainer: Trainer, new: dict[str, torch.Tensor]
) -> None:
    change(seed, "/begin_weight_update")
    trainer.kill()
    answer = trainer.push(new)
    assert (answer.status_code, "Failed to receive weights" in answer.text) == (400, True), answer.text
    change(seed, "/end_weight_update")
    assert_refuses(seed, "paused")
    change(seed, "/update_weights_from_disk", model_path=str(models.path("llama", seed=1, **LARGER)))
    serving(seed)
