"""What the demo saw, and the checks on it. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from rfork.wire.seed import WeightsReport

FORMAT = 1
MIN_DISTINCT_TOKENS = 8
ELECTED = "elected"
"""The reason of an instance that reads the disk because the planner chose it to."""


class InstanceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One instance. `tokens` holds one list for each prompt, `checksums` SGLang's own digest of each tensor."""

    name: str
    instance_id: str
    asked_for: str
    gpu: int | None
    ready_s: float
    generation: int
    weights: WeightsReport
    tokens: tuple[tuple[int, ...], ...]
    checksums: dict[str, str]


class Check(msgspec.Struct, frozen=True):
    """One thing that must hold. `text` says it as a fact if it does, and what was found instead if it does not."""

    name: str
    ok: bool
    text: str


class Facts(msgspec.Struct, frozen=True, kw_only=True):
    """All of it, as `--json` writes it."""

    ok: bool
    seconds: float
    versions: dict[str, str]
    device: str
    model: str
    model_nbytes: int
    prompts: tuple[str, ...]
    instances: tuple[InstanceFacts, ...]
    checks: tuple[Check, ...]
    format: int = FORMAT


def check_all(instances: Sequence[InstanceFacts], model_nbytes: int) -> tuple[Check, ...]:
    """Every check on A, B, C, D, in this order."""
    a, b, c, d = instances
    return (
        _from_disk(a),
        _forked(b, a, model_nbytes),
        _forked(c, b, model_nbytes),
        _fell_back(d),
        _varied(a),
        *(check for other in (b, c, d) for check in (_same_weights(a, other), _same_tokens(a, other))),
    )


def _from_disk(one: InstanceFacts) -> Check:
    """The planner chose it: nobody else was there."""
    ok = one.weights.source == "checkpoint" and one.weights.fallback_reason in (None, ELECTED)
    found = "read the disk" if ok else f"has weights from {one.weights.source}"
    return Check(f"{one.name}.source", ok, f"{one.name} {found}")


def _forked(one: InstanceFacts, seed: InstanceFacts, model_nbytes: int) -> Check:
    weights, name = one.weights, f"{one.name}.source"
    if weights.source != "seed" or weights.seed is None:
        why = weights.fallback_detail or weights.fallback_reason or "it does not say why"
        return Check(name, False, f"{one.name} did not fork from {seed.name}, but read the disk ({why})")
    if weights.seed.instance_id != seed.instance_id:
        there = f"{weights.seed.instance_id} at {weights.seed.address}"
        return Check(name, False, f"{one.name} forked from {there}, not from {seed.name} ({seed.instance_id})")
    if weights.verify != "full" or not weights.origin_verified:
        how = f"verify: {weights.verify}, origin verified: {weights.origin_verified}"
        return Check(name, False, f"{one.name} forked from {seed.name} without full verification ({how})")
    if weights.nbytes < 0.9 * model_nbytes or not weights.seconds > 0 or not weights.gbps > 0:
        moved = f"{weights.nbytes} bytes in {weights.seconds:g} s"
        return Check(name, False, f"{one.name} reports {moved}, for a model of {model_nbytes} bytes")
    return Check(name, True, f"{one.name} forked from {seed.name} over {weights.protocol}, every byte verified")


def _fell_back(one: InstanceFacts) -> Check:
    ok = one.weights.source == "checkpoint" and one.weights.fallback_reason not in (None, "", ELECTED)
    if ok:
        return Check(f"{one.name}.source", True, f"{one.name} fell back to the disk: {one.weights.fallback_reason}")
    found = f"has weights from {one.weights.source}, and gives no reason for a fallback"
    return Check(f"{one.name}.source", False, f"{one.name} {found}")


def _varied(one: InstanceFacts) -> Check:
    distinct = len({token for answer in one.tokens for token in answer})
    ok = distinct >= MIN_DISTINCT_TOKENS and len(set(one.tokens)) == len(one.tokens)
    found = "differ" if ok else "are too alike to prove anything"
    return Check("varied", ok, f"answers to the prompts {found}: {distinct} distinct tokens")


def _same_weights(a: InstanceFacts, other: InstanceFacts) -> Check:
    name = f"{other.name}.weights"
    if not a.checksums:
        return Check(name, False, f"SGLang gave no digest of {a.name}'s weights")
    names = sorted(a.checksums.keys() | other.checksums.keys())
    wrong = [n for n in names if a.checksums.get(n) != other.checksums.get(n)]
    if wrong:
        text = f"{len(wrong)} of {len(names)} tensors of {other.name} differ from {a.name}'s, first {wrong[0]}"
        return Check(name, False, text)
    return Check(name, True, f"{other.name} holds {a.name}'s weights: {len(names)} of {len(names)} tensors")


def _same_tokens(a: InstanceFacts, other: InstanceFacts) -> Check:
    name = f"{other.name}.tokens"
    for number, (here, there) in enumerate(zip(a.tokens, other.tokens, strict=True), 1):
        if here != there:
            same = next((i for i, (x, y) in enumerate(zip(here, there, strict=False)) if x != y), len(there))
            text = f"{other.name} answers prompt {number} otherwise than {a.name}, from token {same + 1} on"
            return Check(name, False, text)
    total = sum(map(len, a.tokens))
    return Check(name, True, f"{other.name} answers as {a.name} does: {total} of {total} tokens")
