"""A fork is a disk load in all but time: every byte, every layout, every value, and what is computed with them."""

from __future__ import annotations

import pytest
from support.forking import start_fork, start_seed, weights
from support.models import Models
from support.outside import Image, image_of
from support.server import Fleet, Server

pytestmark = pytest.mark.server

OTHER_NAMES = {"qwen2-tied": ["model.embed_tokens.weight"]}
"""Tied weights are one tensor, which the manifest lists once, as lm_head.weight."""

PROMPTS = ("hello world", [5, 17, 300, 42, 8], "the quick brown fox")


def tokens(server: Server) -> list[tuple[int, ...]]:
    return [server.generate(prompt, num_tokens=24).tokens for prompt in PROMPTS]


def checksums(server: Server) -> dict[str, str]:
    """SGLang's own digest of each parameter and buffer: an oracle that shares no line with R-Fork."""
    answer = server.post("/weights_checker", {"action": "checksum"}).json()
    return {name: digest for rank in answer["ranks"] for name, digest in rank["checksums"].items()}


@pytest.mark.parametrize("model", ["llama", "qwen2-tied", "qwen3", "mixtral", "deepseek-v2"])
def test_a_fork_equals_a_disk_load_in_every_byte_layout_and_value(model: str, fleet: Fleet, models: Models) -> None:
    """Bytes are read from both servers' memory; the fork's digests are compared with those too, not with the seed's."""
    seed = start_seed(fleet, models.path(model))
    fork = start_fork(fleet, models.path(model), seed.port)
    assert weights(fork)["source"] == "seed", weights(fork)
    from_disk, forked = image_of(seed), image_of(fork)
    assert forked.differences(from_disk) == []
    assert forked.manifest == from_disk.manifest
    assert forked.digests == from_disk.digests
    assert checksums(fork) == checksums(seed)
    assert beyond_the_manifest(fork, forked) == OTHER_NAMES.get(model, [])
    assert tokens(fork) == tokens(seed)
    assert len(set(tokens(fork))) == len(PROMPTS), "an oracle of equality must not repeat itself"


def beyond_the_manifest(server: Server, image: Image) -> list[str]:
    """Tensors that SGLang knows and the manifest doesn't; rotary caches are made from the config."""
    listed = {t.name for t in image.manifest.tensors}
    return [name for name in checksums(server) if name not in listed and "rotary_emb" not in name]
