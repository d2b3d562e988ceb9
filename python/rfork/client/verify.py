"""Which digests a pull compares, and what a difference means. Pure: no bytes are touched here."""

from __future__ import annotations

import random
from typing import NamedTuple

from rfork.errors import SeedRefused
from rfork.manifest import Manifest
from rfork.wire.seed import MIN_CHUNK_NBYTES, DigestTable

_SAMPLE_SHARE = 16
_SAMPLE_AT_LEAST = 16


class Chunk(NamedTuple):
    """Bytes [offset, offset + nbytes) of one alias group, which its digest `number` stands for."""

    group: int
    number: int
    offset: int
    nbytes: int


def groups_to_verify(verify: str, num_groups: int, rng: random.Random) -> list[int]:
    """Groups whose bytes are digested: all (full), none (off), or a random sixteenth, 16 at least (sample)."""
    if verify == "full":
        return list(range(num_groups))
    if verify == "off":
        return []
    wanted = min(num_groups, max(_SAMPLE_AT_LEAST, -(-num_groups // _SAMPLE_SHARE)))
    return sorted(rng.sample(range(num_groups), wanted))


def check_table(theirs: DigestTable, manifest: Manifest, seed_name: str) -> None:
    """Raise SeedRefused unless the seed's table has one value for each chunk of each group."""
    size = theirs.chunk_nbytes
    usable = size >= MIN_CHUNK_NBYTES and size % 8 == 0
    expected = [-(-nbytes // size) for nbytes in manifest.group_nbytes] if usable else None
    if expected != [len(values) for values in theirs.values]:
        raise SeedRefused(
            f"{seed_name}'s digests do not cover its manifest: {len(theirs.values)} groups in chunks of {size} bytes, "
            f"{len(manifest.group_nbytes)} groups expected",
            reason="unverified",
        )


def differing_chunks(mine: DigestTable, theirs: DigestTable, manifest: Manifest, groups: list[int]) -> list[Chunk]:
    """Chunks of `groups` whose digests differ, in order. Both tables have the same chunk size.

    A group that this side has not digested completely counts as different: nothing unproven is equal.
    """
    size = theirs.chunk_nbytes
    out = []
    for group in groups:
        here, there = mine.values[group], theirs.values[group]
        if here == there:
            continue
        for number, value in enumerate(there):
            if number >= len(here) or here[number] != value:
                nbytes = min(size, manifest.group_nbytes[group] - number * size)
                out.append(Chunk(group, number, number * size, nbytes))
    return out


def describe(chunk: Chunk, manifest: Manifest) -> str:
    """The tensor that a chunk belongs to, by name, and which part of it."""
    end = chunk.offset + chunk.nbytes
    inside = sorted((t.offset, t.name, t) for t in manifest.tensors if t.group == chunk.group and t.offset < end)
    if not inside:
        return f"group {chunk.group} bytes {chunk.offset} to {end}"
    starting = [entry for entry in inside if entry[0] >= chunk.offset]
    tensor = (starting or inside[-1:])[0][2]
    return f"{tensor.name} ({tensor.describe()}) chunk {chunk.number + 1}, bytes {chunk.offset} to {end} of its memory"


def blame(chunk: Chunk, seed_name: str, first: DigestTable, second: DigestTable, third: DigestTable) -> str:
    """Whose fault a chunk is that was read twice and stays wrong. `third` are digests of the second read's bytes, taken
    once more.
    """
    values = [t.values[chunk.group] for t in (first, second, third)]
    one, two, again = (v[chunk.number] if chunk.number < len(v) else None for v in values)
    if two != again:
        return "Its digest here changes without a read: this machine's memory is at fault, or something writes to it"
    if one == two:
        return (
            f"Both reads brought the same bytes: {seed_name} holds other bytes than it published. "
            "Ask it with `rfork audit`"
        )
    return "Each read brought other bytes: the path between the two is at fault, or this machine's memory"
