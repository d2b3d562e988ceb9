"""A checkpoint to show a fork with: a Llama with random weights of a chosen size, and a tokenizer trained on the spot.

Weights are drawn at a scale that makes every layer matter and norms differ from 1, so that greedy decoding gives varied
tokens which change when any one tensor is wrong.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

VOCAB_SIZE = 2048
MAX_FILE_NBYTES = 4 << 30
_BATCH_NBYTES = 1 << 29
_WIDTHS = ((1 << 30, 1024), (6 << 30, 2048), (24 << 30, 4096), (1 << 62, 6144))
"""Up to this many bytes, this hidden size."""


class Spec(NamedTuple):
    """One tensor: normal values around `mean`."""

    name: str
    shape: tuple[int, ...]
    deviation: float
    mean: float = 0.0

    @property
    def nbytes(self) -> int:
        return 2 * math.prod(self.shape)


def make(folder: Path, nbytes: int, on_bytes: Callable[[int], None] = lambda nbytes: None) -> int:
    """Write a checkpoint of at least `nbytes` bytes of weights into `folder`; return how many it has.

    Needs numpy and tokenizers, which come with SGLang. Raises OSError if the disk is full.
    """
    return write(folder, _config(nbytes), on_bytes)


def write(folder: Path, config: dict[str, Any], on_bytes: Callable[[int], None] = lambda nbytes: None) -> int:
    """The same for a Llama of the shape that `config` (a config.json) gives."""
    specs = _specs(config)
    folder.mkdir(parents=True, exist_ok=True)
    files = list(_files(specs))
    index: dict[str, str] = {}
    for number, part in enumerate(files, 1):
        name = f"model-{number:05}-of-{len(files):05}.safetensors" if len(files) > 1 else "model.safetensors"
        _write_file(folder / name, part, number, on_bytes)
        index.update({spec.name: name for spec in part})
    if len(files) > 1:
        _dump(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": index})
    _tokenizer().save(str(folder / "tokenizer.json"))
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    _dump(folder / "tokenizer_config.json", tokenizer)
    _dump(folder / "config.json", config)
    return sum(spec.nbytes for spec in specs)


def weights_nbytes(folder: Path) -> int:
    """Bytes of the weight files of an existing checkpoint; 0 where there are none."""
    return sum(f.stat().st_size for f in folder.iterdir() if f.suffix in (".safetensors", ".bin", ".pt", ".gguf"))


def _config(nbytes: int) -> dict[str, Any]:
    hidden = next(width for limit, width in _WIDTHS if nbytes <= limit)
    head = 64 if hidden < 4096 else 128
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": hidden,
        "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": 1,
        "num_attention_heads": hidden // head,
        "num_key_value_heads": hidden // head // 4,
        "head_dim": head,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    one = sum(spec.nbytes for spec in _specs(config))
    layer = sum(spec.nbytes for spec in _specs(config) if ".layers." in spec.name)
    config["num_hidden_layers"] = max(2, 1 + math.ceil((nbytes - one) / layer))
    return config


def _specs(config: dict[str, Any]) -> list[Spec]:
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    vocab = config["vocab_size"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def linear(name: str, rows: int, columns: int) -> Spec:
        # 1.5 rather than 1: layers must outweigh the residual, or the last token is repeated for ever.
        return Spec(f"{name}.weight", (rows, columns), 1.5 / math.sqrt(columns))

    def norm(name: str) -> Spec:
        return Spec(f"{name}.weight", (hidden,), 0.1, mean=1.0)

    specs = [Spec("model.embed_tokens.weight", (vocab, hidden), 1 / math.sqrt(hidden))]
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        specs += [
            norm(f"{at}.input_layernorm"),
            linear(f"{at}.self_attn.q_proj", heads * head, hidden),
            linear(f"{at}.self_attn.k_proj", kv_heads * head, hidden),
            linear(f"{at}.self_attn.v_proj", kv_heads * head, hidden),
            linear(f"{at}.self_attn.o_proj", hidden, heads * head),
            norm(f"{at}.post_attention_layernorm"),
            linear(f"{at}.mlp.gate_proj", inner, hidden),
            linear(f"{at}.mlp.up_proj", inner, hidden),
            linear(f"{at}.mlp.down_proj", hidden, inner),
        ]
    return [*specs, norm("model.norm"), linear("lm_head", vocab, hidden)]


def _files(specs: list[Spec], limit: int = MAX_FILE_NBYTES) -> Iterator[list[Spec]]:
    """Cut a list of tensors into runs of at most `limit` bytes; a larger tensor is a run of its own."""
    part: list[Spec] = []
    for spec in specs:
        if part and sum(s.nbytes for s in part) + spec.nbytes > limit:
            yield part
            part = []
        part.append(spec)
    if part:
        yield part


def _write_file(path: Path, specs: list[Spec], number: int, on_bytes: Callable[[int], None]) -> None:
    """One file of the safetensors format: length of the header, header, bytes. Never holds more than a batch."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for spec in specs:
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [at, at + spec.nbytes]}
        at += spec.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file, ThreadPoolExecutor(min(32, os.cpu_count() or 1)) as pool:
        file.write(len(text).to_bytes(8, "little") + text)
        seeds = iter(range(number * 1_000_000, (number + 1) * 1_000_000))
        for batch in _files(specs, _BATCH_NBYTES):
            for data in pool.map(_values, batch, seeds):
                file.write(data)
                on_bytes(len(data))


def _values(spec: Spec, seed: int) -> memoryview:
    """The tensor's bytes in bfloat16: the upper half of each float32."""
    import numpy as np

    values = np.random.default_rng(seed).standard_normal(math.prod(spec.shape), dtype=np.float32)
    values *= np.float32(spec.deviation)
    values += np.float32(spec.mean)
    return memoryview((values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8).data)


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(  # type: ignore[no-untyped-call]
        vocab_size=VOCAB_SIZE,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return tokenizer


def _texts() -> Iterator[str]:
    """Text that is on every machine where this runs: our own sources."""
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        yield path.read_text(encoding="utf-8")


def _dump(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1), encoding="utf-8")
