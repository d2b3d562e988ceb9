"""What the seed says before and after the weights: whose they are, at which generation, of which manifest. Pure.

Header: the fence page's first bytes | SHA-256 of the manifest (32) | bytes in all, of the longest frame, of the
smallest group that has frames of its own (8 each).
Trailer: the fence page's first bytes again, read once the last frame was sent.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from rfork.errors import FenceBroken

FENCE_HEADER_NBYTES = 32
_FORMAT = struct.Struct(f"<{FENCE_HEADER_NBYTES}s32sQQQ")


class Header(NamedTuple):
    fence: bytes
    manifest_digest: str
    nbytes: int
    frame_nbytes: int
    lone_nbytes: int

    def encode(self) -> bytes:
        return _FORMAT.pack(
            self.fence, bytes.fromhex(self.manifest_digest), self.nbytes, self.frame_nbytes, self.lone_nbytes
        )


def read_header(data: bytes, manifest_digest: str, nbytes: int) -> Header:
    """Parse, and raise FenceBroken unless it announces this manifest and this many bytes."""
    fence, digest, said_nbytes, frame_nbytes, lone_nbytes = _FORMAT.unpack(data)
    header = Header(fence, digest.hex(), said_nbytes, frame_nbytes, lone_nbytes)
    if (header.manifest_digest, said_nbytes) != (manifest_digest, nbytes):
        raise FenceBroken(
            f"other weights were about to be sent than those leased: manifest {header.manifest_digest[:12]} with "
            f"{said_nbytes} bytes, expected {manifest_digest[:12]} with {nbytes}"
        )
    if not 1 <= frame_nbytes <= 1 << 30:
        raise FenceBroken(f"frames of {frame_nbytes} bytes make no sense")
    return header
