"""Time as an argument: whoever waits or compares times is handed a Clock."""

from __future__ import annotations

import threading
import time
from typing import Protocol


class Clock(Protocol):
    """`now` never goes backwards and means nothing elsewhere; `unix_s` is for people and expiry stamps only."""

    def now(self) -> float: ...

    def unix_s(self) -> float: ...

    def sleep(self, duration_s: float) -> None: ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Wait for `event` at most `timeout_s`; True if it is set."""
        ...


class SystemClock:
    """The machine's own clock."""

    def now(self) -> float:
        return time.monotonic()

    def unix_s(self) -> float:
        return time.time()

    def sleep(self, duration_s: float) -> None:
        time.sleep(max(duration_s, 0.0))

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        return event.wait(max(timeout_s, 0.0))


class ManualClock:
    """A clock that tests move. Sleeping moves it too, so nothing that takes a clock really waits."""

    def __init__(self, start: float = 1_000.0, unix_start: float = 1_700_000_000.0) -> None:
        self._now = start
        self._offset = unix_start - start

    def now(self) -> float:
        return self._now

    def unix_s(self) -> float:
        return self._now + self._offset

    def advance(self, duration_s: float) -> float:
        """Move on by `duration_s` and return the new time."""
        if duration_s < 0:
            raise ValueError(f"time does not run backwards, got {duration_s} s")
        self._now += duration_s
        return self._now

    def sleep(self, duration_s: float) -> None:
        self.advance(max(duration_s, 0.0))

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        if not event.is_set():
            self.advance(max(timeout_s, 0.0))
        return event.is_set()
