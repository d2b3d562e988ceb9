"""What the planner knows of one instance, and of one client that waits."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec

from rfork.wire.planner import Ask, Heartbeat, InstanceState

STORY_LENGTH = 32


@dataclass(slots=True)
class Use:
    """One client at one seed. `granted`: the seed's heartbeat lists it; else it is a reservation of ours."""

    since: float
    until: float
    granted: bool


@dataclass(slots=True, eq=False)
class Instance:
    """A registered instance: its last heartbeat, when it came, and what clients do with it.

    `slot` is where the pools' index holds it, None while it is not offered for want of capacity or health.
    """

    beat: Heartbeat
    since: float
    seen_at: float
    expires_at: float
    uses: dict[str, Use] = field(default_factory=dict)
    drain_asked: bool = False
    granted_at: float = 0.0
    aside_until: float = 0.0
    struck_until: float = 0.0
    strikes: set[str] = field(default_factory=set)
    slot: tuple[int, str, str] | None = None
    story: deque[str] = field(default_factory=lambda: deque(maxlen=STORY_LENGTH))

    @property
    def id(self) -> str:
        return self.beat.instance_id

    @property
    def load(self) -> int:
        return len(self.uses)

    @property
    def keys(self) -> tuple[str, ...]:
        beat = self.beat
        return (beat.instance_key, beat.live_key) if beat.live_key else (beat.instance_key,)

    @property
    def healthy(self) -> bool:
        """Serving, with every rank of every node, and not told to drain."""
        beat = self.beat
        is_whole = beat.ranks_ready >= beat.ranks and bool(beat.listener)
        return beat.state is InstanceState.SERVING and is_whole and not self.drain_asked

    def offered(self, now: float) -> bool:
        return self.healthy and self.expires_at > now >= self.aside_until

    def resting(self, now: float) -> bool:
        """It would be offered, had it not just refused a client through no fault of its own."""
        return self.healthy and self.expires_at > now and self.aside_until > now >= self.struck_until

    def tell(self, now: float, text: str) -> None:
        self.story.append(f"+{now - self.since:.1f} s {text}")

    def describe(self, now: float) -> str:
        """`<Instance i-7f3a SERVING gen=4 leases=1/2 heartbeat 3 s ago>`"""
        beat = self.beat
        return (
            f"<Instance {self.id} {beat.state.name} gen={beat.generation} leases={self.load}/{beat.capacity} "
            f"heartbeat {now - self.seen_at:.0f} s ago>"
        )


def stored(beat: Heartbeat) -> Heartbeat:
    """A heartbeat as it is kept: the identity is its pool's."""
    return beat if beat.identity is None else msgspec.structs.replace(beat, identity=None)


def shape(beat: Heartbeat) -> tuple[object, ...]:
    """All of a heartbeat that changes choices or what operators see."""
    return (
        beat.state,
        beat.instance_key,
        beat.live_key,
        beat.listener,
        beat.generation,
        beat.capacity,
        beat.ranks_ready >= beat.ranks,
        beat.labels,
        beat.content,
        beat.weight_version,
    )


@dataclass(slots=True, eq=False)
class Waiter:
    """A client that has asked and has no answer yet. `poll` is the ask that is held open, None between two asks."""

    ask: Ask
    since: float
    bound_at: float
    poll: int | None
    poll_ends_at: float
    place_kept_until: float

    @property
    def order(self) -> tuple[float, str]:
        """Its place in the queue: who asked first is served first."""
        return (self.since, self.ask.client)
