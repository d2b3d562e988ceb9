"""Digest any spans on any device, and a shard's groups in chunks."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from rfork.digest.host import MIX64, XXH3, host_chunks
from rfork.errors import UnsupportedModel
from rfork.wire.seed import DigestTable

DEFAULT_CHUNK_NBYTES = 64 << 20
MIN_CHUNK_NBYTES = 4096


def algorithm_for(device: torch.device) -> str:
    """The algorithm that this device runs at memory speed. Raises UnsupportedModel if there is none."""
    if device.type == "cpu":
        return XXH3
    if device.type == "cuda":
        return MIX64
    raise UnsupportedModel(f"there are no digests for {device.type} devices yet: use verify=off")


def digest_chunks(spans: Sequence[tuple[int, int]], device: torch.device, algorithm: str | None = None) -> list[int]:
    """One 64-bit digest per (address, nbytes) span on `device`, in order.

    Sees all work that was queued on the calling thread's current stream, and what a NIC has completed; does not wait
    for more. Raises UnsupportedModel if the device can't run `algorithm`.
    """
    algorithm = algorithm or algorithm_for(device)
    if not spans:
        return []
    if device.type == "cpu" and algorithm in (XXH3, MIX64):
        return host_chunks(spans, algorithm)
    if device.type == "cuda" and algorithm == MIX64:
        from rfork.digest.device import device_chunks  # needs triton, which hosts without GPU may lack

        return device_chunks(spans, device)
    raise UnsupportedModel(f"a {device.type} device can't compute {algorithm} digests")


def group_chunks(address: int, nbytes: int, chunk_nbytes: int) -> list[tuple[int, int]]:
    """The spans of one group: whole chunks, then the rest."""
    return [(address + at, min(chunk_nbytes, nbytes - at)) for at in range(0, nbytes, chunk_nbytes)]


def digest_groups(
    addresses: Sequence[int],
    group_nbytes: Sequence[int],
    device: torch.device,
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    groups: Sequence[int] | None = None,
    algorithm: str | None = None,
) -> DigestTable:
    """Digests of alias groups, all or those listed; rows of the others are empty. Raises ValueError on silly chunks."""
    if chunk_nbytes < MIN_CHUNK_NBYTES or chunk_nbytes % 8:
        raise ValueError(f"chunk_nbytes must be a multiple of 8 and at least {MIN_CHUNK_NBYTES}, got {chunk_nbytes}")
    wanted = range(len(addresses)) if groups is None else sorted(set(groups))
    per_group = {g: group_chunks(addresses[g], group_nbytes[g], chunk_nbytes) for g in wanted}
    values = iter(digest_chunks([s for spans in per_group.values() for s in spans], device, algorithm))
    rows = {g: tuple(next(values) for _ in spans) for g, spans in per_group.items()}
    return DigestTable(
        algorithm=algorithm or algorithm_for(device),
        chunk_nbytes=chunk_nbytes,
        values=tuple(rows.get(g, ()) for g in range(len(addresses))),
    )
