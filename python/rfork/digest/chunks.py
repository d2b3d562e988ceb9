"""Digest any spans on any device, and a shard's groups in chunks, at once or as their bytes arrive."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from rfork.digest.host import MIX64, XXH3, begin_host_chunks
from rfork.errors import UnsupportedModel
from rfork.wire.seed import MIN_CHUNK_NBYTES, DigestTable

DEFAULT_CHUNK_NBYTES = 64 << 20

Spans = npt.NDArray[Any] | Sequence[tuple[int, int]]
"""(address, nbytes) of each, as pairs or as an array of two columns."""


def algorithm_for(device: torch.device) -> str:
    """The algorithm that this device runs at memory speed. Raises UnsupportedModel if there is none."""
    if device.type == "cpu":
        return XXH3
    if device.type == "cuda":
        return MIX64
    raise UnsupportedModel(f"there are no digests for {device.type} devices yet: use verify=off")


def digest_chunks(spans: Spans, device: torch.device, algorithm: str | None = None) -> list[int]:
    """One 64-bit digest per (address, nbytes) span on `device`, in order.

    Sees all work that was queued on the calling thread's current stream, and what a NIC has completed; does not wait
    for more. Raises UnsupportedModel if the device can't run `algorithm`.
    """
    return begin_chunks(spans, device, algorithm)()


def begin_chunks(spans: Spans, device: torch.device, algorithm: str | None = None) -> Callable[[], list[int]]:
    """The same, started here and waited for by what this returns; memory and bytes must stay until then."""
    algorithm = algorithm or algorithm_for(device)
    if not len(spans):
        return list
    columns = np.asarray(spans, dtype=np.int64).reshape(-1, 2)
    if device.type == "cpu" and algorithm in (XXH3, MIX64):
        return begin_host_chunks(columns, algorithm)
    if device.type == "cuda" and algorithm == MIX64:
        from rfork.digest.device import begin_device_chunks  # needs triton, which hosts without GPU may lack

        return begin_device_chunks(columns, device)
    raise UnsupportedModel(f"a {device.type} device can't compute {algorithm} digests")


def prepare(device: torch.device) -> None:
    """Load what the first digest on this device waits for: on a GPU half a second of Triton and its kernel.

    Raises what loading raises.
    """
    if device.type != "cuda":
        return
    with torch.inference_mode(False), torch.cuda.device(device):
        probe = torch.zeros(8, dtype=torch.uint8, device=device)
        digest_chunks([(probe.data_ptr(), probe.nbytes)], device)


class GroupDigests:
    """Digests of a shard's alias groups, started as their bytes are there. Raises ValueError on silly chunks."""

    def __init__(
        self,
        addresses: Sequence[int],
        group_nbytes: Sequence[int],
        device: torch.device,
        chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
        algorithm: str | None = None,
    ) -> None:
        if chunk_nbytes < MIN_CHUNK_NBYTES or chunk_nbytes % 8:
            raise ValueError(
                f"chunk_nbytes must be a multiple of 8 and at least {MIN_CHUNK_NBYTES}, got {chunk_nbytes}"
            )
        self._addresses = np.array(addresses, dtype=np.int64)
        self._nbytes = np.array(group_nbytes, dtype=np.int64)
        self._device = device
        self._chunk_nbytes = chunk_nbytes
        self._algorithm = algorithm or algorithm_for(device)
        self._begun: list[tuple[list[int], list[int], Callable[[], list[int]]]] = []

    def feed(self, groups: Sequence[int]) -> None:
        """Start on these groups, each fed once; their bytes don't change from here on."""
        if not groups:
            return
        which = np.array(groups, dtype=np.int64)
        counts, spans = chunk_spans(self._addresses[which], self._nbytes[which], self._chunk_nbytes)
        self._begun.append((list(groups), counts.tolist(), begin_chunks(spans, self._device, self._algorithm)))

    def table(self) -> DigestTable:
        """Wait for all of them; rows of groups that were not fed are empty."""
        rows: list[tuple[int, ...]] = [()] * len(self._addresses)
        for groups, counts, wait in self._begun:
            values, at = wait(), 0
            for group, count in zip(groups, counts, strict=True):
                rows[group] = tuple(values[at : at + count])
                at += count
        return DigestTable(self._algorithm, self._chunk_nbytes, tuple(rows))


def chunk_spans(
    addresses: npt.NDArray[Any], nbytes: npt.NDArray[Any], chunk_nbytes: int
) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
    """How many chunks each group has, and the spans of all of them: whole chunks, then the rest."""
    counts = -(-nbytes // chunk_nbytes)
    offsets = (np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)) * chunk_nbytes
    left = np.repeat(nbytes, counts) - offsets
    return counts, np.stack([np.repeat(addresses, counts) + offsets, np.minimum(left, chunk_nbytes)], axis=1)


def digest_groups(
    addresses: Sequence[int],
    group_nbytes: Sequence[int],
    device: torch.device,
    chunk_nbytes: int = DEFAULT_CHUNK_NBYTES,
    groups: Sequence[int] | None = None,
    algorithm: str | None = None,
) -> DigestTable:
    """Digests of alias groups, all or those listed; rows of the others are empty. Raises ValueError on silly chunks."""
    digests = GroupDigests(addresses, group_nbytes, device, chunk_nbytes, algorithm)
    digests.feed(range(len(addresses)) if groups is None else sorted(set(groups)))
    return digests.table()
