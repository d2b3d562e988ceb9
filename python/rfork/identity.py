"""Who is who: model identity, content, instance key, rank identity.

Every key is content-addressed: a digest of what it stands for, never a label that a user typed.
"""

from __future__ import annotations

import hashlib
import json
import re
import secrets
from collections.abc import Mapping
from typing import NewType

import msgspec

InstanceId = NewType("InstanceId", str)
InstanceKey = NewType("InstanceKey", str)
Scalar = str | int | float | bool | None


def new_instance_id() -> InstanceId:
    """A random name for one life of one process; a restarted server gets another."""
    return InstanceId("i-" + secrets.token_hex(8))


def canonical_digest(value: object) -> str:
    """SHA-256 (hex) of `value` as sorted, compact JSON. NaN and infinities are refused."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


class ModelIdentity(msgspec.Struct, frozen=True):
    """All that decides layout and meaning, known before the model is built.

    `fields` maps a dotted name to a scalar. Never in it: paths, host names, ports, random seeds.
    """

    engine: str
    fields: dict[str, Scalar]

    @property
    def digest(self) -> str:
        return canonical_digest({"engine": self.engine, "fields": self.fields})

    def diff(self, other: ModelIdentity) -> list[tuple[str, Scalar, Scalar]]:
        """Fields that differ, as (name, mine, theirs), sorted by name; a missing field reads None."""
        mine: dict[str, Scalar] = {"engine": self.engine, **self.fields}
        theirs: dict[str, Scalar] = {"engine": other.engine, **other.fields}
        names = sorted(mine.keys() | theirs.keys())
        return [(n, mine.get(n), theirs.get(n)) for n in names if mine.get(n) != theirs.get(n)]


class Content(msgspec.Struct, frozen=True):
    """What the bytes are: `checkpoint:<id>` as on disk, or `live:<id>` after any update in memory."""

    kind: str
    id: str

    def __post_init__(self) -> None:
        if self.kind not in ("checkpoint", "live"):
            raise ValueError(f"content kind must be checkpoint or live, got {self.kind!r}")
        if not self.id:
            raise ValueError("content id is empty")

    def __str__(self) -> str:
        return f"{self.kind}:{self.id}"

    @classmethod
    def parse(cls, text: str) -> Content:
        kind, _, ident = text.partition(":")
        return cls(kind, ident)

    @classmethod
    def live(cls) -> Content:
        """A content that no other instance has: nobody else has made this update here."""
        return cls("live", secrets.token_hex(8))


ANY_LIVE = Content("live", "any")
"""Stands for every live content in keys under which clients that take live weights look for seeds."""


def instance_key(identity: ModelIdentity, content: Content) -> InstanceKey:
    """Equal keys: the same bytes are expected, shard by shard."""
    return InstanceKey(canonical_digest({"identity": identity.digest, "content": str(content)}))


class RankIdentity(msgspec.Struct, frozen=True, order=True, kw_only=True):
    """Coordinates of one shard. Replicas of a shard (plain data parallelism) share it on purpose.

    `role` is `target` or `draft-N`.
    """

    role: str = "target"
    pp_rank: int = 0
    pp_size: int = 1
    tp_rank: int = 0
    tp_size: int = 1
    ep_rank: int = 0
    ep_size: int = 1
    moe_tp_rank: int = 0
    moe_tp_size: int = 1
    attn_dp_rank: int = 0
    attn_dp_size: int = 1

    def __post_init__(self) -> None:
        if self.role != "target" and not re.fullmatch(r"draft-[0-9]+", self.role):
            raise ValueError(f"role must be target or draft-N, got {self.role!r}")
        for axis in ("pp", "tp", "ep", "moe_tp", "attn_dp"):
            rank, size = getattr(self, f"{axis}_rank"), getattr(self, f"{axis}_size")
            if not 0 <= rank < size:
                raise ValueError(f"{axis}_rank {rank} is outside 0..{size - 1}")

    @property
    def key(self) -> str:
        """Canonical text, also for URLs: `target.tp1of2.pp0of1.ep0of1.moe_tp0of1.attn_dp0of1`."""
        axes = ("tp", "pp", "ep", "moe_tp", "attn_dp")
        parts = [f"{a}{getattr(self, f'{a}_rank')}of{getattr(self, f'{a}_size')}" for a in axes]
        return ".".join([self.role, *parts])


def digest_of_mapping(values: Mapping[str, object]) -> str:
    """Digest of a configuration mapping; values that JSON lacks are taken as text."""
    return canonical_digest(json.loads(json.dumps(values, sort_keys=True, default=str)))
