"""Take a running server's weights again and again, without an engine: the traffic of forks, as dense as one likes.

    python -m bench.puller --url http://127.0.0.1:30000 --device cuda:1 --seconds 20 --pause-s 0.3

Each pull is the product's own: lease, manifest, pairing, connection, fences, digests. The memory is made once, from the
seed's manifest. Writes one JSON line for each pull: when its bytes began and stopped to flow (by CLOCK_MONOTONIC, which
all processes of a host share), bytes, seconds by phase.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from typing import Any

import torch
from torch import nn

from rfork.client.beside import PrefetchedLease
from rfork.client.contract import PullSettings
from rfork.client.lease import Lease, take_lease
from rfork.client.progress import Silent
from rfork.client.pull import pull
from rfork.client.resolve import Candidate, resolve
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.errors import SeedRefused
from rfork.fence import check_fence
from rfork.identity import Content, ModelIdentity, RankIdentity, instance_key
from rfork.inventory import Inventory
from rfork.inventory.target import PullTarget
from rfork.manifest import Manifest
from rfork.transports.select import MooncakeFabrics, gather_facts
from rfork.wire.seed import LeaseRequest

from .gpu.sets import Plain

CLIENT = "i-00000000be9c0000"
TIMEOUT_S = 30.0


class Shaped:
    """Memory of the shape that a manifest has; its names and values are taken from the seed."""

    def __init__(self, manifest: Manifest, device: torch.device) -> None:
        model = nn.Module()
        for group, nbytes in enumerate(manifest.group_nbytes):
            data = torch.zeros(nbytes, dtype=torch.uint8, device=device)
            model.register_parameter(f"g{group:08}", nn.Parameter(data, requires_grad=False))
        inventory = Inventory.note(model, rank=manifest.rank, device=device, rules=Plain())
        self._target = PullTarget(inventory.resolve())
        self.manifest = manifest

    def apply(self, states: Any, inline: Any) -> None:
        """There is no model to set values on."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._target, name)


class Watch(Silent):
    """When the phases of a pull began."""

    def __init__(self) -> None:
        self.began_s: dict[str, float] = {}

    def on_phase(self, name: str) -> None:
        self.began_s.setdefault(name, time.monotonic())


def lease_of(candidate: Candidate, identity: ModelIdentity, timeout_s: float, transport: str) -> Lease:
    content = Content.parse(candidate.content or "")
    request = LeaseRequest(
        client=CLIENT,
        instance_key=instance_key(identity, content),
        identity=identity.fields,
        engine=identity.engine,
        content=str(content),
        rank=RankIdentity(),
        weights=content.kind,
        seed=candidate.instance_id,
        transport=transport,
    )
    return take_lease(candidate.listener, request, timeout_s=timeout_s)


def identity_at(candidate: Candidate) -> ModelIdentity:
    """The seed's identity, learnt from its refusal of an empty one: a bench has no model of its own to describe."""
    try:
        lease_of(candidate, ModelIdentity("sglang", {}), TIMEOUT_S, "pull").release()
    except SeedRefused as refusal:
        return ModelIdentity("sglang", {field: there for field, _, there in refusal.differing})  # type: ignore[misc]
    return ModelIdentity("sglang", {})


def mover(options: argparse.Namespace, device: torch.device) -> tuple[str, Any]:
    if options.backend == "transfer_engine":
        return "pull", pull
    from rfork.client.receive import Receiver

    return "collective", Receiver(device)


def run(options: argparse.Namespace) -> None:
    device = torch.device(options.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = Config(protocol=options.protocol, advertise_host=options.host, verify=options.verify)
    fabrics = MooncakeFabrics(config, gather_facts(device.type, device.index, config))
    transport, move = mover(options, device)
    candidate = resolve(options.url, timeout_s=TIMEOUT_S)
    identity = identity_at(candidate)
    settings = PullSettings(verify=options.verify, limit_gbps=options.limit_gbps)
    shard: Shaped | None = None
    end_s = time.monotonic() + options.seconds
    while time.monotonic() < end_s:
        lease = lease_of(candidate, identity, TIMEOUT_S, transport)
        with lease, PrefetchedLease(lease, with_digests=options.verify != "off") as held:
            shard = shard or Shaped(held.manifest(), device)
            watch = Watch()
            report = move(shard, held, fabrics, settings, check_fence=check_fence, clock=SystemClock(), observer=watch)
        line = {
            "from_s": watch.began_s["read"],
            "to_s": watch.began_s["verify"],
            "nbytes": report.nbytes,
            "protocol": report.protocol,
            "phases_s": report.phases_s,
        }
        sys.stdout.write(json.dumps(line) + "\n")
        sys.stdout.flush()
        time.sleep(options.pause_s)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", required=True, help="the server, or its rfork listener")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", choices=["transfer_engine", "nccl"], default="transfer_engine")
    parser.add_argument("--protocol", default="auto")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--verify", choices=["full", "sample", "off"], default="full")
    parser.add_argument("--limit-gbps", type=float)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--pause-s", type=float, default=0.3)
    return parser.parse_args(argv)


if __name__ == "__main__":
    run(parse(sys.argv[1:]))
