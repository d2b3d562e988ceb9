"""What an instance that is not there yet would ask seeds for; how `rfork check` and the engine's side talk about it."""

from __future__ import annotations

import msgspec

from rfork.identity import RankIdentity, Scalar


class WantedModel(msgspec.Struct, frozen=True, kw_only=True):
    """One model of that instance, as rank 0 would ask for it. `problem` says why its content is not known."""

    rank: RankIdentity
    engine: str
    fields: dict[str, Scalar]
    content: str
    problem: str = ""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """All models of that instance. `seed` is the address in its arguments, if there is one; `config` its
    `--rfork-config` as typed, `api_key` what it would open SGLang's control end-points with.
    """

    models: tuple[WantedModel, ...]
    weights: str = "checkpoint"
    seed: str | None = None
    config: str | None = None
    api_key: str | None = None
