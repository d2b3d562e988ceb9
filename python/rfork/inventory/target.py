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
from rfork.wire.seed import DigestTable


class PullTarget:
    """`rfork.client.pull.LocalShard` over a ResolvedShard. The page is on the shard's device, as NVLink wants it."""

    def __init__(self, shard: ResolvedShard) -> None:
        self._shard = shard
        with torch.inference_mode(False):  # written later, from code that knows no inference mode
            self._page = torch.zeros(FENCE_NBYTES, dtype=torch.uint8, device=shard.device)

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
        return self._shard.regions_for((self._page,))

    def scratch_page(self) -> tuple[int, int]:
        self._page.zero_()
        synchronize(self._shard.device)
        return self._page.data_ptr(), FENCE_NBYTES

    def read_scratch(self) -> bytes:
        return bytes(self._page.cpu().numpy())

    def synchronize(self) -> None:
        self._shard.synchronize()

    def digests(self, chunk_nbytes: int, groups: Sequence[int]) -> DigestTable:
        return self._shard.digests(chunk_nbytes, groups)

    def begin_digests(self, chunk_nbytes: int) -> GroupDigests:
        return self._shard.begin_digests(chunk_nbytes)

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        self._shard.apply(states, inline)
