"""An instance as a registry sees it."""

from __future__ import annotations

from dataclasses import dataclass

from rfork.seed.lifecycle import SeedState
from rfork.wire.control import Seeking


@dataclass(frozen=True)
class Snapshot:
    """What one node knows. `what` is what it holds or is about to load, `nodes` are listeners of the other nodes."""

    what: Seeking
    state: SeedState
    generation: int
    weight_version: str
    num_ranks: int
    num_ready: int
    readers: tuple[str, ...]
    seed: str | None
    is_loaded: bool
    nodes: tuple[str, ...] = ()
