"""Reading many slices: a window of them in flight, bounded by progress and never by total size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import msgspec

from rfork.binding import Slice
from rfork.clock import Clock
from rfork.errors import SeedLost
from rfork.transports.base import Engine, Transfer, TransferState

_SHORTEST_NAP_S = 50e-6
_LONGEST_NAP_S = 2e-3
_STRAGGLER_FACTOR = 4


class ReadFailed(SeedLost):
    """A slice failed or nothing ended in time. The engine must be destroyed before this memory is touched again.

    `part` is the slice that gave up, `missing` every slice that had not ended (`part` among them).
    """

    def __init__(
        self, message: str, *, part: Slice, missing: Sequence[Slice], done_nbytes: int, elapsed_s: float
    ) -> None:
        super().__init__(message)
        self.part = part
        self.missing = tuple(missing)
        self.done_nbytes = done_nbytes
        self.elapsed_s = elapsed_s


class Window(msgspec.Struct, frozen=True):
    """How much is in flight at once: at most `num_slices` reads and, beyond the first, at most `nbytes` bytes.

    `longest_nap_s`: the longest sleep between two looks at what flies.
    """

    num_slices: int
    nbytes: int
    longest_nap_s: float = _LONGEST_NAP_S

    def __post_init__(self) -> None:
        if self.num_slices < 1 or self.nbytes < 1:
            raise ValueError(f"a window holds at least one slice of one byte, got {self.num_slices} and {self.nbytes}")


class _InFlight(NamedTuple):
    number: int
    part: Slice
    transfer: Transfer
    since_s: float


def read_all(
    engine: Engine,
    peer: str,
    slices: Sequence[Slice],
    *,
    window: Window,
    progress_timeout_s: float,
    clock: Clock,
    on_bytes: Callable[[int], None] | None = None,
    on_landed: Callable[[int], None] | None = None,
    limit_gbps: float | None = None,
) -> int:
    """Read every slice from `peer`; return the bytes moved.

    `on_bytes` gets the size of each slice as it ends, `on_landed` how many of the first slices have all ended, whenever
    that has grown; what they raise ends the read like a failure. `limit_gbps` holds slices back so that the average
    stays below it.

    Raises ReadFailed as soon as a slice fails, when none has ended for `progress_timeout_s`, or when one has been in
    flight for four times that while others ended. The engine is then of no use any more, and only destroying it makes
    the local memory quiet.
    """
    todo, flying = deque(slices), deque[_InFlight]()
    start_s = last_end_s = clock.now()
    done_nbytes = flying_nbytes = 0
    submitted_nbytes = landed = told = 0
    nap = _Nap(window.longest_nap_s)

    def may_submit() -> bool:
        if not todo or (limit_gbps is not None and submitted_nbytes > limit_gbps * 1e9 * (clock.now() - start_s)):
            return False
        return not flying or (len(flying) < window.num_slices and flying_nbytes + todo[0].nbytes <= window.nbytes)

    def failed(part: Slice, what: str) -> ReadFailed:
        elapsed_s = clock.now() - start_s
        total = sum(s.nbytes for s in slices)
        return ReadFailed(
            f"reading {part.nbytes} bytes at {part.remote:#x} from {peer} over {engine.protocol} {what}, "
            f"after {done_nbytes} of {total} bytes in {elapsed_s:.1f} s",
            part=part,
            missing=[part, *(f.part for f in flying if f.part is not part), *todo],
            done_nbytes=done_nbytes,
            elapsed_s=elapsed_s,
        )

    while todo or flying:
        while may_submit():
            part = todo.popleft()
            try:
                number = len(slices) - len(todo) - 1
                flying.append(_InFlight(number, part, engine.submit(peer, part), clock.now()))
            except SeedLost as error:
                raise failed(part, f"could not start: {error}") from error
            flying_nbytes += part.nbytes
            submitted_nbytes += part.nbytes
        if on_landed is not None and landed > told and flying:
            told = landed
            on_landed(told)  # with the window full again
        ended_nbytes = 0
        for _ in range(len(flying)):
            item = flying.popleft()
            state = item.transfer.poll()
            if state is TransferState.RUNNING:
                flying.append(item)
                continue
            if state is TransferState.FAILED:
                raise failed(item.part, "failed")
            ended_nbytes += item.part.nbytes
            done_nbytes += item.part.nbytes
            if on_bytes is not None:
                on_bytes(item.part.nbytes)
        now = clock.now()
        if ended_nbytes:
            flying_nbytes -= ended_nbytes
            nap.ended(now - last_end_s)
            last_end_s = now
            landed = flying[0].number if flying else len(slices) - len(todo)
        else:
            if not flying:
                last_end_s = now
            elif now - last_end_s > progress_timeout_s:
                raise failed(flying[0].part, f"made no progress for {progress_timeout_s:g} s")
            clock.sleep(nap.next_s())
        if flying and now - flying[0].since_s > _STRAGGLER_FACTOR * progress_timeout_s:
            raise failed(flying[0].part, f"did not end within {_STRAGGLER_FACTOR * progress_timeout_s:g} s")
    if on_landed is not None and slices:
        on_landed(len(slices))
    return done_nbytes


class _Nap:
    """How long to sleep between polls: a small part of the usual time between two ends, which a full window hides."""

    def __init__(self, longest_s: float) -> None:
        self._longest_s = longest_s
        self._usual_s = 0.0

    def ended(self, since_last_s: float) -> None:
        self._usual_s = since_last_s if not self._usual_s else 0.7 * self._usual_s + 0.3 * since_last_s

    def next_s(self) -> float:
        return min(max(self._usual_s / 8, _SHORTEST_NAP_S), self._longest_s)
