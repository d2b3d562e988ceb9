"""Everything that is measured on the GPU host, in one command and about eight minutes.

    PYTHONPATH=test python -m bench.gpu.run --out FOLDER

Servers start a little after the rest, and import for 20 s and more before they touch a GPU: by then the loader harness
is done with its largest set. Last, with nothing else running, comes what forks cost a seed's users. Each part writes
PART.log and its JSON into FOLDER; their tables are printed at the end. Exits 1 if a part failed.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

PARTS = ("tests", "loader", "late", "demo", "matrix", "servers", "disturbance")
TESTS = [
    *("test/core/test_on_device.py", "test/core/test_digest.py", "test/core/test_regions.py"),
    *("test/transports/test_select.py", "test/transports/test_conformance.py", "test/collective/test_on_device.py"),
]
FIRST, ALONE = ("tests", "loader", "late"), ("disturbance",)
NVLINK = ["--protocol", "nvlink_intra", "--seed-device", "cuda:0", "--device", "cuda:1"]
SHOWN_LINES = 160


def commands(options: argparse.Namespace) -> dict[str, list[str]]:
    """Arguments to this Python, by part."""
    out: Path = options.out
    cpu = options.device == "cpu"
    device = ["--device", options.device]
    loader = ["--json", str(out / "loader.json"), "--repeat", str(options.repeat)]
    loader += ["--sets", *options.loader_sets] if options.loader_sets else []
    if cpu:
        loader += ["--device", "cpu", "--seed-device", "cpu", "--protocol", "tcp", "--sets", "tiny", "small-1k"]
    servers = ["--out", str(out / "servers"), *device, "--variants", *options.variants, "--stagger-s", "12"]
    small = ["--layers", "2", "--hidden", "640", "--inner", "1024"]
    disturbance = ["--out", str(out / "disturbance"), *device, "--hold", str(out / "go")]
    disturbance += ["--seconds", str(options.seconds), "--streams", "1" if cpu else str(options.streams)]
    disturbance += ["--size-mb", "64"] if cpu else ["--limits", *map(str, options.limits)]
    demo = ["demo", *device, "--json", str(out / "demo.json"), "--keep-logs", str(out / "demo")]
    rows = options.matrix_rows or (["llama"] if cpu else [])
    matrix = ["--out", str(out / "matrix"), *device, *(["--rows", *rows] if rows else [])]
    matrix += ["--kinds", *options.matrix_kinds] if options.matrix_kinds else []
    late = ["--out", str(out / "late.json"), *(["--gib", "0.25"] if cpu else ["--gib", "16", *NVLINK])]
    return {
        "tests": ["-m", "pytest", "-c", os.devnull, "--rootdir", ".", "--import-mode=importlib", "-q", *TESTS],
        "loader": ["-m", "bench.gpu.loader", *loader],
        "late": ["-m", "bench.late", *late],
        "demo": ["-m", "rfork.cli", *demo],
        "matrix": ["-m", "bench.gpu.matrix", *matrix],
        "servers": ["-m", "bench.gpu.servers", *servers, *(small if cpu else [])],
        "disturbance": ["-m", "bench.disturbance", *disturbance],
    }


def main(argv: list[str]) -> int:
    options = parse(argv)
    options.out = options.out.resolve()
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "go").unlink(missing_ok=True)
    started_s = time.monotonic()
    known = commands(options)
    running: dict[str, subprocess.Popen[bytes]] = {}
    ended: dict[str, str] = {}

    def start(part: str) -> None:
        log = (options.out / f"{part}.log").open("wb")
        env = {**os.environ, "PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1"}
        running[part] = subprocess.Popen([sys.executable, *known[part]], stdout=log, stderr=subprocess.STDOUT, env=env)

    def wait(parts: list[str]) -> None:
        while any(part in running for part in parts):
            for part in [p for p in parts if p in running]:
                code = running[part].poll()
                late = time.monotonic() - started_s > options.limit_s
                if code is None and late:
                    running[part].terminate()
                    code = running[part].wait(30)
                if code is not None:
                    how = "ok" if code == 0 else f"FAILED ({code})"
                    ended[part] = f"{how} after {time.monotonic() - started_s:.0f} s{' (cut)' if late else ''}"
                    del running[part]
            if time.monotonic() - started_s > options.go_after_s:
                (options.out / "go").touch()
            time.sleep(0.5)

    beside = [p for p in options.parts if p not in ALONE]
    for part in sorted(options.parts, key=lambda part: part not in FIRST):
        if part not in FIRST and any(p in running for p in FIRST):
            time.sleep(max(0.0, started_s + options.head_start_s - time.monotonic()))
        start(part)
    wait(beside)
    (options.out / "go").touch()
    wait(list(options.parts))
    for part in options.parts:
        lines = (options.out / f"{part}.log").read_text(errors="replace").splitlines()
        told = [line for line in lines if not line.startswith(("I1", "W1", "E1", "WARNING: Logging", "rfork"))]
        sys.stdout.write("\n".join([f"\n== {part}: {ended[part]}", *told[-SHOWN_LINES:]]) + "\n")
    return 0 if all(text.startswith("ok") for text in ended.values()) else 1


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--variants", nargs="+", default=["stock-te", "rfork-te", "stock-nccl", "rfork-nccl", "disk"])
    parser.add_argument("--repeat", type=int, default=3, help="repetitions in the loader harness")
    parser.add_argument("--seconds", type=float, default=10.0, help="length of each case of the disturbance")
    parser.add_argument("--streams", type=int, default=6, help="requests at a time while the seed is disturbed")
    parser.add_argument("--limits", type=float, nargs="*", default=[100.0, 25.0], help="read_gbps_limit to try, GB/s")
    parser.add_argument("--matrix-rows", nargs="+", help="rows of the matrix; all without it")
    parser.add_argument("--matrix-kinds", nargs="+", help="stock, rfork; both without it")
    parser.add_argument("--loader-sets", nargs="+", help="sets of the loader harness; its own choice without it")
    parser.add_argument("--head-start-s", type=float, default=15.0, help="of the loader before any server starts")
    parser.add_argument("--go-after-s", type=float, default=1e9, help="begin the disturbance then, whatever still runs")
    parser.add_argument("--limit-s", type=float, default=480.0, help="what is not over by then is ended")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
