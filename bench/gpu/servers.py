"""Whole servers on the GPU host: the same fork by stock SGLang and by R-Fork, from process start to first token.

    python -m bench.gpu.servers --out FOLDER --variants stock-te rfork-te
    python -m bench.gpu.servers --out FOLDER --device cpu --layers 4 --hidden 512 --inner 1024      # rehearsal

Seeds start with `--load-format dummy`: bytes don't matter here, and nothing of this size has to be written to disk
first. Each variant has a seed of its own kind on the first GPU; its clients start one after another on the second, each
in a fresh process. Stock SGLang runs with the plugin switched off, and with the two variables that its transfer engine
needs to use NVLink; R-Fork with none. `disk` is stock SGLang reading the same model from files that were just written.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rfork.demo import model as models
from rfork.demo.processes import Group
from rfork.demo.server import HOST, PORT_GAP

READY_S = 240.0
COMMON_FLAGS = [
    *("--skip-server-warmup", "--disable-radix-cache", "--random-seed", "1"),
    *("--max-total-tokens", "8192", "--max-running-requests", "8"),
]
CPU_FLAGS = ["--sleep-on-idle"]  # else an idle scheduler spins on a core
CUDA_FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"]
NO_GRAPHS = ["--disable-cuda-graph"]  # load times only
DECODE_GRAPHS = ["--disable-prefill-cuda-graph", "--cuda-graph-max-bs-decode", "8"]
DISK = ["--load-format", "safetensors"]
SEED_FLAGS = ["--remote-instance-weight-loader-start-seed-via-transfer-engine"]
LIVE = '{"weights": "live", "content": "checkpoint:dummy", "fallback": "never"}'
NVLINK = {"MC_INTRANODE_NVLINK": "true", "MOONCAKE_PROTOCOL": "rdma"}
_ELAPSED = re.compile(r"Load weight end\..*?elapsed=([\d.]+)")


_taken: set[int] = set()
_taking = threading.Lock()


def next_port(first: int) -> int:
    """A port from `first` on that nobody listens on and that this process has not given out, far from the others."""
    with _taking:
        for port in range(first, 65_000, PORT_GAP):
            if port not in _taken and _is_free(port):
                _taken.add(port)
                return port
    raise RuntimeError(f"no free port from {first} on")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
    return True


def last_gpu() -> int:
    """Where clients go: the second GPU, or the only one."""
    import torch

    return min(1, torch.cuda.device_count() - 1)


class Server:
    """One server and its clock. Ends with its `kill()`, or with us."""

    def __init__(self, name: str, options: argparse.Namespace, gpu: int, flags: list[str], env: dict[str, str]) -> None:
        self.port = next_port(options.first_port)
        self.name, self.gpu = name, gpu
        self.log = options.out / f"{name}.log"
        graphs = DECODE_GRAPHS if options.graphs else NO_GRAPHS
        own = CPU_FLAGS if options.device == "cpu" else [*CUDA_FLAGS, *graphs, "--base-gpu-id", str(gpu)]
        argv = ["-m", "sglang.launch_server", "--host", HOST, "--port", str(self.port)]
        argv += ["--model-path", str(options.model if flags[:2] != DISK else options.checkpoint)]
        if env.get("SGLANG_PLUGINS") and SEED_FLAGS[0] in flags:
            # Stock seeds of one host get into each other's way at 6789; ours have no such server.
            argv += ["--engine-info-bootstrap-port", str(next_port(options.first_port))]
        self._started_s = time.monotonic()
        self._group = Group([*argv, *COMMON_FLAGS, *own, *flags], _environment(options, env), self.log, options.out)

    def get(self, path: str) -> Any:
        return _http("GET", self.port, path)

    def wait(self) -> dict[str, Any]:
        """Seconds to the first answer and to the first token, and what its log and status tell of the weights."""
        while self.get("/model_info") is None:
            if self._group.ended or time.monotonic() - self._started_s > READY_S:
                raise RuntimeError(f"{self.name} is not ready ({self._group.ended}): {_last_words(self.log)}")
            time.sleep(0.1)
        facts: dict[str, Any] = {"name": self.name, "gpu": self.gpu, "ready_s": time.monotonic() - self._started_s}
        sampling = {"temperature": 0, "max_new_tokens": 1, "ignore_eos": True}
        answer = _http("POST", self.port, "/generate", {"text": "Hello", "sampling_params": sampling})
        facts["first_token_s"] = time.monotonic() - self._started_s if answer else None
        found = _ELAPSED.findall(self.log.read_text(errors="replace"))
        facts["load_weight_s"] = float(found[0]) if found else None
        status = self.get("/rfork/v1/status")
        facts["weights"] = status["weights"] if status else None
        return facts

    def post(self, path: str, body: Any, timeout_s: float = 120) -> Any:
        return _http("POST", self.port, path, body, timeout_s)

    def kill(self) -> None:
        self._group.kill()


def _http(method: str, port: int, path: str, body: Any = None, timeout_s: float = 120) -> Any:
    import httpx

    try:
        url = f"http://{HOST}:{port}{path}"
        answer = httpx.request(method, url, json=body, timeout=timeout_s, trust_env=False, verify=False)
        return answer.json() if answer.status_code == 200 else None
    except (httpx.TransportError, ValueError):
        return None


def _last_words(log: Path) -> str:
    return " | ".join(log.read_text(errors="replace").splitlines()[-12:])[-2000:]


def _environment(options: argparse.Namespace, own: dict[str, str]) -> dict[str, str]:
    ours = ("RFORK_", "MC_", "MOONCAKE_", "SGLANG_PLUGINS")
    env = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
    env |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONUNBUFFERED": "1"}
    env["RFORK_ADVERTISE_HOST"] = HOST
    if options.device == "cpu":
        env |= {"SGLANG_PLATFORM": "host_cpu", "OMP_NUM_THREADS": "1"}
    return env | own


def make_config(options: argparse.Namespace) -> None:
    """A folder with a config and a tokenizer, and no weights."""
    spare = options.out / "tokenizer"
    models.make(spare, 16_000_000)
    config = json.loads((spare / "config.json").read_text())
    config |= {
        "hidden_size": options.hidden,
        "intermediate_size": options.inner,
        "num_hidden_layers": options.layers,
        "num_attention_heads": options.hidden // 128,
        "num_key_value_heads": max(1, options.hidden // 128 // 5),
        "head_dim": 128,
        "vocab_size": options.vocab,
    }
    options.model.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(spare / name, options.model / name)
    (options.model / "config.json").write_text(json.dumps(config))
    shutil.rmtree(spare)


Variant = tuple[list[str] | None, list[str], dict[str, str], dict[str, str]]


def variants(options: argparse.Namespace) -> dict[str, Variant]:
    """Name → flags of the seed (None: it has none), flags of the client, environments of the seed and of the client.

    `PORT` stands for the seed's port, `GROUP` for a free one.
    """
    te, nccl = (["--remote-instance-weight-loader-backend", name] for name in ("transfer_engine", "nccl"))
    ask = ["--load-format", "remote_instance", "--remote-instance-weight-loader-seed-instance-ip", HOST]
    ask += ["--remote-instance-weight-loader-seed-instance-service-port", "PORT"]
    groups = ["--remote-instance-weight-loader-send-weights-group-ports", "[GROUP]"]
    dummy = ["--load-format", "dummy"]
    plain = {"SGLANG_PLUGINS": "host_cpu"}
    stock = {**plain, **(NVLINK if options.device == "cuda" else {})}

    def ours(**more: Any) -> list[str]:
        return ["--rfork-config", json.dumps({**json.loads(LIVE), **more})]

    return {
        "stock-te": ([*dummy, *SEED_FLAGS], [*ask, *te], stock, stock),
        "rfork-te": ([*dummy, *SEED_FLAGS], [*ask, *te, *ours()], {}, {}),
        "rfork-te-off": ([*dummy, *SEED_FLAGS], [*ask, *te, *ours(verify="off")], {}, {}),
        "stock-nccl": ([*dummy, *SEED_FLAGS], [*ask, *nccl, *groups], stock, plain),
        "rfork-nccl": ([*dummy, *SEED_FLAGS], [*ask, *nccl, *ours()], {}, {}),
        "disk": (None, DISK, plain, plain),
    }


def filled(flags: list[str], seed: Server | None, first_port: int) -> list[str]:
    group = str(next_port(first_port))
    port = str(seed.port) if seed else "no seed"
    return [flag.replace("PORT", port).replace("GROUP", group) for flag in flags]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    known = variants(options)
    written = _write_beside(options) if "disk" in options.variants else None
    seeds: dict[str, Server] = {}
    rows: list[dict[str, Any]] = []
    kinds: dict[str, str] = {}
    try:
        for name in options.variants:
            flags, _, env, _ = known[name]
            kind = json.dumps([flags, sorted(env.items())])  # variants with equal seeds share one
            kinds[name] = kind
            if kind not in seeds and flags is not None:
                seeds[kind] = Server(f"seed-{name}", options, 0, flags, env)
        for seed in seeds.values():
            try:
                rows.append(seed.wait())
            except RuntimeError as error:
                rows.append({"name": seed.name, "error": str(error)})
        if written is not None:
            written.result()
        jobs = [(f"{name}-{n}", name) for n in range(options.repeat) for name in options.variants]
        workers = len(jobs) if options.stagger_s else 1
        with ThreadPoolExecutor(workers) as pool:
            clients = [
                pool.submit(_client, options, title, known[name], seeds.get(kinds[name]), turn * options.stagger_s)
                for turn, (title, name) in enumerate(jobs)
            ]
            for client in clients:
                rows.append(client.result())
                (options.out / "servers.json").write_text(json.dumps(rows, indent=1))
    finally:
        for seed in seeds.values():
            seed.kill()
    return rows


def _write_beside(options: argparse.Namespace) -> Future[int]:
    """The model's weights as files, while seeds start: what a server without a seed reads."""
    config = json.loads((options.model / "config.json").read_text())
    pool = ThreadPoolExecutor(1)
    return pool.submit(models.write, options.checkpoint, config)


