"""A running server's weights, seen from outside: with a lease like any client's, and over Mooncake.

Nothing that the server says about its bytes is taken for granted: `image_of` reads all of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx

from rfork.binding import Binding
from rfork.client.contract import PullSettings
from rfork.client.lease import Lease, take_lease
from rfork.client.pull import pull
from rfork.clock import SystemClock
from rfork.config import Config
from rfork.fence import check_fence
from rfork.identity import RankIdentity
from rfork.manifest import Manifest
from rfork.transports.mooncake_import import environment, load_mooncake
from rfork.transports.select import MooncakeFabrics, gather_facts
from rfork.wire.seed import DigestTable, LeaseRequest
from support.buffers import Buffer
from support.host_shard import HostShard
from support.server import HOST, Server

CONFIG = Config(advertise_host=HOST, protocol="tcp")
NOBODY = "i-test"
TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Image:
    """One shard as it is in a server's memory: what it is made of, and the bytes of each alias group."""

    manifest: Manifest
    groups: tuple[bytes, ...]
    digests: DigestTable

    @property
    def values(self) -> dict[str, Any]:
        """Everything that is no tensor."""
        return {entry.name: entry.value for entry in self.manifest.states}

    def differences(self, other: Image) -> list[str]:
        """Names of tensors that differ in dtype, shape, stride, place, kind or any byte, and of values that differ."""
        here, there = ({t.name: t for t in image.manifest.tensors} for image in (self, other))
        out = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
        out += [t.name for t in self.manifest.tensors if t.group >= 0 and self._bytes(t.group) != other._bytes(t.group)]
        names = sorted(self.values.keys() | other.values.keys())
        out += [name for name in names if repr(self.values.get(name)) != repr(other.values.get(name))]
        return out + [i.name for i in self.manifest.inline if i not in other.manifest.inline]

    def _bytes(self, group: int) -> bytes | None:
        return self.groups[group] if group < len(self.groups) else None


def image_of(server: Server, rank: RankIdentity | None = None, *, weights: str = "checkpoint") -> Image:
    """All that a shard of `server` holds now, read from its memory."""
    with lease_on(server, rank, weights=weights) as lease:
        shard = HostShard(lease.manifest())
        fabrics = MooncakeFabrics(CONFIG, gather_facts("cpu", None, CONFIG))
        pull(shard, lease, fabrics, PullSettings(), check_fence=check_fence, clock=SystemClock())
        groups = tuple(bytes(shard.group(g)) for g in range(len(shard.addresses)))
        return Image(shard.manifest, groups, lease.digests())


@contextlib.contextmanager
def lease_on(
    server: Server, rank: RankIdentity | None = None, client: str = NOBODY, *, weights: str = "checkpoint"
) -> Iterator[Lease]:
    """A lease on a shard of `server`, renewed inside the block."""
    status = server.get("/rfork/v1/status").json()
    request = LeaseRequest(
        client=client,
        instance_key=status["instance_key"],
        identity=identity_fields(status["listener"]),
        engine="sglang",
        content=status["content"],
        rank=rank or RankIdentity(),
        weights=weights,
        seed=status["instance_id"],
    )
    with take_lease(status["listener"], request, timeout_s=TIMEOUT_S) as lease:
        yield lease


def identity_fields(listener: str) -> dict[str, Any]:
    """The model identity of a seed, learned as anybody can: one who asks for no model is told all that differs."""
    nothing = {"client": NOBODY, "instance_key": "", "identity": {}, "engine": "sglang", "content": "checkpoint:0"}
    body = {**nothing, "rank": {}}
    refusal = httpx.post(f"{listener}/rfork/v1/leases", json=body, timeout=TIMEOUT_S, trust_env=False).json()
    assert refusal["reason"] == "key_mismatch", refusal
    return {name: theirs for name, _, theirs in refusal["differing"]}


@contextlib.contextmanager
def flipped_byte(server: Server) -> Iterator[str]:
    """One bit in `server`'s memory is wrong inside the block, behind the server's back; yields its tensor's name.

    The data plane has no authentication: whoever reaches a rank's transfer port can write to what it registered.
    """
    with lease_on(server) as lease:
        manifest, binding = lease.manifest(), lease.reply.binding
    tensor = next(t for t in manifest.tensors if t.name.endswith("down_proj.weight") or "experts" in t.name)
    address = binding.addresses[tensor.group] + tensor.offset + 10
    peer = binding.endpoints[0].session_id
    byte = Buffer(4096)
    with environment({"MC_FORCE_TCP": "true"}):
        engine = load_mooncake().TransferEngine()
        assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    assert engine.register_memory(byte.address, byte.nbytes) == 0
    assert engine.transfer_sync_read(peer, byte.address, address, 1) == 0

    def flip() -> None:
        byte.view[0] ^= 0x40
        assert engine.transfer_sync_write(peer, byte.address, address, 1) == 0

    flip()
    try:
        yield tensor.name
    finally:
        flip()
        engine.unregister_memory(byte.address)


def fence_page(binding: Binding) -> bytes:
    """What a seed's fence page says now; the binding may be that of a lease that has ended. Raises OSError where its
    engine is gone.
    """
    page = Buffer(4096)
    with reader() as engine:
        engine.register_memory(page.address, page.nbytes)
        if engine.transfer_sync_read(binding.endpoints[0].session_id, page.address, binding.fence_address, 32) != 0:
            raise OSError("nobody serves this page")
        return bytes(page.view[:32])


@contextlib.contextmanager
def reader() -> Iterator[Any]:
    """A Mooncake engine of our own, over TCP."""
    with environment({"MC_FORCE_TCP": "true"}):
        engine = load_mooncake().TransferEngine()
        assert engine.initialize(HOST, "P2PHANDSHAKE", "tcp", "") == 0
    yield engine
