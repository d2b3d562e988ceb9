"""One repetition on the client's side. Each runs in a process of its own, since every real fork is a first read."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from rfork.binding import Binding, bind
from rfork.client.agreement import Agreement
from rfork.client.fork import Fork
from rfork.client.lease import take_lease
from rfork.client.sources import Addresses
from rfork.client.warm import warm_up
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.fence import check_fence
from rfork.identity import Content, InstanceId, ModelIdentity, RankIdentity, instance_key
from rfork.inventory import Inventory
from rfork.inventory.target import DevicePage, PullTarget
from rfork.manifest import TransferPlan
from rfork.transports.select import Facts, MooncakeFabrics, gather_facts
from rfork.wire.seed import LeaseReply, LeaseRequest

from . import sets

CONTENT = Content("checkpoint", "bench")
CLIENT = InstanceId("i-0123456789abcdef")
RAW_SLICE_NBYTES = 256 << 20
COPY_PIECE_NBYTES = 32 << 30


class Task(NamedTuple):
    """`kind`: copy, raw-tensor, raw-region, off, sample or full. `seed_device` is for `copy` only."""

    kind: str
    name: str
    url: str
    device: str
    seed_device: str
    protocol: str
    host: str
    limit_gbps: float | None = None


def identity_of(name: str) -> ModelIdentity:
    return ModelIdentity("bench", {"set": name})


def make_fork(name: str, url: str, config: Config, facts: Facts, built: Built) -> Fork:
    clock = SystemClock()
    return Fork(
        who=RankIdentity(),
        identity=identity_of(name),
        content=CONTENT,
        instance_id=CLIENT,
        seeds=Addresses([url], [], config, clock),
        settings=config,
        fabrics=MooncakeFabrics(config, facts),
        agreement=Agreement(None, rank=0, num_ranks=1, name="bench", timeout_s=30),
        check_fence=check_fence,
        clock=clock,
        page=built.page,
    )


class Built:
    """The build of a fork, timed in its parts; the model stays alive with it."""

    def __init__(self, shapes: list[sets.Shape], device: torch.device) -> None:
        self._shapes, self._device = shapes, device
        self.page = functools.cache(lambda: DevicePage(device))
        self.parts_s: dict[str, float] = {}
        self.model: nn.Module | None = None
        self.target: PullTarget | None = None

    def __call__(self) -> PullTarget:
        model = self.model = self._timed("build.modules", lambda: sets.allocate(self._shapes, self._device, fill=False))
        inventory = self._timed("build.note", lambda: sets.inventory_of(model, self._device))
        resolved = self._timed("build.resolve", inventory.resolve)
        self.inventory: Inventory = inventory
        target = self.target = self._timed("build.target", lambda: PullTarget(resolved, self.page()))
        self._timed("build.regions", lambda: target.regions)
        return target

    def _timed(self, name: str, step: Callable[[], Any]) -> Any:
        started_s = time.perf_counter()
        result = step()
        self.parts_s[name] = time.perf_counter() - started_s
        return result


def run(task: Task) -> dict[str, Any]:
    """Seconds by phase, `all` included, and what else there is to say about one repetition."""
    device = torch.device(task.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
        torch.zeros(1, device=device)
    else:
        torch.set_num_threads(1)
    if task.kind == "copy":
        return _copy(task, device)
    config = Config(
        protocol=task.protocol,
        advertise_host=task.host,
        verify=task.kind if task.kind in ("off", "sample", "full") else "off",
        read_gbps_limit=task.limit_gbps,
    )
    facts = gather_facts(device.type, device.index, config)
    if task.kind.startswith("raw"):
        return _raw(task, device, config, facts)
    return _fork(task, device, config, facts)


def _fork(task: Task, device: torch.device, config: Config, facts: Facts) -> dict[str, Any]:
    built = Built(sets.shapes_of(task.name), device)
    fork = make_fork(task.name, task.url, config, facts, built)
    started_s = time.perf_counter()
    warm_up(device)  # what an engine's process does beside its own start
    warm_s = time.perf_counter() - started_s
    started_s = time.perf_counter()
    outcome = fork.run(built)
    _wait(device)
    spent_s = time.perf_counter() - started_s
    report = outcome.report
    return {
        "phases_s": {"(warm up)": warm_s, **report.phases_s, **built.parts_s, "all": spent_s},
        "protocol": report.protocol,
        "nbytes": report.nbytes,
        "peak_over_model": _peak(device, report.nbytes),
    }


def _raw(task: Task, device: torch.device, config: Config, facts: Facts) -> dict[str, Any]:
    """Mooncake's own batch read, three times with one engine: a slice for each tensor, or for each region."""
    target = Built(sets.shapes_of(task.name), device)()
    with _lease(task, config) as lease:
        slices = _slices(task.kind, target, lease.reply)
        (attempt, *_) = MooncakeFabrics(config, facts).attempts(lease.reply.binding.endpoints)
        steps_s: dict[str, float] = {}
        started_s = time.perf_counter()
        engine: Any = attempt.transport.open()
        steps_s["open"] = time.perf_counter() - started_s
        started_s = time.perf_counter()
        engine.register(target.regions)
        steps_s["register"] = time.perf_counter() - started_s
        local, remote, nbytes = ([s[i] for s in slices] for i in range(3))
        _wait(device)
        for number in range(3):
            started_s = time.perf_counter()
            status = engine._raw.batch_transfer_sync_read(attempt.endpoint.session_id, local, remote, nbytes)
            returned_s = time.perf_counter() - started_s
            _wait(device)
            steps_s["first" if number == 0 else "later"] = time.perf_counter() - started_s
            if number == 0:
                steps_s["first.returned"] = returned_s
            if status != 0:
                raise RuntimeError(f"the raw read failed with {status}")
        started_s = time.perf_counter()
        engine.close(30)
        steps_s["close"] = time.perf_counter() - started_s
    facts_of_read = {"slices": len(slices), "regions": len(target.regions), "protocol": engine.protocol}
    return {"phases_s": steps_s, "nbytes": sum(nbytes), **facts_of_read}


