"""A resolved shard as a pull fills it: its own memory, and one page beside it for the seed's fence."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import torch

from rfork.binding import Region
from rfork.digest import GroupDigests
from rfork.fence import FENCE_NBYTES, synchronize
from rfork.inventory.shard import ResolvedShard
from rfork.manifest import InlineEntry, Manifest, StateEntry
from rfork.regions import regions_of, span_of
from rfork.wire.seed import DigestTable

_OWN_SEGMENT_NBYTES = 12 << 20  # from 10 MiB on, CUDA's caching allocator gives a tensor a segment of its own


class DevicePage:
    """`rfork.client.connect.Page` on a device: NVLink wants it where the weights are.

    On a GPU it takes a segment of its own: tensors that are built afterwards lie as they would lie without it, which is
    as they lie on the seed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        nbytes = FENCE_NBYTES if device.type == "cpu" else _OWN_SEGMENT_NBYTES
        with torch.inference_mode(False):  # written later, from code that knows no inference mode
            self.tensor = torch.empty(nbytes, dtype=torch.uint8, device=device)[:FENCE_NBYTES]

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        return regions_of([span_of("the scratch page", self.tensor)], self._device)

    def scratch_page(self) -> tuple[int, int]:
        self.tensor.zero_()
        synchronize(self._device)
        return self.tensor.data_ptr(), FENCE_NBYTES

    def read_scratch(self) -> bytes:
        return bytes(self.tensor.cpu().numpy())


class PullTarget:
    """`rfork.client.pull.LocalShard` over a ResolvedShard, with a page that is there already or one of its own."""

    def __init__(self, shard: ResolvedShard, page: DevicePage | None = None) -> None:
        self._shard = shard
        self._page = page or DevicePage(shard.device)

    @property
    def manifest(self) -> Manifest:
        return self._shard.manifest

    @property
    def addresses(self) -> tuple[int, ...]:
        return self._shard.addresses

    @property
    def slack(self) -> tuple[int, ...]:
        return self._shard.slack

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        return self._shard.regions_for((self._page.tensor,))

    def scratch_page(self) -> tuple[int, int]:
        return self._page.scratch_page()

    def read_scratch(self) -> bytes:
        return self._page.read_scratch()

    def synchronize(self) -> None:
        self._shard.synchronize()

    def digests(self, chunk_nbytes: int, groups: Sequence[int]) -> DigestTable:
        return self._shard.digests(chunk_nbytes, groups)

    def begin_digests(self, chunk_nbytes: int) -> GroupDigests:
        return self._shard.begin_digests(chunk_nbytes)

    def copy_in(self, group: int, source: torch.Tensor) -> None:
        mine = self._shard.group_bytes(group)
        if mine is None:
            return  # in pieces: left as it is, and read once its digests say so
        with torch.inference_mode():
            mine.copy_(source)
        self._shard.synchronize()

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        self._shard.apply(states, inline)
