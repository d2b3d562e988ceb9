"""The identity of a model: what changes it, by name, and what does not.

Arguments are resolved by SGLang itself, as for a server; nothing is started.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import pytest
from support import describe
from support.models import Models
from support.server import Fleet

from rfork.identity import Content, ModelIdentity, canonical_digest, instance_key
from rfork.wanted import Wanted, WantedModel

pytestmark = pytest.mark.server


@dataclass(frozen=True)
class Case:
    """A server like the plain one but for what is given. `differs` are the fields that change by it, and all of them
    unless it says `and more`.
    """

    name: str
    differs: str = ""
    flags: str = ""
    env: dict[str, str] = field(default_factory=dict)
    model: str = "plain"


EAGLE = (
    "--speculative-algorithm EAGLE --speculative-num-steps 1 --speculative-eagle-topk 1"
    " --speculative-num-draft-tokens 2"
)
CHANGES = (
    Case("dtype", "model.dtype args.dtype", "--dtype float16"),
    Case("a config value", "config.rope_parameters.rope_theta", model="rope"),
    Case("a nested config value", "config.rope_parameters.factor and more", model="nested"),
    Case("tied embeddings", "config.tie_word_embeddings", model="tied"),
    Case("another architecture", "model.architecture config.model_type and more", model="architecture"),
    Case("a quantization file", "model.files", model="quant-file"),
    Case("tp", "parallel.tp_size parallel.moe_tp_size parallel.attn_tp_size", "--tp 2"),
    Case("pp", "parallel.pp_size", "--pp-size 2"),
    Case("decode context parallelism", "parallel.attn_dcp_size and more", "--tp 2 --dcp-size 2"),
    Case("context parallelism", "parallel.attn_cp_size and more", "--tp 2 --attn-cp-size 2"),
    Case("moe data parallelism", "parallel.moe_dp_size and more", "--tp 2 --attn-cp-size 2 --moe-dp-size 2"),
    Case("elastic ep", "args.elastic_ep_backend and more", "--tp 2 --ep 2 --elastic-ep-backend mooncake", model="moe"),
    Case("kernel backend", "args.fp8_gemm_runner_backend", "--fp8-gemm-backend triton"),
    Case("a variable that changes layout", "env.SGLANG_MOE_PADDING", env={"SGLANG_MOE_PADDING": "1"}),
    Case("lora", "args.enable_lora", "--enable-lora --max-lora-rank 8 --lora-target-modules q_proj"),
    Case("kv cache dtype", "args.kv_cache_dtype", "--kv-cache-dtype fp8_e5m2"),
    Case("fp32 head", "args.enable_fp32_lm_head", "--enable-fp32-lm-head"),
)
SAME = (
    Case("another mount path", model="moved"),
    Case("another address", flags="--host 127.0.0.2 --port 31999"),
    Case("a random seed", flags="--random-seed 7"),
    Case(
        "sizes of queues and pools", flags="--max-running-requests 4 --max-total-tokens 512 --mem-fraction-static 0.5"
    ),
    Case("a name", flags="--served-model-name other --weight-version v2"),
    Case("replicas", flags="--dp 2"),
    Case("logging and metrics", flags="--log-level warning --enable-metrics"),
    Case("scheduling", flags="--schedule-policy lpm --disable-overlap-schedule --chunked-prefill-size 512"),
    Case("tokenizer workers", flags="--tokenizer-worker-num 2"),
    Case("an API key", flags="--api-key secret"),
    Case("the prefill role", flags="--disaggregation-mode prefill --disaggregation-transfer-backend mooncake"),
    Case("the decode role", flags="--disaggregation-mode decode --disaggregation-transfer-backend fake"),
    Case("being a client", flags="--load-format remote_instance"),
    Case("being a seed", flags="--remote-instance-weight-loader-start-seed-via-transfer-engine"),
    Case("a variable of no layout", env={"SGLANG_LOG_MS": "1"}),
)


ROLES = tuple(
    Case(
        f"{mode} under attention-DP",
        flags=f"--tp 2 --dp 2 --enable-dp-attention --disaggregation-mode {mode} {backend}",
    )
    for mode, backend in {
        "prefill": "--disaggregation-transfer-backend mooncake",
        "decode": "--disaggregation-transfer-backend fake",
    }.items()
)


@pytest.fixture(scope="module")
def folders(models: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints of one model that differ as their name says; weights are the same bytes."""
    plain = models.path("qwen2")
    made = {"plain": plain, "llama": models.path("llama"), "moe": models.path("qwen3-moe")}
    edits = {
        "rope": {"rope_theta": 20000.0},
        "nested": {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        "tied": {"tie_word_embeddings": True},
        "architecture": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
        "quant-file": {},
        "moved": {},
    }
    for name, edit in edits.items():
        made[name] = tmp_path_factory.mktemp(name) / "checkpoint"
        shutil.copytree(plain, made[name])
        config = json.loads((plain / "config.json").read_text())
        (made[name] / "config.json").write_text(json.dumps({**config, **edit}))
    (made["quant-file"] / "quant_config.json").write_text('{"producer": "test"}')
    return made


@pytest.fixture(scope="module")
def all_wanted(folders: dict[str, Path], models: Models, module_fleet: Fleet) -> dict[str, Wanted]:
    """Every case, by its name; resolved one after another in one process."""
    draft = Case("draft", flags=f"{EAGLE} --speculative-draft-model-path {models.path('llama-eagle')}", model="llama")
    cases = (Case("plain"), draft, *CHANGES, *SAME, *ROLES)
    found = described(module_fleet, [(["--model-path", str(folders[c.model]), *c.flags.split()], c.env) for c in cases])
    return {case.name: one for case, one in zip(cases, found, strict=True)}


@pytest.fixture(scope="module")
def wanted(all_wanted: dict[str, Wanted]) -> dict[str, WantedModel]:
    """The target of every case."""
    return {name: one.models[0] for name, one in all_wanted.items()}


def described(fleet: Fleet, cases: Sequence[tuple[list[str], dict[str, str]]]) -> list[Wanted]:
    given, answer = fleet.folder / "cases.json", fleet.folder / "wanted.json"
    given.write_text(json.dumps([{"argv": argv, "env": env} for argv, env in cases]))
    program = fleet.start_script(Path(describe.__file__), str(given), str(answer))
    assert program.wait_until_ended(120) == 0, program.log()[-3000:]
    return msgspec.json.decode(answer.read_bytes(), type=list[Wanted])


def identity(model: WantedModel) -> ModelIdentity:
    return ModelIdentity(model.engine, model.fields)


@pytest.mark.parametrize("case", CHANGES, ids=lambda case: case.name)
def test_what_changes_the_weights_changes_the_key_and_is_named(case: Case, wanted: dict[str, WantedModel]) -> None:
    plain, other = wanted["plain"], wanted[case.name]
    expected = set(case.differs.removesuffix(" and more").split())
    found = {name for name, *_ in identity(plain).diff(identity(other))}
    assert found == expected or (case.differs.endswith("and more") and found > expected)
    content = Content.parse(plain.content)
    assert instance_key(identity(plain), content) != instance_key(identity(other), content)


@pytest.mark.parametrize("case", SAME, ids=lambda case: case.name)
def test_what_does_not_change_the_weights_leaves_the_key_alone(case: Case, wanted: dict[str, WantedModel]) -> None:
    plain, other = wanted["plain"], wanted[case.name]
    assert identity(plain).diff(identity(other)) == []
    assert plain.content == other.content
    assert plain.rank == other.rank


def test_a_role_counts_where_it_decides_an_argument_that_counts(wanted: dict[str, WantedModel]) -> None:
    """Decode servers exchange logits in another way under attention-DP; SGLang notes that on the module."""
    prefill, decode = (identity(wanted[case.name]) for case in ROLES)
    assert prefill.diff(decode) == [("args.enable_tp_lm_head_all_to_all", False, True)]


def test_a_draft_is_another_model_than_its_target(all_wanted: dict[str, Wanted]) -> None:
    target, draft = all_wanted["draft"].models
    assert (target.rank.role, draft.rank.role) == ("target", "draft-0")
    assert ("model.role", "target", "draft") in identity(target).diff(identity(draft))
    assert target.content != draft.content


def test_the_names_of_the_fields_are_pinned(wanted: dict[str, WantedModel]) -> None:
    """Keys must not drift: where a field comes, goes or is written otherwise, LAYOUT_CODE_VERSION goes up with it."""
    if wanted["plain"].fields["engine.version"] != "0.5.23":
        pytest.skip("other releases have other arguments")
    ours = {
        n: v for n, v in wanted["plain"].fields.items() if n.split(".")[0] in ("model", "parallel", "args", "device")
    }
    assert canonical_digest(ours) == "24dfd296c3403abc1468f28e406229c4c91ac7c947f5a79474042624d93c0066", sorted(
        ours.items()
    )
