"""Comparing two digest tables."""

from __future__ import annotations

from collections.abc import Sequence

from rfork.manifest import Manifest
from rfork.wire.seed import DigestTable


def first_difference(
    mine: DigestTable, theirs: DigestTable, manifest: Manifest, groups: Sequence[int] | None = None
) -> str | None:
    """The first chunk that differs, by tensor name, or None if all digests of `groups` (default: all) are there and
    agree.

    Tables that can't be compared differ, and so does a digest that one side lacks: nothing unproven counts as equal.
    """
    if (mine.algorithm, mine.chunk_nbytes) != (theirs.algorithm, theirs.chunk_nbytes):
        return (
            f"digests can't be compared: {mine.algorithm} per {mine.chunk_nbytes} bytes here, "
            f"{theirs.algorithm} per {theirs.chunk_nbytes} bytes there"
        )
    num_groups = len(manifest.group_nbytes)
    if (len(mine.values), len(theirs.values)) != (num_groups, num_groups):
        return (
            f"digests of {len(mine.values)} groups here and {len(theirs.values)} there, for a manifest of {num_groups}"
        )
    for group in range(num_groups) if groups is None else sorted(set(groups)):
        nbytes = manifest.group_nbytes[group]
        num_chunks = -(-nbytes // mine.chunk_nbytes)
        here, there = mine.values[group], theirs.values[group]
        if (len(here), len(there)) != (num_chunks, num_chunks):
            name = _tensor_at(manifest, group, 0, nbytes)
            return f"{name}: {len(here)} digests here and {len(there)} there, {num_chunks} expected"
        for i, (a, b) in enumerate(zip(here, there, strict=True)):
            if a != b:
                start, end = i * mine.chunk_nbytes, min((i + 1) * mine.chunk_nbytes, nbytes)
                name = _tensor_at(manifest, group, start, end)
                where = f"chunk {i + 1} of {num_chunks} (bytes {start} to {end})"
                return f"{name}: {where} has digest {a:016x} here, {b:016x} there"
    return None


def _tensor_at(manifest: Manifest, group: int, start: int, end: int) -> str:
    """The tensor of the group that begins last before `end`, or else the first; with its layout."""
    members = [t for t in manifest.tensors if t.group == group]
    inside = [t for t in members if start <= t.offset < end] or [t for t in members if t.offset < end]
    if not inside:
        return f"group {group}"
    first = min(inside, key=lambda t: (t.offset, t.name)) if len(members) > 1 else inside[0]
    others = f" and {len(members) - 1} that share its memory" if len(members) > 1 else ""
    return f"{first.name} ({first.describe()}){others}"
