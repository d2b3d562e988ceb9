"""A draft beside its target: a shard of its own, sharing what the target lends it, before and after a fork."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from support.holding import Probed, differences, start_fork, start_seed
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
STEPS = (
    *("--speculative-num-steps", "1", "--speculative-eagle-topk", "1"),
    *("--speculative-num-draft-tokens", "2"),
)


@dataclass(frozen=True)
class Kind:
    """How a draft is asked for, and what its target lends it. Without `draft` its weights are in the target's files."""

    algorithm: str
    target: str = "llama"
    draft: str | None = None
    lent: tuple[str, ...] = (EMBEDDING, HEAD)
    flags: tuple[str, ...] = STEPS
    tied: bool = False

    def model(self, models: Models) -> Path:
        return models.path(self.target, **({"tie_word_embeddings": True} if self.tied else {}))

    def asked(self, models: Models, **draft: Any) -> tuple[str, ...]:
        path = () if self.draft is None else ("--speculative-draft-model-path", str(models.path(self.draft, **draft)))
        return ("--speculative-algorithm", self.algorithm, *path, *self.flags)


EAGLE = Kind("EAGLE", draft="llama-eagle")
PREFILL = ("--disaggregation-mode", "prefill", "--disaggregation-transfer-backend", "mooncake_tcp")

KINDS = {
    "standalone": Kind("STANDALONE", draft="llama", lent=()),
    # Its head knows half of the words, by a map that loading makes.
    "eagle3": Kind("EAGLE3", draft="llama-eagle3", lent=(EMBEDDING,)),
}
FURTHER_KINDS = {
    "tp2": Kind("EAGLE", draft="llama-eagle", flags=("--tp", "2", *STEPS)),
    # The draft is on the last stage and the embedding on the first, so that the draft has one of its own.
    "pp2": Kind(
        *("EAGLE", "llama", "llama-eagle", (HEAD,)),
        flags=("--pp-size", "2", *PREFILL, "--disaggregation-bootstrap-port", "0", *STEPS),
    ),
    # Two tensors of the draft become one of the target, which has one for both.
    "tied-target": Kind("EAGLE", draft="llama-eagle", tied=True),
    "mimo-mtp": Kind("NEXTN", "mimo"),
    "deepseek-mtp": Kind("NEXTN", "deepseek-v3"),
    "dflash": Kind("DFLASH", "qwen3", "qwen3-dflash", lent=(), flags=()),
}


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Probed:
    return start_seed(module_fleet, models.path("llama"), *EAGLE.asked(models))


def test_target_and_draft_are_forked_each_as_its_own_shard_and_share_what_is_lent(
    seed: Probed, models: Models, fleet: Fleet
) -> None:
    """What they share crosses the link once, in a fork of a fork too."""
    fork = start_fork(fleet, models.path("llama"), seed.server, *EAGLE.asked(models))
    fork_of_fork = start_fork(fleet, models.path("llama"), fork.server, *EAGLE.asked(models))
    assert_lent(seed, EAGLE.lent)
    for forked in (fork, fork_of_fork):
        assert_forked(forked, seed, EAGLE.lent)
        moved = {report["role"]: report["weights"]["lent_nbytes"] for report in forked.reports}
        assert moved == {"target": 0, "draft-0": 2 * 512 * 256 * 2}


def test_a_draft_without_a_seed_falls_back_alone(seed: Probed, models: Models, fleet: Fleet) -> None:
    """The seed has another draft: the target is forked all the same, and the draft comes from the disk."""
    fork = start_fork(fleet, models.path("llama"), seed.server, *EAGLE.asked(models, seed=1))
    sources = {r["role"]: r["weights"] for r in fork.reports}
    assert sources["target"]["source"] == "seed"
    assert (sources["draft-0"]["source"], sources["draft-0"]["fallback_reason"]) == ("checkpoint", "key_mismatch")
    assert_lent(fork, EAGLE.lent)
    assert [d for d in differences(fork, seed) if d.startswith("target")] == []
    assert [d for d in differences(fork, seed) if d.startswith("draft")] != []


@pytest.mark.parametrize("name", KINDS)
def test_a_draft_is_forked_beside_its_target(name: str, models: Models, fleet: Fleet) -> None:
    fork_beside(KINDS[name], models, fleet)


@pytest.mark.long
@pytest.mark.parametrize("name", FURTHER_KINDS)
def test_a_draft_of_another_kind_or_layout_is_forked_beside_its_target(name: str, models: Models, fleet: Fleet) -> None:
    fork_beside(FURTHER_KINDS[name], models, fleet)


