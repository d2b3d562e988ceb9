"""Every body that crosses a socket, as frozen structs parsed once at the edge.

Version in the path; unknown fields are ignored; `requires` names what a receiver must understand, else it refuses.
Bodies are JSON (control plane) or MessagePack (manifests, digests, the rank's control connection). Nothing is pickle.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

PROTOCOL_VERSION = 1
UNDERSTOOD: frozenset[str] = frozenset()
MAX_JSON_NBYTES = 1 << 20
MAX_BLOB_NBYTES = 512 << 20

T = TypeVar("T")


def encode(body: object) -> bytes:
    return msgspec.json.encode(body)


def decode(data: bytes, kind: type[T], *, limit: int = MAX_JSON_NBYTES) -> T:
    """Parse one JSON body. Raises ValueError that says where it is wrong; never trusts its size."""
    if len(data) > limit:
        raise ValueError(f"body of {len(data)} bytes exceeds {limit}")
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ValueError(str(error)) from error


def not_understood(requires: tuple[str, ...]) -> list[str]:
    """Names in `requires` that this build does not know; anything in the list is a refusal."""
    return sorted(set(requires) - UNDERSTOOD)
