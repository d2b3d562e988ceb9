"""What a target and its draft share on the seed crosses the link once; whatever is in doubt is read as before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec
import pytest
from support.host_shard import CHUNK_NBYTES, HostLease, HostSeed, HostShard, manifest_of

from rfork.binding import Endpoint
from rfork.client.contract import PullSettings
from rfork.client.lend import Held, Lender
from rfork.client.pull import pull
from rfork.clock import SystemClock
from rfork.errors import DigestMismatch, UnsupportedModel
from rfork.fence import check_fence
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.select import GivenFabrics
from rfork.wire.seed import LeaseReply, WeightsReport

EMBED, HEAD = 300_000, 200_000
MEMORY = {"draft.fc": 50_000, "draft.norm": 1, "embed": EMBED, "head": HEAD, "layer": 70_000}
TARGET = {"embed": "embed", "head": "head", "layer": "layer"}
DRAFT = {"embed": "embed", "fc": "draft.fc", "head": "head", "norm": "draft.norm"}
SHARED, OWN = EMBED + HEAD, 50_001


@dataclass
class Bench:
    """A seed whose draft and target have two tensors in common, and both on their way into one process."""

    seed: HostSeed
    transport: MemoryTransport

    def lease(self, names: Mapping[str, str]) -> HostLease:
        """A lease of the shard that has these tensors of the seed's memory, under these names."""
        whole = self.seed.lease()
        where = [sorted(MEMORY).index(names[name]) for name in sorted(names)]
        manifest = manifest_of({name: MEMORY[names[name]] for name in names})
        binding = msgspec.structs.replace(
            whole.reply.binding,
            manifest_digest=manifest.digest,
            addresses=tuple(whole.reply.binding.addresses[g] for g in where),
            group_nbytes=manifest.group_nbytes,
        )
        reply = msgspec.structs.replace(whole.reply, binding=binding, manifest_digest=manifest.digest)
        table = self.seed.shard.digests(CHUNK_NBYTES, range(len(MEMORY)))
        table = msgspec.structs.replace(table, values=tuple(table.values[g] for g in where))
        return HostLease(reply, manifest, table)

    def pull(
        self, shard: HostShard, lease: HostLease, *, lender: Lender | None = None, verify: str = "full"
    ) -> WeightsReport:
        return pull(
            shard, lease, GivenFabrics([self.transport]),
            PullSettings(verify=verify, connect_timeout_s=5, progress_timeout_s=5),
            check_fence=check_fence, clock=SystemClock(), lender=lender,
        )  # fmt: skip

    def target(self) -> tuple[HostShard, LeaseReply]:
        lease = self.lease(TARGET)
        shard = HostShard(lease.the_manifest)
        self.pull(shard, lease)
        return shard, lease.reply

    def draft(self, lender: Lender, *, lease: HostLease | None = None, **how: Any) -> tuple[HostShard, WeightsReport]:
        lease = lease or self.lease(DRAFT)
        shard = HostShard(lease.the_manifest)
        report = self.pull(shard, lease, lender=lender, **how)
        for group, name in enumerate(sorted(DRAFT)):
            assert shard.group(group) == self.seed.shard.group(sorted(MEMORY).index(DRAFT[name])), name
        return shard, report


def lender_of(shard: Held, reply: LeaseReply) -> Lender:
    return Lender(reply.instance_id, reply.binding, lambda: shard)


def moved(report: WeightsReport) -> tuple[int, int]:
    return report.nbytes, report.lent_nbytes


@pytest.fixture
def bench() -> Iterator[Bench]:
    transport = MemoryTransport(MemoryFabric())
    bench = Bench(HostSeed(manifest_of(MEMORY), [transport], gap=512), transport)
    yield bench
    bench.seed.close()


def test_what_a_draft_shares_with_its_target_crosses_the_link_once(bench: Bench) -> None:
    _, report = bench.draft(lender_of(*bench.target()))
    assert moved(report) == (OWN, SHARED)
    assert "copy" in report.phases_s


def test_a_lender_that_never_took_these_bytes_lends_nothing(bench: Bench) -> None:
    """Equal sizes at other addresses: the draft has an embedding and a head of its own."""
    shard, reply = bench.target()
    elsewhere = msgspec.structs.replace(reply.binding, addresses=tuple(a + 128 for a in reply.binding.addresses))
    _, report = bench.draft(Lender(reply.instance_id, elsewhere, lambda: shard))
    assert moved(report) == (OWN + SHARED, 0)


@pytest.mark.parametrize(
    ("instance_id", "changes"),
    [
        ("i-other", {}),
        ("i-seed", {"generation": 4}),
        ("i-seed", {"endpoints": (Endpoint("memory", "memory:99"),)}),
        ("i-seed", {"group_nbytes": (EMBED - 1, HEAD - 1, MEMORY["layer"])}),
    ],
    ids=["instance", "generation", "process", "size"],
)
def test_the_same_addresses_elsewhere_or_at_another_time_are_read(
    bench: Bench, instance_id: str, changes: dict[str, Any]
) -> None:
    """Of another instance, of weights that changed since, of a replica's process, of a shorter tensor."""
    shard, reply = bench.target()
    lender = Lender(instance_id, msgspec.structs.replace(reply.binding, **changes), lambda: shard)
    _, report = bench.draft(lender)
    assert moved(report) == (OWN + SHARED, 0)


def test_a_target_that_is_no_longer_what_was_taken_lends_nothing(bench: Bench) -> None:
    """Wrapped or replaced since: it resolves to other tensors, or not at all."""
    shard, reply = bench.target()
    shard.manifest = manifest_of({"embed": EMBED, "head": HEAD, "layer": 1})
    _, report = bench.draft(lender_of(shard, reply))
    assert moved(report) == (OWN + SHARED, 0)

    def refuse() -> Held:
        raise UnsupportedModel("embed was a tensor when the loader returned and is a Wrapper now")

    _, report = bench.draft(Lender(reply.instance_id, reply.binding, refuse))
    assert moved(report) == (OWN + SHARED, 0)


def test_a_copy_that_is_wrong_is_read_after_all(bench: Bench) -> None:
    """The digests judge a copy as they judge what was read: the target's embedding has lost a bit here."""
    shard, reply = bench.target()
    shard.group(0)[100_000] ^= 1
    _, report = bench.draft(lender_of(shard, reply))
    assert moved(report) == (OWN + CHUNK_NBYTES, SHARED)


def test_a_copy_does_not_hide_a_seed_that_holds_other_bytes_than_it_published(bench: Bench) -> None:
    target = bench.target()
    lease = bench.lease(DRAFT)
    bench.seed.shard.group(0)[7] ^= 1
    with pytest.raises(DigestMismatch, match="fc"):
        bench.draft(lender_of(*target), lease=lease)


@pytest.mark.parametrize("verify", ["sample", "off"])
def test_nothing_is_copied_where_not_every_byte_is_verified(bench: Bench, verify: str) -> None:
    _, report = bench.draft(lender_of(*bench.target()), verify=verify)
    assert moved(report) == (OWN + SHARED, 0)


def test_a_draft_that_shares_everything_reads_nothing_but_the_fence(bench: Bench) -> None:
    lease = bench.lease({"embed": "embed", "head": "head"})
    shard = HostShard(lease.the_manifest)
    report = bench.pull(shard, lease, lender=lender_of(*bench.target()))
    assert moved(report) == (0, SHARED)
    assert shard.digests(CHUNK_NBYTES, (0, 1)) == lease.table