@pytest.mark.long
def test_a_head_cut_to_frequent_words_is_refused_by_its_shape(models: Models, fleet: Fleet, tmp_path: Path) -> None:
    """SGLang cuts it once the draft is loaded, by a file that is each instance's own: the draft comes from the disk."""
    words = tmp_path / "words.pt"
    torch.save(list(range(100)), words)
    flags = (*EAGLE.asked(models), "--speculative-token-map", str(words))
    seed = start_seed(fleet, models.path("llama"), *flags)
    fork = start_fork(fleet, models.path("llama"), seed.server, *flags)
    weights = {r["role"]: r["weights"] for r in fork.reports}
    assert weights["target"]["source"] == "seed"
    assert weights["draft-0"]["fallback_reason"] == "manifest_mismatch"
    assert "lm_head.weight: bfloat16[512, 256] here, bfloat16[100, 256] there" in weights["draft-0"]["fallback_detail"]


@pytest.mark.long
def test_n_gram_speculation_has_no_draft_to_fork(models: Models, fleet: Fleet) -> None:
    """Nothing but the target is published and forked."""
    ngram = Kind("NGRAM", flags=()).asked(models)
    seed = start_seed(fleet, models.path("llama"), *ngram)
    fork = start_fork(fleet, models.path("llama"), seed.server, *ngram)
    assert [(r["role"], r["weights"]["source"]) for r in fork.reports] == [("target", "seed")]
    assert differences(fork, seed) == []


@pytest.mark.long
def test_a_collective_transfer_brings_twice_what_is_shared(seed: Probed, models: Models, fleet: Fleet) -> None:
    """That seed sends a shard whole; the draft gives up its own afterwards, as everywhere."""
    fork = start_fork(fleet, models.path("llama"), seed.server, *EAGLE.asked(models), backend="nccl")
    assert differences(fork, seed) == []
    assert_lent(fork, EAGLE.lent)
    assert {r["role"]: (r["weights"]["protocol"], r["weights"]["lent_nbytes"]) for r in fork.reports} == {
        "draft-0": ("gloo", 0),
        "target": ("gloo", 0),
    }


def fork_beside(kind: Kind, models: Models, fleet: Fleet) -> None:
    model, flags = kind.model(models), kind.asked(models)
    seed = start_seed(fleet, model, *flags)
    fork = start_fork(fleet, model, seed.server, *flags)
    assert_lent(seed, kind.lent)
    assert_forked(fork, seed, kind.lent)


def assert_forked(fork: Probed, seed: Probed, lent: tuple[str, ...]) -> None:
    """Every shard came from the seed and is what the seed holds, and each byte of a rank crossed the link once."""
    assert any(report["role"] == "draft-0" for report in fork.reports)
    assert set(fork.sources.values()) == {"seed"}
    assert differences(fork, seed) == []
    assert_lent(fork, lent)
    for report in fork.reports:
        held = fork.holdings[holding(report["shard"])]["tensors"]
        own = [facts for name, facts in held.items() if facts[-1] == f"{report['role']}:{name}" and is_weight(name)]
        shared = {facts[-1]: facts for name, facts in held.items() if name in lent and report["role"] != "target"}
        weights = report["weights"]
        assert (weights["nbytes"], weights["lent_nbytes"]) == (nbytes_of(own), nbytes_of(shared.values())), report


def assert_lent(probed: Probed, expected: tuple[str, ...]) -> None:
    """On each rank that has a draft, these of its weights, and no others, are the target's own memory."""
    drafts = [held["tensors"] for rank, held in probed.holdings.items() if rank.startswith("draft-0")]
    assert drafts
    for held in drafts:
        found = {name for name, facts in held.items() if facts[-1].startswith("target:") and is_weight(name)}
        assert found == set(expected)


def is_weight(name: str) -> bool:
    """Rotary caches are made anew, and shared by the whole process anyway."""
    return "rotary" not in name


def holding(shard: str) -> str:
    """What the probe calls the shard that R-Fork calls `draft-0.tp0of2.pp0of1…`."""
    found = re.match(r"(.+?)\.tp(\d+)of\d+\.pp(\d+)of", shard)
    assert found, shard
    return "{}.tp{}.pp{}.dp0".format(*found.groups())


def nbytes_of(tensors: Iterable[Any]) -> int:
    return sum(
        math.prod(shape) * getattr(torch, dtype.removeprefix("torch.")).itemsize for _, dtype, shape, *_ in tensors
    )