def _lease(task: Task, config: Config) -> Any:
    identity = identity_of(task.name)
    request = LeaseRequest(
        client=CLIENT,
        instance_key=instance_key(identity, CONTENT),
        identity=identity.fields,
        engine=identity.engine,
        content=str(CONTENT),
        rank=RankIdentity(),
    )
    return take_lease(task.url, request, timeout_s=config.match_timeout_s)


def _slices(kind: str, target: PullTarget, reply: LeaseReply) -> list[tuple[int, int, int]]:
    theirs = reply.binding
    if kind == "raw-tensor":
        return list(zip(target.addresses, theirs.addresses, theirs.group_nbytes, strict=True))
    address, nbytes = target.scratch_page()
    ours = Binding(
        manifest_digest=reply.manifest_digest,
        generation=reply.generation,
        regions=target.regions,
        addresses=target.addresses,
        group_nbytes=theirs.group_nbytes,
        fence_address=address,
        fence_nbytes=nbytes,
    )
    plan = TransferPlan(theirs.group_nbytes, (), ())
    return [tuple(s) for s in bind(plan, ours, theirs, max_slice_nbytes=RAW_SLICE_NBYTES)]


def _copy(task: Task, device: torch.device) -> dict[str, Any]:
    """The same bytes from device to device by torch, in this process: what the link gives."""
    nbytes = sum(torch.empty(s.shape, dtype=s.dtype, device="meta").nbytes for s in sets.shapes_of(task.name))
    piece = min(nbytes, COPY_PIECE_NBYTES)  # the seed's device has room for its set, and for little more
    there = torch.ones(piece, dtype=torch.uint8, device=torch.device(task.seed_device))
    here = torch.zeros(piece, dtype=torch.uint8, device=device)
    steps_s: dict[str, float] = {}
    for name in ("first", "later", "later"):
        _wait(there.device)
        _wait(device)
        started_s = time.perf_counter()
        for at in range(0, nbytes, piece):
            here[: nbytes - at].copy_(there[: nbytes - at])
        _wait(device)
        steps_s[name] = time.perf_counter() - started_s
    return {"phases_s": steps_s, "nbytes": nbytes}


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _peak(device: torch.device, nbytes: int) -> float | None:
    return torch.cuda.max_memory_reserved(device) / nbytes if device.type == "cuda" else None
