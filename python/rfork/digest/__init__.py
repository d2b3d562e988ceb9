"""Digests of weights, by address: no copy, no temporary of their size.

Host memory: XXH3-64 per chunk, on a few threads. Devices: `mix64-1` per chunk, one kernel over a table of pointers.
Both take (address, nbytes) spans, so chunks can be digested as they land; the caller keeps the memory alive and ordered
before the call.
"""

from rfork.digest.chunks import DEFAULT_CHUNK_NBYTES, GroupDigests, begin_chunks, digest_chunks, digest_groups, prepare
from rfork.digest.host import MIX64, XXH3, mix64, mix64_bytes
from rfork.digest.tables import first_difference

__all__ = [
    "DEFAULT_CHUNK_NBYTES",
    "MIX64",
    "XXH3",
    "GroupDigests",
    "begin_chunks",
    "digest_chunks",
    "digest_groups",
    "first_difference",
    "mix64",
    "mix64_bytes",
    "prepare",
]
