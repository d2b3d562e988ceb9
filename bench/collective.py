"""Rate of a collective transfer against a raw broadcast of the same bytes, in one run.

    python -m bench.collective --gib 1                                                       # gloo, two processes
    python -m bench.collective --gib 20 --seed-device cuda:0 --device cuda:1 --out nccl.json  # NCCL, two GPUs
    python -m bench.collective --gib 2 --seed-device cuda:0 --device cuda:0                   # NCCL's sockets, one GPU

A second process is the seed: the product's node, rank and listener. Each repetition moves the same bytes in turn:

raw          torch's own broadcast of each tensor whole, one after another, all queued before the first is waited for
transfer     the read phase of our transfer: every frame and the trailer
no joining   the same and what else a client waits for, but for the making of the group
all          from the granted lease to the ended group, with `--verify`

Each has a group of its own, whose first, tiny broadcast is not counted in `raw`: it makes the connections. Medians are
compared. Exits 1 if transfer is below `--at-least` of raw. `--spin` adds to the seed what an idle scheduler is: a
thread that never rests and gives its interpreter up only when asked. `--batch-frames`, `--flying-gib` and `--turn-s`
change how the seed sends beside it.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import secrets
import socket
import statistics
import sys
import threading
import time
from multiprocessing.connection import Connection
from typing import Any

import torch

from bench.pull import GIB, make_shard
from rfork.client.contract import PullSettings
from rfork.client.lease import take_lease
from rfork.client.receive import Receiver
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.fence import FencePage, check_fence
from rfork.identity import Content, ModelIdentity, RankIdentity, instance_key
from rfork.inventory.target import PullTarget
from rfork.seed import turns
from rfork.seed.broadcast import Broadcasts
from rfork.seed.node import NodeService
from rfork.seed.offer import SeedShard
from rfork.seed.rank import RankAgent
from rfork.transports.collective import CLIENT, POLL_S, SEED, Group, Meeting, backend_for, tensor_at
from rfork.transports.frames import PACES
from rfork.transports.select import GivenFabrics
from rfork.wire.control import Hello
from rfork.wire.seed import LeaseRequest, WeightsReport

HOST = "127.0.0.1"
IDENTITY = ModelIdentity("bench", {"set": "collective"})
CONTENT = Content("checkpoint", "bench")
TIMEOUT_S = 120.0


def raw(shard: Any, member: int, device: torch.device, store: str, port: int, listening: socket.socket | None) -> float:
    """Broadcast every alias group whole; seconds, without joining."""
    how = {"join_timeout_s": TIMEOUT_S, "operation_timeout_s": TIMEOUT_S, "listening": listening}
    group = Group(Meeting(HOST, port, store, HOST), member, device, **how)
    try:
        with group.on_device():
            group.broadcast(torch.zeros(1, dtype=torch.uint8, device=device))
            group.finish(TIMEOUT_S, lambda: None)
            started_s = time.perf_counter()
            sizes = shard.manifest.group_nbytes
            for address, nbytes in zip(shard.addresses, sizes, strict=True):
                group.broadcast(tensor_at(address, nbytes, device))
            while group.num_flying:
                group.finish(TIMEOUT_S, lambda: None)
            spent_s = time.perf_counter() - started_s
        group.tell("over")
        deadline = time.monotonic() + TIMEOUT_S
        while member == SEED and not group.has_heard("over") and time.monotonic() < deadline:
            time.sleep(POLL_S)  # what was sent may still be on its way, and an end would cut it off
        return spent_s
    finally:
        group.close(TIMEOUT_S)


def spin() -> None:
    """What SGLang's scheduler does while it has nothing to do."""
    turn = 0
    while True:
        turn += 1


def prepare(options: argparse.Namespace, backend: str) -> None:
    """What the options say of this process's side."""
    if backend == "nccl" and options.seed_device == options.device:
        os.environ["NCCL_HOSTID"] = str(os.getpid())  # else NCCL refuses two members on one GPU; so it takes sockets
    pace = PACES[backend]
    if options.batch_frames is not None:
        pace = pace._replace(batch_frames=options.batch_frames)
    if options.flying_gib is not None:
        pace = pace._replace(flying_nbytes=int(options.flying_gib * GIB))
    PACES[backend] = pace
    if options.turn_s is not None:
        turns.QUICK_S = options.turn_s


