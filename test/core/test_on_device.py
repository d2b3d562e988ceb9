"""Inventory, regions and fence on a CUDA device. Skipped without one."""

import ctypes
import os
import subprocess
import sys

import pytest
import torch
from support.every_kind import EveryKind, holder, resolved

from rfork.binding import Binding, RegionIndex, bind
from rfork.errors import UnsupportedModel
from rfork.fence import FencePage, check_fence, read_fence
from rfork.inventory import ResolvedShard
from rfork.inventory.target import PullTarget
from rfork.manifest import decode_manifest, encode_manifest, pair

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
DEVICE = torch.device("cuda", 0)


def binding_of(shard: ResolvedShard, fence: FencePage) -> Binding:
    return Binding(
        manifest_digest=shard.manifest.digest,
        generation=2,
        regions=shard.regions_for([fence.tensor]),
        addresses=shard.addresses,
        group_nbytes=shard.manifest.group_nbytes,
        fence_address=fence.address,
        fence_nbytes=fence.nbytes,
    )


def test_a_model_on_the_device_is_made_equal() -> None:
    models = [EveryKind(seed=s, device=DEVICE) for s in (1, 2)]
    seed, client = (resolved(m, device=DEVICE) for m in models)
    plan = pair(decode_manifest(encode_manifest(seed.manifest)), client.manifest)
    pages = [FencePage("i", DEVICE) for _ in models]
    theirs, ours = (binding_of(s, p) for s, p in zip((seed, client), pages, strict=True))
    assert seed.digests().values != client.digests().values
    driver = ctypes.CDLL("libcuda.so.1")
    for part in bind(plan, ours, theirs, max_slice_nbytes=1 << 30):
        status = driver.cuMemcpy(*(ctypes.c_uint64(x) for x in (part.local, part.remote)), ctypes.c_size_t(part.nbytes))
        assert status == 0
    client.apply(plan.set_states, plan.set_inline)
    again = resolved(models[1], device=DEVICE)
    assert again.digests() == seed.digests()
    assert again.manifest == seed.manifest
    assert {i.name for i in seed.manifest.inline} == {"final.eps_table", "hidden_list[0].eps_table"} | {
        "hidden_dict['a']['b'].eps_table"
    }


def test_groups_that_one_model_lends_another_make_the_two_equal() -> None:
    """What a draft does with what its target has already."""
    models = [EveryKind(seed=s, device=DEVICE) for s in (1, 2)]
    seed, client = (resolved(m, device=DEVICE) for m in models)
    target = PullTarget(client)
    for group in range(len(seed.addresses)):
        lent = seed.group_bytes(group)
        assert lent is not None
        assert lent.data_ptr() == seed.addresses[group]
        target.copy_in(group, lent)
    assert resolved(models[1], device=DEVICE).digests() == seed.digests()


def test_small_neighbours_are_one_read_and_nothing_beside_them_changes() -> None:
    """The allocator rounds 40 bytes up to 512: what lies between is nobody's, so one read may go over it."""
    models = [
        holder(**{f"w{i:03}": torch.full((10,), float(s * i), device=DEVICE) for i in range(100)}) for s in (1, 2)
    ]
    bystanders = [torch.full((10,), 7.0, device=DEVICE) for _ in range(100)]
    seed, client = (resolved(m, device=DEVICE) for m in models)
    assert set(client.slack) == {512 - 40}
    pages = [FencePage("i", DEVICE) for _ in models]
    theirs, ours = (binding_of(s, p) for s, p in zip((seed, client), pages, strict=True))
    plan = pair(seed.manifest, client.manifest)
    slices = bind(plan, ours, theirs, max_slice_nbytes=1 << 30, slack=client.slack)
    assert len(slices) < len(bind(plan, ours, theirs, max_slice_nbytes=1 << 30)) == 100
    driver = ctypes.CDLL("libcuda.so.1")
    for part in slices:
        driver.cuMemcpy(*(ctypes.c_uint64(x) for x in (part.local, part.remote)), ctypes.c_size_t(part.nbytes))
    assert client.digests() == seed.digests()
    assert all(bool((t == 7.0).all()) for t in bystanders)


def test_a_device_without_an_index_is_the_current_one() -> None:
    shard = resolved(holder(w=torch.ones(3, device=DEVICE)), device=torch.device("cuda"))
    assert (shard.device, [t.name for t in shard.manifest.tensors], shard.manifest.inline) == (DEVICE, ["w"], ())


def test_registrations_follow_segments_not_tensors() -> None:
    shard = resolved(holder(**{f"t{i}": torch.ones(1000, device=DEVICE) for i in range(2000)}), device=DEVICE)
    page = FencePage("i", DEVICE)
    regions = shard.regions_for([page.tensor])
    assert len(regions) < 50
    segments = {s["address"] for s in torch.cuda.memory_snapshot()}
    assert {r.base for r in regions} <= segments
    index = RegionIndex(regions)
    for tensor in [*shard.tensors.values(), page.tensor]:
        index.find(tensor.data_ptr(), tensor.nbytes)


def test_memory_of_another_allocator_is_refused() -> None:
    pinned = torch.ones(10, pin_memory=True)
    with pytest.raises(UnsupportedModel, match="big"):
        resolved(holder(big=torch.ones(1 << 20, pin_memory=True), small=pinned), device=DEVICE)
    assert [i.name for i in resolved(holder(small=pinned), device=DEVICE).manifest.inline] == ["small"]


def test_expandable_segments_are_refused_by_name() -> None:
    script = """
import torch
from support.every_kind import holder, resolved
from rfork.errors import UnsupportedModel
shard = resolved(holder(w=torch.ones(1 << 20, device="cuda:0")), device=torch.device("cuda:0"))
try:
    shard.regions
except UnsupportedModel as error:
    assert "expandable_segments:True" in str(error), error
else:
    raise SystemExit("accepted")
"""
    environment = {
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        "PYTORCH_ALLOC_CONF": "expandable_segments:True",
    }
    run_python(script, environment)


def run_python(script: str, environment: dict[str, str]) -> None:
    path = os.pathsep.join(p for p in sys.path if p)
    subprocess.run([sys.executable, "-c", script], check=True, env=os.environ | environment | {"PYTHONPATH": path})


def test_the_fence_is_written_before_the_call_returns() -> None:
    """The device is busy on another stream, and yet each state is on the page before its call returns."""
    page = FencePage("i", DEVICE)
    other = torch.cuda.Stream(DEVICE)
    page.open(2)
    page.close()
    with torch.cuda.stream(other):
        torch.cuda._sleep(200_000_000)
    assert read_fence(page.snapshot()).generation == 3
    page.open()
    assert other.query(), "the device was synchronised before the page went even"
    check_fence(page.snapshot(), "i", 4)
    page.close()
    assert read_fence(page.snapshot()).generation == 5


def test_weights_queued_on_a_stream_are_finished_before_readers_come_in() -> None:
    weights = torch.zeros(1 << 20, device=DEVICE)
    page = FencePage("i", DEVICE)
    page.open()
    page.close()
    torch.cuda._sleep(200_000_000)
    weights.fill_(1)
    page.open()
    snapshot = torch.empty(weights.shape, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream(DEVICE)):
        snapshot.copy_(weights)
    torch.cuda.synchronize()
    assert bool((snapshot == 1).all())
