"""Throughput of a pull against a raw Mooncake read of the same bytes, in one run.

    python bench/pull.py --gib 1 --protocol tcp
    python bench/pull.py --gib 31 --protocol nvlink_intra --seed-device cuda:0 --device cuda:1

A second process is the seed. Each repetition reads the same bytes three ways in turn, each with an engine of its own:

raw      Mooncake's own synchronous batch read of whole regions in large slices; set-up and registration not counted
read     the read phase of our pull
pull     our pull from the granted lease to the destroyed engine, everything counted, with `--verify`

Memory is touched before the first repetition: the first read into fresh pages costs several times more, whoever reads.
Medians are compared. Exits 1 if the ratio of the unverified pull to the raw read is below `--at-least`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from torch import nn

from rfork.binding import Binding, Endpoint
from rfork.client.contract import PullSettings
from rfork.client.pull import pull
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.fence import FencePage, check_fence
from rfork.identity import RankIdentity
from rfork.inventory import Inventory, ResolvedShard
from rfork.inventory.target import PullTarget
from rfork.manifest import Manifest, decode_manifest, encode_manifest
from rfork.transports.select import MooncakeFabrics, gather_facts, transport_for
from rfork.wire.seed import DigestTable, LeaseReply

GIB = 1 << 30
RAW_SLICE_NBYTES = 64 << 20
INSTANCE = "i-bench"


class Plain:
    """A model of nothing but parameters."""

    def is_pure(self, module: nn.Module) -> bool:
        return False

    def descend(self, value: object) -> bool:
        return False

    def is_runtime(self, owner: object, name: str) -> bool:
        return False


class Offer(msgspec.Struct):
    """What the seed process tells about itself."""

    reply: LeaseReply
    manifest: bytes
    table: DigestTable


class Held:
    """The seed's offer as a lease; the manifest is parsed anew for each pull, as it would be."""

    address = "http://127.0.0.1:0"

    def __init__(self, offer: Offer) -> None:
        self.reply = offer.reply
        self._offer = offer

    def manifest(self) -> Manifest:
        return decode_manifest(self._offer.manifest)

    def digests(self) -> DigestTable:
        return self._offer.table

    def check(self) -> None: ...


