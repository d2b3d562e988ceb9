"""Tiny checkpoints with random weights, one builder per architecture, written as any checkpoint is on disk.

They are random but not careless. Weights are drawn at a scale that makes each layer matter, norms differ from 1, and so
greedy decoding gives varied tokens which change when any one tensor is wrong: usable as an oracle of equality.
"""

import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from support import quantized

Config = dict[str, Any]
Tensors = dict[str, torch.Tensor]

VOCAB_SIZE = 512


@dataclass
class Weights:
    """A state dict under construction; equal seeds and equal calls give equal tensors."""

    seed: int
    tensors: Tensors = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._generator = torch.Generator().manual_seed(self.seed)

    def _normal(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator)

    def linear(self, name: str, out_features: int, in_features: int, *, bias: bool = False) -> None:
        # 1.5 rather than 1: layers must outweigh the residual, or tied models repeat their last token for ever.
        self.tensors[f"{name}.weight"] = (
            1.5 * self._normal(out_features, in_features) / math.sqrt(in_features)
        ).bfloat16()
        if bias:
            self.tensors[f"{name}.bias"] = (0.1 * self._normal(out_features)).bfloat16()

    def norm(self, name: str, size: int) -> None:
        self.tensors[f"{name}.weight"] = (1 + 0.1 * self._normal(size)).bfloat16()

    def embedding(self, name: str, rows: int, size: int) -> None:
        self.tensors[f"{name}.weight"] = (self._normal(rows, size) / math.sqrt(size)).bfloat16()


# --------------------------------------------------------------------------------------------------------------------
# Architectures

DENSE: Config = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "torch_dtype": "bfloat16",
}