def _client(
    options: argparse.Namespace, name: str, variant: Variant, seed: Server | None, delay_s: float
) -> dict[str, Any]:
    time.sleep(delay_s)
    _, flags, _, env = variant
    client = Server(
        name, options, last_gpu() if options.device == "cuda" else 0, filled(flags, seed, options.first_port), env
    )
    try:
        return client.wait()
    except RuntimeError as error:
        return {"name": name, "error": str(error)}
    finally:
        client.kill()


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [f"{'server':18} {'load weight s':>13} {'ready s':>8} {'first token s':>13}  weights"]
    for row in rows:
        if "error" in row:
            lines.append(f"{row['name']:18} failed: {row['error']}")
            continue
        load, first = (f"{row[k]:.2f}" if row[k] is not None else "–" for k in ("load_weight_s", "first_token_s"))
        lines.append(f"{row['name']:18} {load:>13} {row['ready_s']:8.1f} {first:>13}  {_weights(row['weights'])}")
    return lines


def _weights(report: dict[str, Any] | None) -> str:
    if not report or report["source"] != "seed":
        return str(report["fallback_reason"] or report["source"]) if report else "stock"
    phases = ", ".join(f"{name} {1e3 * spent_s:.0f}" for name, spent_s in report["phases_s"].items())
    return f"{report['nbytes'] / 1e9:.1f} GB over {report['protocol']}, verify {report['verify']}; ms: {phases}"


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and servers.json")
    parser.add_argument("--variants", nargs="+", default=["stock-te", "rfork-te"])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument(
        "--stagger-s", type=float, default=0.0, help="start clients so far apart, not one after another"
    )
    parser.add_argument("--first-port", type=int, default=22_000, help="servers take ports from here on")
    parser.add_argument("--graphs", action="store_true", help="capture CUDA graphs for decoding, as in production")
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=5120)
    parser.add_argument("--inner", type=int, default=20480)
    parser.add_argument("--vocab", type=int, default=32000)
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    options.model, options.checkpoint = options.out / "model", options.out / "model-on-disk"
    make_config(options)
    rows = measure(options)
    sys.stdout.write("\n".join(table(rows)) + "\n")
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
