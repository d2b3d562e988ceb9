"""Leases: who may read this node's shards, until when. Pure: `apply(event, now)` returns effects, touches nothing else.

Capacity counts *readers*, that is client instances: all ranks of one client are one reader, however many they are.
A lease ends by release, by expiry (a client that died gives its place back), or by revocation (the bytes changed).
Memory is bounded: `capacity` readers, `MAX_LEASES_EACH` for each shard they read, and `MAX_REMEMBERED` that ended.
"""

from __future__ import annotations

import enum
import secrets
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rfork.machine import Machine, Table

MAX_LEASES_EACH = 64
"""Leases of one reader on one shard: its plain data-parallel replicas read the same one. The oldest makes room."""

MAX_REMEMBERED = 256
"""Ended leases that are remembered, so that a late renewal learns why it has none."""


class LeaseState(enum.Enum):
    GRANTED = "granted"
    RELEASED = "released"
    EXPIRED = "expired"
    REVOKED = "revoked"


class LeaseEvent(enum.Enum):
    RENEW = "renew"
    RELEASE = "release"
    EXPIRE = "expire"
    REVOKE = "revoke"


LEASE: Table[LeaseState, LeaseEvent] = {
    LeaseState.GRANTED: {
        LeaseEvent.RENEW: LeaseState.GRANTED,
        LeaseEvent.RELEASE: LeaseState.RELEASED,
        LeaseEvent.EXPIRE: LeaseState.EXPIRED,
        LeaseEvent.REVOKE: LeaseState.REVOKED,
    },
    LeaseState.RELEASED: {},
    LeaseState.EXPIRED: {},
    LeaseState.REVOKED: {},
}


@dataclass(frozen=True)
class ShardRef:
    """One shard as one replica holds it. `key` is `RankIdentity.key`."""

    key: str
    replica: int


@dataclass(frozen=True)
class Grant:
    """A client's rank asks to read a shard."""

    client: str
    shard: ShardRef
    generation: int


@dataclass(frozen=True)
class Renew:
    lease: str


@dataclass(frozen=True)
class Release:
    lease: str


@dataclass(frozen=True)
class Revoke:
    """The bytes of these shards change or moved; None means all shards."""

    shards: frozenset[ShardRef] | None
    why: str


@dataclass(frozen=True)
class Tick:
    """Time has passed."""


Event = Grant | Renew | Release | Revoke | Tick


@dataclass(frozen=True)
class Lease:
    id: str
    client: str
    shard: ShardRef
    generation: int
    expires_at: float


@dataclass(frozen=True)
class Granted:
    lease: Lease


@dataclass(frozen=True)
class Renewed:
    lease: Lease


@dataclass(frozen=True)
class Ended:
    lease: Lease
    state: LeaseState
    why: str


@dataclass(frozen=True)
class Busy:
    """Every place is taken; the first may be free in `retry_after_s`."""

    readers: int
    retry_after_s: float


@dataclass(frozen=True)
class Unknown:
    """No such lease. `state` and `why` tell how it ended, where that is remembered."""

    lease: str
    state: LeaseState | None
    why: str


Effect = Granted | Renewed | Ended | Busy | Unknown


def _random_id() -> str:
    # Unguessable: who knows a lease's id may read the manifest's addresses with it.
    return "l-" + secrets.token_hex(16)


