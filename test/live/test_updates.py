"""Weights that change under a running seed: what its clients see before, meanwhile and after. Real servers.

The tests of a module share one seed and change it in the order in which they stand here.
"""

from __future__ import annotations

import re

import pytest
from safetensors.torch import load_file
from support.forking import last_line, serving, start_fork, start_seed, status, weights
from support.models import Models
from support.outside import fence_page, image_of, lease_on
from support.server import Fleet, Generation, Server
from support.updates import assert_refuses, binding_of, change, generation, is_open, request, serialized

pytestmark = pytest.mark.server

LARGER = {"num_hidden_layers": 8}
SLOWLY = {"RFORK_READ_GBPS_LIMIT": "0.001"}
LIVE = {"RFORK_WEIGHTS": "live"}


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    return start_seed(module_fleet, models.path("llama", **LARGER), "--enable-memory-saver", "--weight-version", "v0")


def test_releasing_other_memory_does_not_touch_the_seed(seed: Server, right: Generation) -> None:
    before = generation(seed)
    change(seed, "/release_memory_occupation", tags=["kv_cache"])
    change(seed, "/resume_memory_occupation", tags=["kv_cache"])
    assert (status(seed)["state"], generation(seed)) == ("serving", before)
    assert seed.generate() == right


def test_released_memory_is_out_of_reach_and_comes_back_as_what_it_was(seed: Server, right: Generation) -> None:
    before, binding, content = generation(seed), binding_of(seed), status(seed)["content"]
    change(seed, "/release_memory_occupation")
    assert_refuses(seed, "paused")
    with pytest.raises(OSError, match="nobody serves"):
        fence_page(binding)
    change(seed, "/resume_memory_occupation", tags=["kv_cache"])
    assert status(seed)["state"] == "paused"
    change(seed, "/resume_memory_occupation", tags=["weights", "cuda_graph"])
    serving(seed)
    assert (status(seed)["content"], generation(seed)) == (content, before + 2)
    assert seed.generate() == right


def test_a_failed_update_leaves_the_content_what_it_was(seed: Server, right: Generation) -> None:
    content = status(seed)["content"]
    assert request(seed, "/update_weights_from_disk", model_path="/nowhere").status_code == 400
    serving(seed)
    assert request(seed, "/update_weights_from_tensor", serialized_named_tensors=serialized()).status_code == 400
    assert request(seed, "/end_weight_update").status_code == 400
    serving(seed)
    assert status(seed)["content"] == content
    assert seed.generate() == right


def test_a_pull_that_is_overtaken_by_an_update_is_all_old_or_nothing(
    fleet: Fleet, models: Models, seed: Server, right: Generation
) -> None:
    path = models.path("llama", **LARGER)
    client = start_fork(fleet, path, seed.port, env=SLOWLY, wait=False)

    def percent() -> int:
        return max((int(n) for n in re.findall(r"rfork target:\s+(\d+)%", client.log())), default=0)

    client.wait_for("to have read a third", lambda: percent() >= 33, 120)
    assert percent() < 100, "it was too fast for this test"
    change(
        seed, "/update_weights_from_disk", model_path=str(models.path("llama", seed=1, **LARGER)), weight_version="v1"
    )
    client.wait_for("to end its start", lambda: last_line(client) is not None, 120)
    report = weights(client)
    assert (report["source"], report["fallback_reason"]) in [
        ("checkpoint", reason) for reason in ("fence", "stale_generation", "live_content", "digest_mismatch")
    ], report
    assert client.generate() == right


def test_after_an_update_the_content_is_live(seed: Server, right: Generation) -> None:
    serving(seed)
    assert status(seed)["content"].startswith("live:")
    assert seed.generate() != right
    with lease_on(seed, weights="live") as lease:
        assert lease.reply.weight_version == "v1"
        assert lease.reply.generation % 2 == 0


def test_a_client_of_the_checkpoint_goes_to_the_disk(
    fleet: Fleet, models: Models, seed: Server, right: Generation
) -> None:
    client = start_fork(fleet, models.path("llama", **LARGER), seed.port)
    assert weights(client)["fallback_reason"] == "live_content"
    assert client.generate() == right


def test_a_client_of_live_weights_takes_them_with_their_version(fleet: Fleet, models: Models, seed: Server) -> None:
    client = start_fork(fleet, models.path("llama", **LARGER), seed.port, env=LIVE)
    assert weights(client)["source"] == "seed", weights(client)
    assert client.generate() == seed.generate()
    assert status(client)["content"] == status(seed)["content"]
    serving(client)
    with lease_on(client, weights="live") as lease:
        assert lease.reply.weight_version == "v1"
    assert client.get("/model_info").json()["weight_version"] == "v1"
    assert image_of(client, weights="live").differences(image_of(seed, weights="live")) == []


def test_a_session_of_many_calls_is_closed_from_its_beginning_to_its_end(seed: Server, models: Models) -> None:
    """No lease is granted and the fence is odd between the calls, too."""
    folder = models.path("llama", **LARGER)
    original = {k: v for file in folder.glob("*.safetensors") for k, v in load_file(file).items()}
    with lease_on(seed, weights="live") as lease:
        binding, before = lease.reply.binding, lease.reply.generation
    change(seed, "/begin_weight_update")
    assert not is_open(binding)
    names = list(original)
    for part in (names[: len(names) // 2], names[len(names) // 2 :]):
        tensors = serialized(**{name: original[name] for name in part})
        change(seed, "/update_weights_from_tensor", serialized_named_tensors=tensors, weight_version="v2")
        assert not is_open(binding)
        assert_refuses(seed, "paused")
    change(seed, "/continue_generation")
    assert not is_open(binding)
    change(seed, "/end_weight_update")
    serving(seed)
    with lease_on(seed, weights="live") as lease:
        assert (lease.reply.generation, lease.reply.weight_version) == (before + 2, "v2")


def test_an_update_back_to_the_checkpoint_is_still_live(seed: Server, right: Generation) -> None:
    """Nobody but the digests could tell that the bytes are those of the files again."""
    assert seed.generate() == right
    assert status(seed)["content"].startswith("live:")


def test_the_weight_checker_makes_other_weights_too(seed: Server, models: Models) -> None:
    change(seed, "/update_weights_from_disk", model_path=str(models.path("llama", **LARGER)))
    serving(seed)
    before = status(seed)["content"]
    change(seed, "/weights_checker", action="reset_tensors")
    serving(seed)
    assert status(seed)["content"] != before