LLAMA = {
    **DENSE,
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN2 = {**DENSE, "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}
# Twice the heads of the others, so that a rank of two still holds whole 128 x 128 blocks of its fp8 form.
QWEN3 = {
    **DENSE,
    "model_type": "qwen3",
    "architectures": ["Qwen3ForCausalLM"],
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
MIXTRAL = {
    **DENSE,
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
QWEN3_MOE = {
    **DENSE,
    "model_type": "qwen3_moe",
    "architectures": ["Qwen3MoeForCausalLM"],
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK_V2 = {
    **DENSE,
    "model_type": "deepseek_v2",
    "architectures": ["DeepseekV2ForCausalLM"],
    "num_key_value_heads": 4,
    # Torch-native attention reads the compressed cache as if these three were one number; make them so.
    "kv_lora_rank": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "qk_rope_head_dim": 32,
    "q_lora_rank": None,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 128,
    "moe_layer_freq": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "attention_bias": False,
    "rope_scaling": {
        "type": "yarn",
        "factor": 1.0,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 2048,
    },
}
del DEEPSEEK_V2["head_dim"]
# Models with a draft of their own. SGLang knows MiMo by its architecture alone.
DEEPSEEK_V3 = {
    **DEEPSEEK_V2,
    "model_type": "deepseek_v3",
    "architectures": ["DeepseekV3ForCausalLM"],
    "num_nextn_predict_layers": 1,
}
MIMO = {**QWEN2, "architectures": ["MiMoForCausalLM"], "num_nextn_predict_layers": 1}
DFLASH = {
    **QWEN3,
    "architectures": ["DFlashDraftModel"],
    "num_hidden_layers": 1,
    "block_size": 4,
    "dflash_config": {"target_layer_ids": [0, 1], "mask_token_id": 5},
}


def attention(weights: Weights, config: Config, prefix: str) -> None:
    hidden, heads, kv_heads, head = (
        config[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim")
    )
    bias = config["model_type"] == "qwen2"
    weights.linear(f"{prefix}.q_proj", heads * head, hidden, bias=bias)
    weights.linear(f"{prefix}.k_proj", kv_heads * head, hidden, bias=bias)
    weights.linear(f"{prefix}.v_proj", kv_heads * head, hidden, bias=bias)
    weights.linear(f"{prefix}.o_proj", hidden, heads * head)
    if config["model_type"].startswith("qwen3"):
        weights.norm(f"{prefix}.q_norm", head)
        weights.norm(f"{prefix}.k_norm", head)


def latent_attention(weights: Weights, config: Config, prefix: str) -> None:
    hidden, heads, rank = config["hidden_size"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, value = config["qk_nope_head_dim"], config["qk_rope_head_dim"], config["v_head_dim"]
    weights.linear(f"{prefix}.q_proj", heads * (nope + rope), hidden)
    weights.linear(f"{prefix}.kv_a_proj_with_mqa", rank + rope, hidden)
    weights.norm(f"{prefix}.kv_a_layernorm", rank)
    weights.linear(f"{prefix}.kv_b_proj", heads * (nope + value), rank)
    weights.linear(f"{prefix}.o_proj", hidden, heads * value)


def gated(weights: Weights, hidden: int, inner: int, prefix: str, names: str = "gate_proj up_proj down_proj") -> None:
    gate, up, down = names.split()
    weights.linear(f"{prefix}.{gate}", inner, hidden)
    weights.linear(f"{prefix}.{up}", inner, hidden)
    weights.linear(f"{prefix}.{down}", hidden, inner)


def feed_forward(weights: Weights, config: Config, layer: int, prefix: str) -> None:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    match config["model_type"]:
        case "mixtral":
            weights.linear(f"{prefix}.block_sparse_moe.gate", config["num_local_experts"], hidden)
            for expert in range(config["num_local_experts"]):
                gated(weights, hidden, inner, f"{prefix}.block_sparse_moe.experts.{expert}", "w1 w3 w2")
        case "qwen3_moe":
            experts(weights, config, f"{prefix}.mlp", config["num_experts"])
        case "deepseek_v2" | "deepseek_v3" if layer >= config["first_k_dense_replace"]:
            experts(weights, config, f"{prefix}.mlp", config["n_routed_experts"])
            shared = config["n_shared_experts"] * config["moe_intermediate_size"]
            gated(weights, hidden, shared, f"{prefix}.mlp.shared_experts")
        case _:
            gated(weights, hidden, inner, f"{prefix}.mlp")


def experts(weights: Weights, config: Config, prefix: str, count: int) -> None:
    weights.linear(f"{prefix}.gate", count, config["hidden_size"])
    for expert in range(count):
        gated(weights, config["hidden_size"], config["moe_intermediate_size"], f"{prefix}.experts.{expert}")


def causal_lm(config: Config, seed: int) -> Tensors:
    weights = Weights(seed)
    hidden = config["hidden_size"]
    weights.embedding("model.embed_tokens", config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        weights.norm(f"{prefix}.input_layernorm", hidden)
        (latent_attention if "kv_lora_rank" in config else attention)(weights, config, f"{prefix}.self_attn")
        weights.norm(f"{prefix}.post_attention_layernorm", hidden)
        feed_forward(weights, config, layer, prefix)
    weights.norm("model.norm", hidden)
    if not config["tie_word_embeddings"]:
        weights.linear("lm_head", config["vocab_size"], hidden)
    return weights.tensors


def eagle_draft(config: Config, seed: int) -> Tensors:
    """One decoder layer, and the one that joins the target's hidden state to it; head and embedding come from there."""
    weights = Weights(seed)
    hidden = config["hidden_size"]
    weights.embedding("embed_tokens", config["vocab_size"], hidden)
    weights.linear("fc", hidden, 2 * hidden)
    attention(weights, config, "layers.0.self_attn")
    weights.norm("layers.0.post_attention_layernorm", hidden)
    gated(weights, hidden, config["intermediate_size"], "layers.0.mlp")
    return weights.tensors


def eagle3_draft(config: Config, seed: int) -> Tensors:
    """One layer over three of the target's hidden states, a head of its own for the words that are frequent, and their
    numbers in the target's vocabulary.
    """
    weights = Weights(seed)
    hidden, head = config["hidden_size"], config["head_dim"]
    weights.linear("fc", hidden, 3 * hidden)
    for name, heads in {"q": "num_attention_heads", "k": "num_key_value_heads", "v": "num_key_value_heads"}.items():
        weights.linear(f"midlayer.self_attn.{name}_proj", config[heads] * head, 2 * hidden)
    weights.linear("midlayer.self_attn.o_proj", hidden, config["num_attention_heads"] * head)
    gated(weights, hidden, config["intermediate_size"], "midlayer.mlp")
    for name in ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"):
        weights.norm(name, hidden)
    weights.linear("lm_head", config["draft_vocab_size"], hidden)
    weights.tensors["d2t"] = torch.arange(config["draft_vocab_size"]) + seed  # how far each word has to be moved
    return weights.tensors


def dflash_draft(config: Config, seed: int) -> Tensors:
    """Layers over hidden states of the target, without an embedding or a head."""
    weights = Weights(seed)
    hidden = config["hidden_size"]
    weights.linear("fc", hidden, len(config["dflash_config"]["target_layer_ids"]) * hidden)
    for layer in range(config["num_hidden_layers"]):
        attention(weights, config, f"layers.{layer}.self_attn")
        gated(weights, hidden, config["intermediate_size"], f"layers.{layer}.mlp")
        weights.norm(f"layers.{layer}.input_layernorm", hidden)
        weights.norm(f"layers.{layer}.post_attention_layernorm", hidden)
    for name in ("hidden_norm", "norm"):
        weights.norm(name, hidden)
    return weights.tensors


def with_next_token_layer(config: Config, seed: int) -> Tensors:
    """A model whose checkpoint has one more layer behind its own: the draft that SGLang makes of it (MTP, NEXTN)."""
    weights = Weights(seed)
    weights.tensors |= causal_lm(config, seed)
    hidden, deepseek = config["hidden_size"], "kv_lora_rank" in config
    layer = config["num_hidden_layers"] if deepseek else 0
    prefix = f"model.layers.{layer}" if deepseek else f"model.mtp_layers.{layer}"
    (latent_attention if deepseek else attention)(weights, config, f"{prefix}.self_attn")
    feed_forward(weights, config, layer, prefix)
    weights.linear(f"{prefix}.eh_proj" if deepseek else f"{prefix}.input_proj", hidden, 2 * hidden)
    norms = "enorm hnorm shared_head.norm" if deepseek else "token_layernorm hidden_layernorm final_layernorm"
    for name in ("input_layernorm", "post_attention_layernorm", *norms.split()):
        weights.norm(f"{prefix}.{name}", hidden)
    return weights.tensors


# --------------------------------------------------------------------------------------------------------------------
# The catalogue


@dataclass(frozen=True)
class Recipe:
    config: Config
    build: Callable[[Config, int], Tensors] = causal_lm
    quantize: Callable[[Tensors], tuple[Tensors, Config]] | None = None


RECIPES: dict[str, Recipe] = {
    "llama": Recipe(LLAMA),
    "qwen2": Recipe(QWEN2),
    "qwen2-tied": Recipe({**QWEN2, "tie_word_embeddings": True}),
    "qwen3": Recipe(QWEN3),
    "mixtral": Recipe(MIXTRAL),
    "qwen3-moe": Recipe(QWEN3_MOE),
    "deepseek-v2": Recipe(DEEPSEEK_V2),
    "llama-fp8": Recipe(LLAMA, quantize=quantized.fp8_per_tensor),
    "llama-w8a8-int8": Recipe(LLAMA, quantize=quantized.w8a8_int8),
    "llama-compressed-int8": Recipe(LLAMA, quantize=quantized.compressed_tensors_int8),
    "llama-compressed-fp8": Recipe(LLAMA, quantize=quantized.compressed_tensors_fp8),
    "llama-fp8-kv": Recipe(LLAMA, quantize=quantized.fp8_with_kv_scales),
    "llama-w8a8-fp8": Recipe(LLAMA, quantize=quantized.w8a8_fp8),
    "llama-modelopt-fp8": Recipe(LLAMA, quantize=quantized.modelopt_fp8),
    "llama-awq": Recipe(LLAMA, quantize=quantized.awq),
    # Not llama: SGLang's llama drops block scales of this name on load.
    "qwen3-fp8-block": Recipe(QWEN3, quantize=quantized.fp8_block),
    "qwen3-int8-block": Recipe(QWEN3, quantize=quantized.int8_block),
    "qwen3-moe-fp8-block": Recipe(QWEN3_MOE, quantize=quantized.fp8_block),
    "deepseek-v2-fp8-block": Recipe(DEEPSEEK_V2, quantize=quantized.fp8_block),
    "llama-eagle": Recipe({**LLAMA, "num_hidden_layers": 1, "architectures": ["LlamaForCausalLMEagle"]}, eagle_draft),
    "llama-eagle3": Recipe(
        {**LLAMA, "num_hidden_layers": 1, "draft_vocab_size": 256, "architectures": ["LlamaForCausalLMEagle3"]},
        eagle3_draft,
    ),
    "qwen3-dflash": Recipe(DFLASH, dflash_draft),
    "mimo": Recipe(MIMO, with_next_token_layer),
    "deepseek-v3": Recipe(DEEPSEEK_V3, with_next_token_layer),
}
DRAFTS = ("llama-eagle", "llama-eagle3", "qwen3-dflash")
"""Those that serve nothing by themselves."""

NO_FORWARD = (
    *("llama-w8a8-fp8", "llama-modelopt-fp8", "llama-awq"),
    *("qwen3-int8-block", "qwen3-moe-fp8-block", "deepseek-v2-fp8-block"),
)
"""Those that load on a CPU, which has no kernels to run them."""


@dataclass(frozen=True)
class Models:
    """The models of one test session, each built on first use below one folder."""

    folder: Path

    def path(self, name: str, *, seed: int = 0, num_shards: int = 1, **config: Any) -> Path:
        """Return the folder of a checkpoint; `seed` changes its bytes and nothing else, `config` its shape."""
        changes = "".join(f"-{key}={value}" for key, value in sorted(config.items()))
        path = self.folder / f"{name}-seed{seed}-shards{num_shards}{changes}"
        if not (path / "config.json").exists():
            write(path, RECIPES[name], seed=seed, num_shards=num_shards, changes=config)
        return path


def write(path: Path, recipe: Recipe, *, seed: int, num_shards: int, changes: Config) -> None:
    config = {**recipe.config, **changes}
    tensors = recipe.build(config, seed)
    if recipe.quantize is not None:
        tensors, config["quantization_config"] = recipe.quantize(tensors)
    path.mkdir(parents=True)
    if num_shards == 1:
        save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    else:
        _save_shards(path, tensors, num_shards)
    _tokenizer().save(str(path / "tokenizer.json"))
    _dump(path / "tokenizer_config.json", TOKENIZER_CONFIG)
    _dump(path / "generation_config.json", {"bos_token_id": 0, "eos_token_id": 1})
    _dump(path / "config.json", config)  # last: its presence says that the checkpoint is whole


def _save_shards(path: Path, tensors: Tensors, num_shards: int) -> None:
    weight_map = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05}-of-{num_shards:05}.safetensors"
        part = {name: tensors[name] for name in sorted(tensors)[shard::num_shards]}
        save_file(part, path / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    _dump(path / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _dump(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1))


# Enough words for the vocabulary to be full, so that each id stands for some text.
TRAINING_TEXT = """
When in the course of serving a model becomes too slow for those who ask, another instance has to take its place beside
the first, and it needs the same weights, every one of them, before it may answer. It could read them from a disk, or
from across the network, as the first one did; but they are already there, in memory, one machine away. The quick brown
fox jumps over the lazy dog, hello world, zero one two three four five six seven eight nine ten eleven twelve thirteen.
Numbers 0123456789 and marks ,.;:!?()[]{}<>+-*/=%&|^~@#$_ belong to the language too, and so do names of months and
colours: January, February, March, April, May, June, July, August, September, October, November, December; red, orange,
yellow, green, blue, indigo, violet, black, white, grey. def main(argument: str) -> None: return print(argument)
"""
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "model_max_length": 2048,
}


@functools.cache
def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TRAINING_TEXT], trainer)
    return tokenizer