class LeaseBook:
    """All leases of one node. Not thread-safe: its owner holds a lock."""

    def __init__(self, capacity: int, ttl_s: float, *, new_id: Callable[[], str] = _random_id) -> None:
        if capacity < 1 or ttl_s <= 0:
            raise ValueError(f"capacity and TTL must be positive, got {capacity} and {ttl_s}")
        self.capacity = capacity
        self.ttl_s = ttl_s
        self._new_id = new_id
        self._live: dict[str, Lease] = {}
        self._machines: dict[str, Machine[LeaseState, LeaseEvent]] = {}
        self._ended: OrderedDict[str, Ended] = OrderedDict()
        self._held: dict[tuple[str, ShardRef], list[str]] = {}
        self._readers: Counter[str] = Counter()

    @property
    def num_readers(self) -> int:
        return len(self._readers)

    @property
    def readers(self) -> tuple[str, ...]:
        """Clients with a live lease, by name."""
        return tuple(sorted(self._readers))

    @property
    def live(self) -> tuple[Lease, ...]:
        return tuple(self._live.values())

    def num_leases(self, shard: ShardRef) -> int:
        return sum(lease.shard == shard for lease in self._live.values())

    def find(self, lease_id: str) -> Lease | Unknown:
        """A live lease, as of the last event."""
        return self._live.get(lease_id) or self._unknown(lease_id)

    def apply(self, event: Event, now: float) -> list[Effect]:
        """Leases past their time end first, whatever the event."""
        effects: list[Effect] = [
            self._end(lease, LeaseEvent.EXPIRE, now, f"not renewed within {self.ttl_s:g} s")
            for lease in [x for x in self._live.values() if x.expires_at <= now]
        ]
        match event:
            case Grant():
                effects += self._grant(event, now)
            case Renew(lease=lease_id):
                effects.append(self._renew(lease_id, now))
            case Release(lease=lease_id):
                found = self._live.get(lease_id)
                ended = self._end(found, LeaseEvent.RELEASE, now, "released by its client") if found else None
                effects.append(ended or self._unknown(lease_id))
            case Revoke(shards=shards, why=why):
                hit = [x for x in self._live.values() if shards is None or x.shard in shards]
                effects += [self._end(lease, LeaseEvent.REVOKE, now, why) for lease in hit]
            case Tick():
                pass
        return effects

    def _grant(self, event: Grant, now: float) -> Iterable[Effect]:
        effects: list[Effect] = []
        held = self._held.get((event.client, event.shard), [])
        if len(held) >= MAX_LEASES_EACH:
            effects.append(self._end(self._live[held[0]], LeaseEvent.RELEASE, now, "its client took many more"))
        if event.client not in self._readers and len(self._readers) >= self.capacity:
            soonest = min(x.expires_at for x in self._live.values()) - now
            return [*effects, Busy(len(self._readers), max(min(soonest, self.ttl_s), 0.1))]
        lease = Lease(self._new_id(), event.client, event.shard, event.generation, now + self.ttl_s)
        self._live[lease.id] = lease
        self._machines[lease.id] = Machine(f"lease {lease.id}", LEASE, LeaseState.GRANTED)
        self._held.setdefault((event.client, event.shard), []).append(lease.id)
        self._readers[event.client] += 1
        return [*effects, Granted(lease)]

    def _renew(self, lease_id: str, now: float) -> Effect:
        lease = self._live.get(lease_id)
        if lease is None:
            return self._unknown(lease_id)
        self._machines[lease_id].apply(LeaseEvent.RENEW, now=now)
        renewed = Lease(lease.id, lease.client, lease.shard, lease.generation, now + self.ttl_s)
        self._live[lease_id] = renewed
        return Renewed(renewed)

    def _end(self, lease: Lease, event: LeaseEvent, now: float, why: str) -> Ended:
        state = self._machines.pop(lease.id).apply(event, now=now, note=why)
        del self._live[lease.id]
        held = self._held[lease.client, lease.shard]
        held.remove(lease.id)
        if not held:
            del self._held[lease.client, lease.shard]
        self._readers[lease.client] -= 1
        if not self._readers[lease.client]:
            del self._readers[lease.client]
        ended = Ended(lease, state, why)
        self._ended[lease.id] = ended
        while len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        return ended

    def _unknown(self, lease_id: str) -> Unknown:
        ended = self._ended.get(lease_id)
        if ended is None:
            return Unknown(lease_id, None, "never granted here, or long ago")
        return Unknown(lease_id, ended.state, ended.why)

    def check(self) -> None:
        """Raise AssertionError unless the book is consistent; tests call it after every event."""
        assert self.num_readers <= self.capacity, f"{self.num_readers} readers, capacity {self.capacity}"
        assert self._readers == Counter(x.client for x in self._live.values())
        assert sorted(i for ids in self._held.values() for i in ids) == sorted(self._live)
        assert all(0 < len(ids) <= MAX_LEASES_EACH for ids in self._held.values())
        assert self._machines.keys() == self._live.keys()
        assert not self._ended.keys() & self._live.keys()
        assert len(self._ended) <= MAX_REMEMBERED

    def __repr__(self) -> str:
        return f"<LeaseBook readers={self.num_readers}/{self.capacity} leases={len(self._live)}>"
