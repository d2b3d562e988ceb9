"""Lifecycles as data: an enum of states, an enum of events, one table, and a machine that remembers its way.

How to make one::

    class Door(enum.Enum):
        OPEN = "open"
        SHUT = "shut"

    class Knock(enum.Enum):
        PUSH = "push"
        PULL = "pull"

    DOOR: Table[Door, Knock] = {
        Door.OPEN: {Knock.PUSH: Door.SHUT},
        Door.SHUT: {Knock.PULL: Door.OPEN},      # a terminal state is listed with {}
    }

    door = Machine("door front", DOOR, Door.SHUT)
    door.apply(Knock.PULL, now=clock.now(), note="postman")   # -> Door.OPEN
    door.state, door.is_terminal, door.story()

An event that the table does not list raises IllegalTransition and changes nothing. The machine takes no lock and reads
no clock: whoever owns it does both.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Mapping
from typing import Generic, NamedTuple, TypeVar

from rfork.errors import IllegalTransition

S = TypeVar("S", bound=enum.Enum)
E = TypeVar("E", bound=enum.Enum)
Table = Mapping[S, Mapping[E, S]]

MAX_HISTORY = 64
"""Steps that a machine remembers: enough for a post-mortem, bounded for a seed that lives for months."""


class Step(NamedTuple):
    """One accepted event: `at_s` is the clock reading that came with it."""

    at_s: float
    before: str
    event: str
    after: str
    note: str

    def __str__(self) -> str:
        text = f"{self.at_s:.3f} s {self.before} --{self.event}--> {self.after}"
        return f"{text} ({self.note})" if self.note else text


class Machine(Generic[S, E]):
    """The current state of one thing, and the bounded log of how it got there.

    Raises ValueError at birth where the table forgets a state, or has one that no event reaches.
    """

    def __init__(self, name: str, table: Table[S, E], initial: S) -> None:
        check_table(table, initial)
        self.name = name
        self._table = table
        self._state = initial
        self._history: deque[Step] = deque(maxlen=MAX_HISTORY)

    @property
    def state(self) -> S:
        return self._state

    @property
    def is_terminal(self) -> bool:
        """No event leads out of here."""
        return not self._table[self._state]

    @property
    def history(self) -> tuple[Step, ...]:
        """Latest accepted events, oldest first, at most MAX_HISTORY of them."""
        return tuple(self._history)

    def allows(self, event: E) -> bool:
        return event in self._table[self._state]

    def apply(self, event: E, *, now: float, note: str = "") -> S:
        """Take one event, return the new state. Raises IllegalTransition, changing nothing, where it does not fit."""
        after = self._table[self._state].get(event)
        if after is None:
            allowed = ", ".join(e.name for e in self._table[self._state]) or "nothing, it is final"
            raise IllegalTransition(
                f"{self.name}: {event.name} is not allowed in {self._state.name} (allowed: {allowed})\n{self.story()}"
            )
        self._history.append(Step(now, self._state.name, event.name, after.name, note))
        self._state = after
        return after

    def story(self) -> str:
        """The log, one step a line, for an error message."""
        return "\n".join(f"  {step}" for step in self._history) or f"  still in its first state, {self._state.name}"

    def __repr__(self) -> str:
        return f"<{self.name} {self._state.name} after {len(self._history)} events>"


def check_table(table: Table[S, E], initial: S) -> None:
    """Raise ValueError unless every state of the enum is listed and can be reached from `initial`."""
    missing = [s.name for s in type(initial) if s not in table]
    if missing:
        raise ValueError(f"the table lists no row for {', '.join(missing)}")
    reached, frontier = {initial}, [initial]
    while frontier:
        found = set(table[frontier.pop()].values()) - reached
        reached |= found
        frontier += found
    lost = [s.name for s in table if s not in reached]
    if lost:
        raise ValueError(f"no event leads from {initial.name} to {', '.join(lost)}")


def draw(table: Table[S, E]) -> str:
    """The table as a Mermaid state diagram, for the docs."""
    lines = ["stateDiagram-v2"]
    for state, row in table.items():
        lines += [f"    {state.name} --> {after.name}: {event.name.lower()}" for event, after in row.items()]
        if not row:
            lines.append(f"    {state.name} --> [*]")
    return "\n".join(lines)