def run_seed(pipe: Connection, options: argparse.Namespace) -> None:
    """Serve until told to stop; on request, be the other end of a raw broadcast."""
    prepare(options, backend_for(torch.device(options.seed_device)))
    if options.spin:
        threading.Thread(target=spin, daemon=True).start()
    device = torch.device(options.seed_device)
    shard = make_shard(int(options.gib * GIB), options.tensors, device, fill=True)
    node = NodeService(Config(advertise_host=HOST))
    node.start(host=HOST, num_local_ranks=1)
    environment = node.environment()
    agent = RankAgent(
        environment["RFORK_CONTROL"],
        Hello(0, 0, 1, 0, 1),
        environment["RFORK_INSTANCE_ID"],
        is_on=True,
        transports=list,
        make_fence=lambda: FencePage(environment["RFORK_INSTANCE_ID"], device),
        chunk_nbytes=options.chunk_nbytes,
        broadcasts=Broadcasts(device),
    )
    agent.loaded(RankIdentity(), WeightsReport(source="checkpoint"))
    agent.publish([SeedShard(resolve=lambda: shard, identity=IDENTITY, content=CONTENT)])
    node.ready()
    while node.closed() is not None:
        time.sleep(0.05)
    pipe.send(node.listener_url)
    while (store := pipe.recv()) is not None:
        listening = socket.create_server((HOST, 0))
        port = listening.getsockname()[1]
        pipe.send(port)
        raw(shard, SEED, device, store, port, listening)
    agent.close()
    node.stop()


def ours(target: PullTarget, url: str, device: torch.device, verify: str) -> dict[str, float]:
    """Seconds of each phase of one transfer, and of all of it."""
    request = LeaseRequest(
        client="i-bench",
        instance_key=instance_key(IDENTITY, CONTENT),
        identity=IDENTITY.fields,
        engine=IDENTITY.engine,
        content=str(CONTENT),
        rank=RankIdentity(),
        transport="collective",
    )
    with take_lease(url, request, timeout_s=TIMEOUT_S) as lease:
        started_s = time.perf_counter()
        settings = PullSettings(verify=verify, connect_timeout_s=60.0)
        move = Receiver(device)
        report = move(target, lease, GivenFabrics(()), settings, check_fence=check_fence, clock=SystemClock())
        return {**report.phases_s, "all": time.perf_counter() - started_s}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    seed = context.Process(target=run_seed, args=(there, options), daemon=True)
    seed.start()
    device = torch.device(options.device)
    prepare(options, backend_for(device))
    shard = make_shard(int(options.gib * GIB), options.tensors, device, fill=False)
    target = PullTarget(shard)
    url = here.recv()
    raws: list[float] = []
    runs: list[dict[str, float]] = []
    for _ in range(options.repeat + 1):
        store = secrets.token_hex(8)
        here.send(store)
        raws.append(raw(shard, CLIENT, device, store, here.recv(), None))
        runs.append(ours(target, url, device, options.verify))
    here.send(None)
    seed.join(30)
    raws, runs = raws[1:], runs[1:]  # the first of each loads libraries and touches pages
    nbytes = shard.manifest.nbytes
    columns = {
        "raw": raws,
        "transfer": [r["read"] for r in runs],
        "no joining": [r["all"] - r["connect"] for r in runs],
        "all": [r["all"] for r in runs],
    }
    rows = {name: row(seconds, nbytes, statistics.median(raws)) for name, seconds in columns.items()}
    phases = {name: statistics.median(r[name] for r in runs) for name in runs[0]}
    backend = "nccl" if device.type == "cuda" else "gloo"
    return {"backend": backend, "nbytes": nbytes, "tensors": options.tensors, "rows": rows, "phases_s": phases}


def row(seconds: list[float], nbytes: int, raw_s: float) -> dict[str, float]:
    middle = statistics.median(seconds)
    rate = nbytes / middle / 1e9
    return {"seconds": middle, "slowest_s": max(seconds), "gbps": rate, "of_raw": raw_s / middle}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--tensors", type=int, default=200, help="alias groups that they are in")
    parser.add_argument("--seed-device", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--verify", choices=["full", "sample", "off"], default="full")
    parser.add_argument("--chunk-nbytes", type=int, default=64 << 20, help="bytes of one digest")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--at-least", type=float, default=0.8, help="share of raw below which to exit with 1")
    parser.add_argument("--spin", action="store_true", help="a thread of the seed never rests")
    parser.add_argument("--batch-frames", type=int, help="frames that the seed starts in one call; else the product's")
    parser.add_argument("--flying-gib", type=float, help="bytes in flight; else the product's")
    parser.add_argument(
        "--turn-s", type=float, help="turns of the interpreter while the seed sends; else the product's"
    )
    parser.add_argument("--out", help="file for the figures, as JSON")
    options = parser.parse_args()
    result = measure(options)
    if options.out:
        with open(options.out, "w") as file:
            json.dump(result, file, indent=1)
    print(f"{result['backend']}, {result['nbytes'] / 1e9:.2f} GB in {result['tensors']} tensors")  # noqa: T201
    for name, r in result["rows"].items():
        print(f"{name:12} {r['seconds']:8.3f} s  {r['gbps']:7.2f} GB/s  {r['of_raw']:5.2f} of raw")  # noqa: T201
    print("phases " + ", ".join(f"{name} {s:.3f}" for name, s in result["phases_s"].items()))  # noqa: T201
    return 0 if result["rows"]["transfer"]["of_raw"] >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main())
