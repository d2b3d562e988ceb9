"""Bytes that a seed holds once for two shards cross the link once: the second shard gets them from the first, here.

Such is a draft whose embedding and head are its target's memory. Addresses only find the bytes; digests judge them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from rfork.binding import Binding
from rfork.errors import UnsupportedModel
from rfork.manifest import Manifest
from rfork.wire.seed import LeaseReply

logger = logging.getLogger(__name__)


class Held(Protocol):
    """A shard of this process as it is now; `rfork.inventory.ResolvedShard` is one."""

    @property
    def manifest(self) -> Manifest: ...

    def group_bytes(self, group: int) -> Any:
        """All bytes of one alias group as something that `LocalShard.copy_in` takes; None where they are in pieces."""


@dataclass(frozen=True)
class Lender:
    """A shard that this process took from `instance_id`, where it was `there`. `resolve` finds it here as it is now, so
    that nothing is kept alive meanwhile.
    """

    instance_id: str
    there: Binding
    resolve: Callable[[], Held]

    def lends(self, reply: LeaseReply) -> dict[int, Any]:
        """Group of the leased shard → the same bytes here, where the seed holds one memory for both, unchanged since.

        Equal addresses mean one memory only in one process: replicas of one instance differ in their endpoints.
        """
        if (reply.instance_id, reply.generation) != (self.instance_id, self.there.generation):
            return {}
        if not reply.binding.endpoints or reply.binding.endpoints != self.there.endpoints:
            return {}
        places = {place: group for group, place in enumerate(_places(self.there))}
        shared = {group: places[place] for group, place in enumerate(_places(reply.binding)) if place in places}
        return self._held(shared) if shared else {}

    def _held(self, shared: dict[int, int]) -> dict[int, Any]:
        try:
            held = self.resolve()
        except UnsupportedModel as error:
            logger.info("rfork: nothing can be copied from %s: %s", self.instance_id, error)
            return {}
        if held.manifest.digest != self.there.manifest_digest:  # wrapped or replaced since it was taken
            return {}
        found = {group: held.group_bytes(mine) for group, mine in shared.items()}
        return {group: source for group, source in found.items() if source is not None}


def _places(binding: Binding) -> zip[tuple[int, int]]:
    return zip(binding.addresses, binding.group_nbytes, strict=True)
