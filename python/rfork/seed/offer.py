"""What a rank offers: one shard as its engine hands it over, and as it is published."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rfork.identity import Content, ModelIdentity
from rfork.manifest import Manifest
from rfork.seed.serving import Resolved
from rfork.wire.seed import DigestTable

StockTable = dict[str, tuple[int, int, int]]


def _no_table() -> str:
    return "this instance has no table for stock clients"


def _no_version() -> None:
    return None


@dataclass(frozen=True)
class SeedShard:
    """One shard to publish. The callables are asked again after every change, in the thread that changes the weights.

    `stock_table` returns SGLang's own table, or the reason why a stock client must not have it. `origin_digests` are
    those that a forked shard was checked against; without them they are taken from its memory.
    """

    resolve: Callable[[], Resolved]
    identity: ModelIdentity
    content: Content
    verified: bool = True
    origin_digests: DigestTable | None = None
    weight_version: Callable[[], str | None] = _no_version
    stock_table: Callable[[], StockTable | str] = _no_table


@dataclass
class Change:
    """What a change tells of itself: set `failed` where the engine reports failure without raising."""

    failed: bool = False


@dataclass
class Live:
    """What is published for one shard. `resolved` keeps tensors alive, so it is dropped while they may be replaced."""

    source: SeedShard
    manifest: Manifest
    resolved: Resolved | None
    digests: DigestTable | None