def make_shard(nbytes: int, num_tensors: int, device: torch.device, *, fill: bool) -> ResolvedShard:
    """`num_tensors` equal bfloat16 parameters, together `nbytes`."""
    model, each = nn.Module(), max(1, nbytes // num_tensors // 2)
    for i in range(num_tensors):
        data = torch.empty(each, dtype=torch.bfloat16, device=device)
        # Both sides touch their pages: the seed with something to compare, the client with zeros.
        data.view(torch.uint8).random_(0, 256) if fill else data.zero_()
        model.register_parameter(f"layer_{i}", nn.Parameter(data, requires_grad=False))
    return Inventory.note(model, rank=RankIdentity(), device=device, rules=Plain()).resolve()


def run_seed(pipe: Connection, options: argparse.Namespace) -> None:
    device = torch.device(options.seed_device)
    shard = make_shard(int(options.gib * GIB), options.tensors, device, fill=True)
    fence = FencePage(INSTANCE, device)
    generation = fence.open()
    regions = shard.regions_for((fence.tensor,))
    facts = gather_facts(device.type, device.index)
    transport = transport_for(options.protocol, Config(advertise_host=options.host), facts)
    engine = transport.open()
    engine.register(regions)
    digest = shard.manifest.digest
    binding = Binding(
        manifest_digest=digest,
        generation=generation,
        regions=regions,
        addresses=shard.addresses,
        group_nbytes=shard.manifest.group_nbytes,
        fence_address=fence.address,
        fence_nbytes=fence.nbytes,
        endpoints=(Endpoint(transport.protocol, engine.session_id, transport.scope),),
    )
    reply = LeaseReply(
        lease="bench",
        ttl_s=3600,
        instance_id=INSTANCE,
        generation=generation,
        content="checkpoint:bench",
        weight_version=None,
        manifest_digest=digest,
        manifest_path="/",
        digests_path="/",
        binding=binding,
    )
    pipe.send_bytes(msgspec.msgpack.encode(Offer(reply, encode_manifest(shard.manifest), shard.digests())))
    pipe.recv_bytes()
    engine.close(30)


def raw_read(target: PullTarget, offer: Offer, config: Config, facts: Any) -> float:
    """Seconds of one synchronous batch read of everything, regions cut into large slices on both sides alike."""
    binding = offer.reply.binding
    (attempt,) = MooncakeFabrics(config, facts).attempts(binding.endpoints)
    engine: Any = attempt.transport.open()
    engine.register(target.regions)
    local, remote, nbytes = [], [], []
    for here, there, size in zip(target.addresses, binding.addresses, binding.group_nbytes, strict=True):
        for at in range(0, size, RAW_SLICE_NBYTES):
            local.append(here + at)
            remote.append(there + at)
            nbytes.append(min(RAW_SLICE_NBYTES, size - at))
    started_s = time.perf_counter()
    status = engine._raw.batch_transfer_sync_read(attempt.endpoint.session_id, local, remote, nbytes)
    spent_s = time.perf_counter() - started_s
    engine.close(30)
    if status != 0:
        raise RuntimeError(f"the raw read failed with {status}")
    return spent_s


def our_pull(target: PullTarget, offer: Offer, config: Config, facts: Any, verify: str) -> dict[str, float]:
    """Seconds of each phase of one pull, and of all of it."""
    started_s = time.perf_counter()
    report = pull(
        target,
        Held(offer),
        MooncakeFabrics(config, facts),
        PullSettings(verify=verify),
        check_fence=check_fence,
        clock=SystemClock(),
    )
    return {**report.phases_s, "all": time.perf_counter() - started_s}


def measure(options: argparse.Namespace) -> dict[str, Any]:
    device = torch.device(options.device)
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    seed = context.Process(target=run_seed, args=(there, options), daemon=True)
    seed.start()
    target = PullTarget(make_shard(int(options.gib * GIB), options.tensors, device, fill=False))
    offer = msgspec.msgpack.decode(here.recv_bytes(), type=Offer)
    nbytes = sum(offer.reply.binding.group_nbytes)
    config, facts = (
        Config(protocol=options.protocol, advertise_host=options.host),
        gather_facts(device.type, device.index),
    )
    raws, plain, verified = [], [], []
    raw_read(target, offer, config, facts)
    for _ in range(options.repeat):
        raws.append(raw_read(target, offer, config, facts))
        plain.append(our_pull(target, offer, config, facts, "off"))
        verified.append(our_pull(target, offer, config, facts, options.verify))
    here.send_bytes(b"done")
    seed.join(30)

    def row(seconds: list[float]) -> dict[str, float]:
        middle = statistics.median(seconds)
        rate = nbytes / middle / 1e9
        return {"s": middle, "spread_s": max(seconds) - min(seconds), "gbps": rate, "ratio": raw_s / middle}

    raw_s = statistics.median(raws)
    return {
        "nbytes": nbytes,
        "tensors": options.tensors,
        "protocol": options.protocol,
        "repeat": options.repeat,
        "rows": {
            "raw": row(raws),
            "read": row([p["read"] for p in plain]),
            "pull, verify off": row([p["all"] for p in plain]),
            f"pull, verify {options.verify}": row([p["all"] for p in verified]),
        },
        "phases_s": {name: statistics.median(p[name] for p in verified) for name in verified[0]},
    }


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the weights")
    parser.add_argument("--tensors", type=int, default=200)
    parser.add_argument("--protocol", choices=["tcp", "rdma", "nvlink_intra"], default="tcp")
    parser.add_argument("--seed-device", default="cpu", help="torch device of the seed")
    parser.add_argument("--device", default="cpu", help="torch device of the client")
    parser.add_argument("--host", default="127.0.0.1", help="address that both engines advertise")
    parser.add_argument("--verify", choices=["full", "sample", "off"], default="full")
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--at-least", type=float, default=0.9, help="ratio below which the exit status is 1")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    result = measure(options)
    lines = [
        f"{result['nbytes'] / GIB:.2f} GiB in {options.tensors} tensors over {options.protocol}, "
        f"medians of {options.repeat}, {options.seed_device} to {options.device}",
        f"{'':24} {'s':>8} {'spread':>8} {'GB/s':>8} {'of raw':>8}",
    ]
    for name, row in result["rows"].items():
        lines.append(f"{name:24} {row['s']:8.3f} {row['spread_s']:8.3f} {row['gbps']:8.2f} {row['ratio']:8.3f}")
    lines.append("phases: " + ", ".join(f"{n} {s:.3f}" for n, s in result["phases_s"].items()))
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=2)
    return 0 if result["rows"]["pull, verify off"]["ratio"] >= options.at_least else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
