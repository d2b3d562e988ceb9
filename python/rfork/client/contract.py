"""What one attempt to take one shard is given: the memory to fill, the lease that admits it, and its bounds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Protocol

import msgspec

from rfork.binding import Region
from rfork.client.arrivals import ArrivingDigests
from rfork.config import Config
from rfork.manifest import InlineEntry, Manifest, StateEntry
from rfork.wire.seed import DigestTable, LeaseReply


class LocalShard(Protocol):
    """The memory to fill: an inventory of the built model, plus one page for the fence on the same device."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where each alias group of the manifest starts."""

    @property
    def slack(self) -> tuple[int, ...]:
        """How many bytes behind each group are nobody's, and may be written to."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What to register: covers every group and the scratch page."""

    def scratch_page(self) -> tuple[int, int]:
        """Address and size of the page, zeroed by this call, so that a read which brings nothing is seen."""

    def read_scratch(self) -> bytes:
        """What the page holds now."""

    def synchronize(self) -> None:
        """Wait for everything queued on the device."""

    def digests(self, chunk_nbytes: int, groups: Sequence[int]) -> DigestTable:
        """Digests of these groups' bytes as they are now; rows of other groups are empty."""

    def begin_digests(self, chunk_nbytes: int) -> ArrivingDigests:
        """The same for groups whose bytes arrive one after another."""

    def copy_in(self, group: int, source: Any) -> None:
        """Fill one group from bytes of this process that a shard like this one has lent, and wait for it."""

    def apply(self, states: Sequence[StateEntry], inline: Sequence[InlineEntry]) -> None:
        """Set carried values and copy inline tensors."""


class HeldLease(Protocol):
    """A granted lease that somebody renews and releases; `rfork.client.lease.Lease` is one."""

    @property
    def reply(self) -> LeaseReply: ...

    @property
    def address(self) -> str: ...

    def manifest(self) -> Manifest: ...

    def digests(self) -> DigestTable: ...

    def check(self) -> None:
        """Raise a SeedError if the lease ended early."""


class PullSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a pull verifies and what bounds it. `own_sessions` are session ids that this process serves under.
    `resumes`: the shard holds some of the bytes already, maybe.
    """

    verify: str = "full"
    connect_timeout_s: float = 10.0
    progress_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
    limit_gbps: float | None = None
    own_sessions: tuple[str, ...] = ()
    resumes: bool = False

    @classmethod
    def of(cls, config: Config, own_sessions: Collection[str] = ()) -> PullSettings:
        return cls(
            verify=config.verify,
            connect_timeout_s=config.connect_timeout_s,
            progress_timeout_s=config.read_timeout_s,
            close_timeout_s=config.close_timeout_s,
            limit_gbps=config.read_gbps_limit,
            own_sessions=tuple(own_sessions),
        )
