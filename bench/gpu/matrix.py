"""Layouts that the CPU has no kernels for: stock SGLang's fork beside ours, on the GPU host.

    PYTHONPATH=test python -m bench.gpu.matrix --out FOLDER
    PYTHONPATH=test python -m bench.gpu.matrix --out FOLDER --device cpu --rows llama       # rehearsal

For each row a tiny checkpoint is written, and one seed of each kind reads it: stock SGLang with the plugin switched
off, and ours. A client of the same kind forks from it; then greedy tokens of four prompts, and SGLang's own digest of
every tensor, are compared with the seed's. `FELL BACK` and `did not start` are results too: the log says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from support import models, quantized

from . import servers
from .servers import Server

PROMPTS = ("Hello world", "The weights of a model", "def fork(seed):", "1 2 3 4")
EAGLE = [
    *("--speculative-algorithm", "EAGLE", "--speculative-num-steps", "1"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"),
]
CHECKSUM_S = 20.0  # once, SGLang 0.5.16 did not answer within minutes
NO_WARM_UP = {"SGLANG_JIT_DEEPGEMM_PRECOMPILE": "0"}  # it compiles for minutes what a few tokens don't need
KV_SCALE = 0.002  # so small that values saturate: whoever loses it answers otherwise


def fp8_with_kv_scales(tensors: models.Tensors) -> tuple[models.Tensors, dict[str, Any]]:
    """FP8 weights, and scales for an FP8 cache of keys and values, of which SGLang keeps floats beside the tensors."""
    out, config = quantized.fp8_per_tensor(tensors)
    for name in [n for n in tensors if n.endswith("self_attn.k_proj.weight")]:
        prefix = name.removesuffix(".k_proj.weight")
        for which in ("k", "v"):
            out[f"{prefix}.{which}_scale"] = torch.tensor(KV_SCALE)
    return out, config


# What the GPU's kernels for latent attention are made for.
WIDE_LATENT = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@dataclass(frozen=True)
class Row:
    recipe: models.Recipe
    flags: tuple[str, ...] = ()
    draft: bool = False
    changes: dict[str, Any] | None = None


ROWS = {
    "llama": Row(models.RECIPES["llama"]),
    "fp8-block-moe": Row(models.Recipe(models.QWEN3_MOE, quantize=quantized.fp8_block)),
    "fp8-kv-scales": Row(models.Recipe(models.LLAMA, quantize=fp8_with_kv_scales), ("--kv-cache-dtype", "fp8_e4m3")),
    "mla": Row(models.RECIPES["deepseek-v2"], changes=WIDE_LATENT),
    "eagle": Row(models.RECIPES["llama"], draft=True),
}


def run_row(options: argparse.Namespace, name: str, kind: str) -> dict[str, Any]:
    """One seed, one client of one kind; what the client holds against what the seed holds."""
    row = ROWS[name]
    folder = options.out / "models" / f"{name}-{kind}"
    models.write(folder, row.recipe, seed=0, num_shards=1, changes=row.changes or {})
    flags = list(row.flags)
    if row.draft:
        draft = folder.with_name(f"{folder.name}-draft")
        models.write(draft, models.RECIPES["llama-eagle"], seed=0, num_shards=1, changes={})
        flags += ["--speculative-draft-model-path", str(draft), *EAGLE]
    own = argparse.Namespace(**{**vars(options), "model": folder})
    _, client_flags, seed_env, client_env = servers.variants(own)[f"{kind}-te"]
    client_flags = [f for f in client_flags if f != "--rfork-config" and not f.startswith("{")]
    result: dict[str, Any] = {"row": name, "kind": kind}
    started: list[Server] = []
    try:
        seed = Server(f"{name}-{kind}-seed", own, 0, [*servers.SEED_FLAGS, *flags], seed_env | NO_WARM_UP)
        started.append(seed)
        seed.wait()
        client = Server(
            f"{name}-{kind}-client", own, servers.last_gpu() if options.device == "cuda" else 0,
            [*servers.filled(client_flags, seed, options.first_port), *flags], client_env | NO_WARM_UP,
        )  # fmt: skip
        started.append(client)
        result["weights"] = client.wait()["weights"]
        result |= compare(seed, client)
    except RuntimeError as error:
        result["error"] = str(error)
    finally:
        for server in started:
            server.kill()
    return result


def compare(seed: Server, client: Server) -> dict[str, Any]:
    """Whether tokens and SGLang's digests agree; None where a side gave none."""
    tokens = [[answer_of(server, prompt) for prompt in PROMPTS] for server in (seed, client)]
    sums = [checksums_of(server) for server in (seed, client)]
    wrong = sorted(n for n in sums[0].keys() | sums[1].keys() if sums[0].get(n) != sums[1].get(n))
    return {
        "tokens_equal": tokens[0] == tokens[1] if tokens[0][0] and tokens[1][0] else None,
        "distinct_tokens": len({t for answer in tokens[0] for t in answer or ()}),
        "tensors": len(sums[0]),
        "tensors_wrong": wrong if sums[0] and sums[1] else None,
    }


def answer_of(server: Server, prompt: str) -> list[int] | None:
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}}
    answer = server.post("/generate", body)
    return list(answer["output_ids"]) if answer else None


def checksums_of(server: Server) -> dict[str, str]:
    answer = server.post("/weights_checker", {"action": "checksum"}, CHECKSUM_S) or {}
    return {f"{n}@{r}": d for r, rank in enumerate(answer.get("ranks") or ()) for n, d in rank["checksums"].items()}


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "error" in row:
            lines.append(f"{row['row']:16}{row['kind']:8}{'–':>8}{'did not start':>22}  {row['error'][:160]}")
            continue
        wrong = row["tensors_wrong"]
        tensors = "not told" if wrong is None else f"{row['tensors'] - len(wrong)} of {row['tensors']} equal"
        tokens = {True: "equal", False: "DIFFER", None: "–"}[row["tokens_equal"]]
        lines.append(f"{row['row']:16}{row['kind']:8}{tokens:>8}{tensors:>22}  {_source(row)}")
    return lines


def _source(row: dict[str, Any]) -> str:
    report = row["weights"]
    if report is None:
        return "stock"
    if report["source"] == "seed":
        return f"forked over {report['protocol']}, verify {report['verify']}"
    return f"FELL BACK: {report['fallback_reason']}: {(report['fallback_detail'] or '')[:160]}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rows", nargs="+", choices=list(ROWS), default=list(ROWS))
    parser.add_argument("--kinds", nargs="+", choices=["stock", "rfork"], default=["stock", "rfork"])
    parser.add_argument("--first-port", type=int, default=25_000)
    parser.add_argument("--at-once", type=int, default=10, help="pairs of servers that run at a time")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.graphs = False
    jobs = [(name, kind) for name in options.rows for kind in options.kinds]
    rows: list[dict[str, Any]] = []
    with ThreadPoolExecutor(options.at_once) as pool:
        for future in as_completed(pool.submit(run_row, options, *job) for job in jobs):
            rows.append(future.result())
            (options.out / "matrix.json").write_text(json.dumps(rows, indent=1))
            sys.stdout.write("\n".join(table(rows[-1:])) + "\n")
            sys.stdout.flush()
    ours = [row for row in rows if row["kind"] == "rfork"]
    return 0 if all(row.get("tokens_equal") and not row.get("tensors_wrong") for row in ours) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
