"""What goes into the core besides protocol bodies, and what comes out of it. All of it is data."""

from __future__ import annotations

import msgspec

from rfork.wire.planner import Answer, Ask, Heartbeat, Report


class Withdraw(msgspec.Struct, frozen=True, tag="withdraw"):
    """The instance is gone for good."""

    instance_id: str
    reason: str = "withdrawn"


class Drain(msgspec.Struct, frozen=True, tag="drain"):
    """An operator wants the instance offered no more; it hears of it in its next heartbeat's reply."""

    instance_id: str


class Assigned(msgspec.Struct, frozen=True, tag="assigned"):
    """Another planner sent `client` to `seed`."""

    instance_key: str
    client: str
    seed: str


class Claimed(msgspec.Struct, frozen=True, tag="claimed"):
    """Another planner let `client` read the disk."""

    instance_key: str
    client: str


class ClaimLost(msgspec.Struct, frozen=True):
    """The store says that `holders` have the claims of which one was just given to `client`, each for so long yet."""

    instance_key: str
    client: str
    holders: dict[str, float]


class Hangup(msgspec.Struct, frozen=True):
    """The client no longer listens for the answer to its ask number `poll`."""

    client: str
    poll: int


class Parked(msgspec.Struct, frozen=True):
    """An ask as the core takes it: `poll` names the answer that somebody waits for."""

    ask: Ask
    poll: int


class Tick(msgspec.Struct, frozen=True):
    """Time has passed."""


class Seen(msgspec.Struct, frozen=True, tag="seen"):
    """A heartbeat, as planners tell each other."""

    heartbeat: Heartbeat


class Reported(msgspec.Struct, frozen=True, tag="reported"):
    """A report, as planners tell each other."""

    report: Report


class LegacyAdded(msgspec.Struct, frozen=True, tag="legacy_added"):
    """A legacy worker's heartbeat, as planners tell each other; likewise those below."""

    ip: str
    port: int
    rank: int
    key: str


class LegacyLeased(msgspec.Struct, frozen=True, tag="legacy_leased"):
    ip: str
    port: int
    rank: int
    user: str


class LegacyRenewed(msgspec.Struct, frozen=True, tag="legacy_renewed"):
    ip: str
    port: int
    rank: int
    user: str


class LegacyReleased(msgspec.Struct, frozen=True, tag="legacy_released"):
    ip: str
    port: int
    rank: int
    user: str


class LegacyRemoved(msgspec.Struct, frozen=True, tag="legacy_removed"):
    ip: str
    port: int
    rank: int


Legacy = LegacyAdded | LegacyLeased | LegacyRenewed | LegacyReleased | LegacyRemoved
Shared = Seen | Withdraw | Drain | Reported | Assigned | Claimed | Legacy
"""What planners tell each other."""

Event = Heartbeat | Withdraw | Drain | Report | Assigned | Claimed | ClaimLost | Hangup | Parked | Tick


class Deliver(msgspec.Struct, frozen=True):
    """Answer ask number `poll` of `client`."""

    client: str
    poll: int
    instance_key: str
    answer: Answer


class Share(msgspec.Struct, frozen=True):
    """Tell the other planners."""

    event: Assigned | Claimed


class ClaimOver(msgspec.Struct, frozen=True):
    """`client` no longer holds the claim of this key."""

    instance_key: str
    client: str


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Something happened that watchers, logs and metrics want to know."""

    kind: str
    instance: str = ""
    client: str = ""
    instance_key: str = ""
    text: str = ""


Effect = Deliver | Share | ClaimOver | Note
