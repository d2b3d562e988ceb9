"""The planner's knobs. The defaults suit a fleet whose transfers take seconds to a few minutes."""

from __future__ import annotations

import math

import msgspec


class Policy(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All in seconds or counts; refused at birth where they contradict each other.

    interval_s, ttl_s      heartbeats are asked for every `interval_s` and an entry dies after `ttl_s` without one
    settle_s               after a start no claim is granted for so long: heartbeats may bring seeds back first
    candidates             seeds in one answer; the first is reserved
    fan_out                clients at one seed at a time while others wait (1: a doubling tree; 0: its capacity)
    patience_s             no seed that a client may use took anybody for so long: the first such client may
                           use capacity beyond `fan_out`
    assignment_ttl_s       a reservation that no heartbeat of the seed confirms is given back after this
    claim_ttl_s            the claim to read the disk lasts so long without a heartbeat of its holder
    disk_claims            instances of one key that may read the disk at once
    wait_bound_s           nobody waits longer; `wait_bound_max_s` caps what a client may ask for
    bound_jitter           a client's own bound is earlier by up to this share, so that a fleet does not give up at once
    poll_max_s             the longest that one ask is held open
    keep_place_s           a client between two asks keeps its place in the queue for so long
    set_aside_s(_max_s)    a seed reported bad is not offered for so long, doubling with each further client
    busy_s                 a seed that refused a client is not offered for so long
    max_…                  bounds of memory: what comes beyond them is told to go on without the planner
    suspect_after          a client that failed with so many seeds is itself suspect: its reports set no seed aside
    """

    interval_s: float = 10.0
    ttl_s: float = 30.0
    settle_s: float = 12.0
    candidates: int = 3
    fan_out: int = 1
    patience_s: float = 60.0
    assignment_ttl_s: float = 30.0
    claim_ttl_s: float = 60.0
    disk_claims: int = 1
    wait_bound_s: float = 1200.0
    wait_bound_max_s: float = 7200.0
    bound_jitter: float = 0.2
    poll_max_s: float = 30.0
    keep_place_s: float = 15.0
    set_aside_s: float = 10.0
    set_aside_max_s: float = 300.0
    busy_s: float = 1.0
    suspect_after: int = 3
    max_keys: int = 10_000
    max_instances: int = 50_000
    max_waiting: int = 50_000

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            lowest = 0.0 if name in ("settle_s", "fan_out", "bound_jitter", "busy_s", "disk_claims") else 1e-3
            if not (math.isfinite(value) and value >= lowest):
                raise ValueError(f"{name} must be at least {lowest:g}, got {value!r}")
        if self.ttl_s < 2 * self.interval_s:
            raise ValueError(
                f"ttl_s {self.ttl_s:g} is under two heartbeats of {self.interval_s:g} s: one lost packet ends entries"
            )
        if self.claim_ttl_s < 2 * self.interval_s:
            raise ValueError(
                f"claim_ttl_s {self.claim_ttl_s:g} is under two heartbeats of {self.interval_s:g} s: "
                "a live holder would lose its claim between them"
            )
        if self.bound_jitter >= 1:
            raise ValueError(f"bound_jitter is a share below 1, got {self.bound_jitter:g}")
        if self.disk_claims < 1:
            raise ValueError("disk_claims 0 would leave a key without its first seed for ever")
