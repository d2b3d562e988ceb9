"""What a rank knows of its own weights between changes: may they be published, and as what? Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Standing:
    """`altered`: other than what was loaded. `half_done`: one of many small changes failed. `lost`: other bytes than
    before a change that should have kept them. `unmapped`: some of the memory is not there. `unsettled`: changed since
    the last publication.
    """

    altered: bool = False
    half_done: bool = False
    lost: bool = False
    unmapped: bool = False
    unsettled: bool = False

    def changed(self, *, alters: bool, whole: bool, unmaps: bool, maps: bool, failed: bool) -> None:
        """A change has ended; its arguments are those of `RankAgent.changing`."""
        self.unsettled = True
        self.altered |= alters and not failed
        if alters:
            self.half_done = failed if whole else self.half_done or failed
            self.lost = self.lost and failed
        if not failed:
            self.unmapped = unmaps or (self.unmapped and not maps)

    def other_bytes(self) -> None:
        """Digests after a change that alters nothing are not those of before."""
        self.altered = self.lost = True

    def published(self) -> None:
        self.unsettled = self.altered = self.half_done = False

    def against(self, why: str, *, failed: bool) -> str | None:
        """What stands against publishing now, or None. `why` names the last change."""
        if self.unmapped:
            return "its memory was released"
        if self.altered and self.lost:
            return f"{why} left other bytes, and no update has replaced them"
        if self.altered and (failed or self.half_done):
            return f"{why} failed half-way"
        return None
