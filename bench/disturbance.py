"""What forks cost the users of a seed: inter-token latency inside the windows in which bytes flow, against undisturbed.

    python -m bench.disturbance --device cuda --out FOLDER        # seed on GPU 0, pulls into GPU 1, or 0 if it is alone
    python -m bench.disturbance --device cpu --out FOLDER --size-mb 128 --streams 2 --seconds 15

One server decodes steadily: `--streams` requests at a time, or the fewest that give 70 % of what its full batch gives.
It is left alone for `--seconds`, then its weights are taken again and again (`bench.puller`) for as long, for each
backend: unthrottled, and with each of `--limits` in GB/s. A token counts as inside a window if any of the time since
the token before it was.
"""

from __future__ import annotations

import argparse
import bisect
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import httpx

from rfork.demo import model as models

from .gpu import servers

WARM_UP_S = 3.0
SHARE_OF_PEAK = 0.7
Ticks = list[list[float]]
"""For each request the moments at which its tokens came."""


def generate(url: str, streams: int, stop: Any, pipe: Connection) -> None:
    """In a process of its own: `streams` requests at a time until `stop`, then the moments of all tokens."""
    ticks: Ticks = []

    def one(number: int) -> None:
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=120) as http:
            turn = 0
            while not stop.is_set():
                mine: list[float] = []
                ticks.append(mine)
                body = {
                    "text": f"{number} {turn} The weights of a model",
                    "sampling_params": {"temperature": 0, "max_new_tokens": 400, "ignore_eos": True},
                    "stream": True,
                }
                with http.stream("POST", "/generate", json=body) as answer:
                    for line in answer.iter_lines():
                        if line.startswith("data: {"):
                            mine.append(time.monotonic())
                        if stop.is_set():
                            break
                turn += 1

    threads = [threading.Thread(target=one, args=(n,)) for n in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pipe.send(ticks)


class Load:
    """Requests that run inside the block; `ticks` afterwards."""

    def __init__(self, url: str, streams: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._stop = context.Event()
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=generate, args=(url, streams, self._stop, there), daemon=True)
        self.ticks: Ticks = []

    def __enter__(self) -> Load:
        self._process.start()
        time.sleep(WARM_UP_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self.ticks = self._pipe.recv()
        self._process.join()


def gaps(ticks: Ticks, from_s: float, to_s: float) -> list[tuple[float, float]]:
    """(end, length) of every pause between two tokens of one request that ends between the two moments."""
    return [(b, b - a) for mine in ticks for a, b in itertools.pairwise(mine) if from_s <= b <= to_s]


def inside(found: list[tuple[float, float]], windows: list[tuple[float, float]]) -> list[float]:
    """Lengths of the pauses that touch a window."""
    windows = sorted(windows)
    starts = [a for a, _ in windows]
    out = []
    for end, length in found:
        i = bisect.bisect_right(starts, end) - 1
        if i >= 0 and windows[i][1] >= end - length:
            out.append(length)
    return out


def quantiles(lengths: list[float]) -> dict[str, float]:
    if len(lengths) < 2:
        return {"tokens": len(lengths)}
    cuts = statistics.quantiles(lengths, n=100, method="inclusive")
    return {"tokens": len(lengths), "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98]}


def rate_at(url: str, streams: int, seconds: float) -> float:
    with Load(url, streams) as load:
        from_s = time.monotonic()
        time.sleep(seconds)
        to_s = time.monotonic()
    return sum(from_s <= t <= to_s for mine in load.ticks for t in mine) / (to_s - from_s)


def choose_streams(url: str, most: int) -> int:
    """The fewest streams that give 70 % of what `most` give."""
    peak = rate_at(url, most, 3.0)
    return next(c for c in range(1, most + 1) if c == most or rate_at(url, c, 2.0) >= SHARE_OF_PEAK * peak)


def measure(options: argparse.Namespace, url: str, streams: int) -> list[dict[str, Any]]:
    cases: list[dict[str, Any]] = [{"name": "undisturbed", "backend": None, "limit": None}]
    for backend in options.backends:
        limits = [None, *options.limits]
        cases += [{"name": f"{backend}, {_limit(x)}", "backend": backend, "limit": x} for x in limits]
    rows = []
    for case in cases:
        with Load(url, streams) as load:
            from_s = time.monotonic()
            pulls = _pulls(options, url, case) if case["backend"] else []
            if not case["backend"]:
                time.sleep(options.seconds)
            to_s = time.monotonic()
        found = gaps(load.ticks, from_s, to_s)
        windows = [(p["from_s"], p["to_s"]) for p in pulls]
        lengths = inside(found, windows) if windows else [length for _, length in found]
        flowing_s = sum(b - a for a, b in windows)
        rows.append({
            **case,
            **quantiles(lengths),
            "tokens_per_s": len(found) / (to_s - from_s),
            "pulls": len(pulls),
            "share_of_time": flowing_s / (to_s - from_s),
            "gbps": sum(p["nbytes"] for p in pulls) / flowing_s / 1e9 if flowing_s else None,
            "protocol": pulls[0]["protocol"] if pulls else None,
        })  # fmt: skip
        (options.out / "disturbance.json").write_text(json.dumps({"streams": streams, "rows": rows}, indent=1))
        sys.stdout.write("\n".join(table(rows, streams)[len(rows) > 1 and -1 :]) + "\n")
        sys.stdout.flush()
    return rows


def _limit(limit: float | None) -> str:
    return "unthrottled" if limit is None else f"{limit:g} GB/s"


def _pulls(options: argparse.Namespace, url: str, case: dict[str, Any]) -> list[dict[str, Any]]:
    device = f"cuda:{servers.last_gpu()}" if options.device == "cuda" else "cpu"
    command = [sys.executable, "-m", "bench.puller", "--url", url, "--device", device, "--backend", case["backend"]]
    command += ["--seconds", str(options.seconds), "--pause-s", str(options.pause_s), "--verify", options.verify]
    if case["limit"] is not None:
        command += ["--limit-gbps", str(case["limit"])]
    env = dict(os.environ)
    if device == "cuda:0":
        env["NCCL_HOSTID"] = "puller"  # else NCCL refuses two members on one GPU; so it takes sockets
    with (options.out / "puller.log").open("a") as log:
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=log, text=True, check=True, env=env)
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def table(rows: list[dict[str, Any]], streams: int) -> list[str]:
    calm = rows[0]
    lines = [
        f"{streams} streams; inter-token latency inside pull windows",
        f"{'':34}{'p50 ms':>9}{'p99 ms':>9}{'p99 ratio':>10}{'tokens/s':>10}{'pulls':>7}{'of time':>9}{'GB/s':>8}",
    ]
    for row in rows:
        if "p99_ms" not in row:
            lines.append(f"{row['name']:34} too few tokens in its windows ({row['tokens']})")
            continue
        rate = f"{row['gbps']:8.1f}" if row["gbps"] else f"{'–':>8}"
        lines.append(
            f"{row['name']:34}{row['p50_ms']:9.2f}{row['p99_ms']:9.2f}{row['p99_ms'] / calm['p99_ms']:10.2f}"
            f"{row['tokens_per_s']:10.0f}{row['pulls']:7}{row['share_of_time']:9.2f}{rate}"
        )
    return lines


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and disturbance.json")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--hold", type=Path, help="measure once this file exists; the server starts at once")
    parser.add_argument("--url", help="a server that runs already; else one is started")
    parser.add_argument(
        "--size-mb", type=int, help="a model of this size, written to disk; else 31 GB without a checkpoint"
    )
    parser.add_argument("--streams", type=int, help="requests at a time; else as many as give 70 %% of the peak")
    parser.add_argument("--most-streams", type=int, default=8, help="the server's full batch")
    parser.add_argument("--backends", nargs="+", default=["transfer_engine", "nccl"])
    parser.add_argument("--limits", type=float, nargs="*", default=[100.0, 25.0], help="read_gbps_limit to try, GB/s")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause-s", type=float, default=0.3, help="between two pulls")
    parser.add_argument("--verify", choices=["full", "sample", "off"], default="off")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    seed = None
    if options.url is None:
        seed = servers.Server("disturbed", _server_options(options), 0, _seed_flags(options), {})
        seed.wait()
        while options.hold is not None and not options.hold.exists():
            time.sleep(0.5)
        options.url = f"http://127.0.0.1:{seed.port}"
    try:
        streams = options.streams or choose_streams(options.url, options.most_streams)
        measure(options, options.url, streams)
    finally:
        if seed is not None:
            seed.kill()
    return 0


def _server_options(options: argparse.Namespace) -> argparse.Namespace:
    made = servers.parse(["--out", str(options.out), "--device", options.device])
    made.out, made.graphs, made.first_port = options.out, True, 24_000
    made.model = options.out / "model"
    if options.size_mb is None:
        servers.make_config(made)
    else:
        models.make(made.model, options.size_mb * 1_000_000)
    return made


def _seed_flags(options: argparse.Namespace) -> list[str]:
    dummy = ["--load-format", "dummy"] if options.size_mb is None else []
    return [*servers.SEED_FLAGS, *dummy]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
