"""The loader harness: what moving a model costs, phase by phase, without an engine around it.

    python -m bench.gpu.loader                                        # two GPUs, NVLink: everything
    python -m bench.gpu.loader --device cpu --seed-device cpu --protocol tcp --sets tiny small-1k --repeat 2

For each set of tensors one seed process runs the product's seed service, and each repetition is a fresh process:

copy          the same bytes from device to device by torch: what the link gives
raw-tensor    Mooncake's own batch read, one slice for each tensor; first and later reads
raw-region    Mooncake's own batch read, slices merged inside regions and at most 256 MiB; first and later reads
off, full     a fork by the product, from the seed's address to the destroyed engine, without and with digests

`+fork` sets are read from a seed that has forked its weights itself. Tables show medians and, in brackets, the range.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from typing import Any

from . import clientside
from .seedside import SeedPlan, SeedProcess

KINDS = ("copy", "raw-tensor", "raw-region", "off", "full")
REPETITION_S = 180.0
PRELOAD = [
    "torch",
    "numpy",
    "rfork.client.fork",
    "rfork.inventory.target",
    "rfork.seed.node",
    "rfork.seed.app",
    "rfork.seed.rank",
]


def in_a_fresh_process(task: clientside.Task) -> dict[str, Any]:
    """`clientside.run(task)` in a process that has imported everything and touched no device. Raises RuntimeError."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=_child, args=(there, task), daemon=True)
    process.start()
    there.close()
    try:
        if not here.poll(REPETITION_S):
            raise RuntimeError(f"{task.kind} of {task.name} took longer than {REPETITION_S:g} s")
        result: dict[str, Any] = here.recv()
    except EOFError:
        result = {"error": "its process died"}
    finally:
        process.join(10)
        if process.is_alive():
            process.kill()
    if "error" in result:
        raise RuntimeError(f"{task.kind} of {task.name}: {result['error']}")
    return result


def _child(pipe: Any, task: clientside.Task) -> None:
    try:
        pipe.send(clientside.run(task))
    except BaseException as error:
        pipe.send({"error": f"{type(error).__name__}: {error}"})


def measure(options: argparse.Namespace, name: str) -> dict[str, Any]:
    """All repetitions of one set, the kinds in turn, so that a slow moment of the machine hits all alike."""
    base, _, forked = name.partition("+")
    seeds = [SeedProcess(SeedPlan(base, options.seed_device, options.protocol, options.host))]
    result: dict[str, Any] = {"set": name, "runs": {kind: [] for kind in options.kinds}, "errors": []}
    try:
        result["seed"] = seeds[0].wait()
        if forked:
            plan = SeedPlan(base, options.seed_device, options.protocol, options.host, fork_from=seeds[0].url)
            seeds.append(SeedProcess(plan))
            result["seed"] = seeds[1].wait()
        for _ in range(options.repeat):
            for kind in options.kinds:
                task = clientside.Task(
                    kind, base, seeds[-1].url, options.device, options.seed_device, options.protocol, options.host
                )
                try:
                    result["runs"][kind].append(in_a_fresh_process(task))
                except RuntimeError as error:
                    result["errors"].append(str(error))
    finally:
        for seed in seeds:
            seed.stop()
    return result


def table(result: dict[str, Any]) -> list[str]:
    """Lines for one set."""
    seed = result.get("seed", {})
    nbytes = seed.get("nbytes", 0)
    steps = ", ".join(f"{k} {v:.3f} s" for k, v in seed.get("steps_s", {}).items())
    what = f"{nbytes / 1e9:.2f} GB in {seed.get('groups')} groups, {seed.get('regions')} regions"
    lines = ["", f"{result['set']}: {what}; seed: {steps}"]
    for kind, runs in result["runs"].items():
        if not runs:
            continue
        extra = {
            k: runs[-1][k] for k in ("slices", "regions", "protocol", "peak_over_model") if runs[-1].get(k) is not None
        }
        lines.append(f"  {kind:10} {len(runs)} runs  {extra}")
        for phase in runs[-1]["phases_s"]:
            values = [run["phases_s"][phase] for run in runs if phase in run["phases_s"]]
            middle = statistics.median(values)
            rate = (
                f"{runs[-1]['nbytes'] / middle / 1e9:8.1f} GB/s" if phase in ("first", "later", "read", "all") else ""
            )
            lines.append(
                f"    {phase:16} {1e3 * middle:9.2f} ms [{1e3 * min(values):.2f} to {1e3 * max(values):.2f}] {rate}"
            )
    return [*lines, *(f"  failed: {error}" for error in result["errors"])]


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="+", default=["llama-2g", "llama-31g", "small-24k", "small-24k+fork"])
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--seed-device", default="cuda:0")
    parser.add_argument("--device", default="cuda:1")
    parser.add_argument("--protocol", default="auto", help="auto, nvlink_intra, rdma or tcp")
    parser.add_argument("--host", default="127.0.0.1", help="address that both sides advertise")
    parser.add_argument("--json", help="file for every single figure")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    multiprocessing.get_context("forkserver").set_forkserver_preload(PRELOAD)
    results = []
    for name in options.sets:
        started_s = time.perf_counter()
        result = measure(options, name)
        results.append(result)
        sys.stdout.write("\n".join([*table(result), f"  took {time.perf_counter() - started_s:.1f} s"]) + "\n")
        sys.stdout.flush()
        if options.json:
            with open(options.json, "w") as file:
                json.dump(results, file, indent=1)
    return 1 if any(r["errors"] for r in results) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
