"""A transport that misbehaves on purpose: real bytes over another one, and whatever a `Poison` does to them.

For tests and drills. What it does are the ways in which transfers have gone wrong in the field: they fail, report
success without moving a byte, flip one, end early, hang, end after everybody has given up, and die in the middle.
"""

from __future__ import annotations

import ctypes
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from rfork.binding import Region, Slice
from rfork.errors import NotQuiet, SeedLost
from rfork.transports.base import Engine, Transfer, TransferState, Transport


class Toxin(enum.Enum):
    """What happens to one read. `submit` raises for REFUSE; all others show when it is polled."""

    NONE = "none"
    REFUSE = "refuse"
    FAIL = "fail"
    LIE = "lie"  # done, and nothing moved
    FLIP = "flip"  # done, with one bit wrong
    TRUNCATE = "truncate"  # done, with the first half moved
    STALL = "stall"  # never ends
    LATE = "late"  # never ends for who waits; its bytes land at `wake()`
    DIE = "die"  # half of it moves, it fails, and so does every later one from that peer


class Moment(NamedTuple):
    """The read that is about to start: the `number`-th of its engine, which is the transport's `engine`-th."""

    engine: int
    number: int
    peer: str
    part: Slice


Poison = Callable[[Moment], Toxin]


class ToxicTransport:
    """Reads of `inner`, poisoned. With `noisy` engines their destruction can't be proven: they are closed, and `close`
    raises.
    """

    def __init__(self, inner: Transport, poison: Poison, *, noisy: bool = False) -> None:
        self._inner, self._poison, self._noisy = inner, poison, noisy
        self.protocol, self.scope = inner.protocol, inner.scope
        self.num_engines = 0
        self.num_reads = 0
        self._late: list[Transfer] = []
        self._dead: set[str] = set()

    def open(self) -> Engine:
        self.num_engines += 1
        return ToxicEngine(self._inner.open(), self, self.num_engines - 1, noisy=self._noisy)

    def choose(self, moment: Moment) -> Toxin:
        """What happens to a read. Death is for good."""
        self.num_reads += 1
        toxin = Toxin.FAIL if moment.peer in self._dead else self._poison(moment)
        if toxin is Toxin.DIE:
            self._dead.add(moment.peer)
        return toxin

    def keep(self, transfer: Transfer) -> None:
        self._late.append(transfer)

    def wake(self) -> int:
        """Let every late read go on, as a peer does that was frozen; return how many wrote.

        A read whose engine was destroyed writes nothing.
        """
        late, self._late = self._late, []
        return sum(transfer.poll() is TransferState.DONE for transfer in late)


class ToxicEngine:
    def __init__(self, inner: Engine, transport: ToxicTransport, engine: int, *, noisy: bool) -> None:
        self._inner, self._transport, self._engine, self._noisy = inner, transport, engine, noisy
        self._num_reads = 0
        self.protocol, self.session_id = inner.protocol, inner.session_id

    def register(self, regions: Sequence[Region]) -> None:
        self._inner.register(regions)

    def unregister(self, regions: Sequence[Region]) -> None:
        self._inner.unregister(regions)

    def submit(self, peer: str, part: Slice) -> Transfer:
        number, self._num_reads = self._num_reads, self._num_reads + 1
        toxin = self._transport.choose(Moment(self._engine, number, peer, part))
        if toxin is Toxin.REFUSE:
            raise SeedLost(f"nobody answers at {peer}")
        half = part._replace(nbytes=part.nbytes // 2)
        if toxin in (Toxin.TRUNCATE, Toxin.DIE) and not half.nbytes:
            toxin = Toxin.LIE if toxin is Toxin.TRUNCATE else Toxin.FAIL
        moved = half if toxin in (Toxin.TRUNCATE, Toxin.DIE) else part
        transfer = self._inner.submit(peer, moved)
        if toxin is Toxin.LATE:
            self._transport.keep(transfer)
        return ToxicTransfer(transfer, part, toxin, number)

    def close(self, timeout_s: float) -> None:
        self._inner.close(timeout_s)
        if self._noisy:
            raise NotQuiet(f"{self.session_id} may still write, for all that anybody knows")


class ToxicTransfer:
    def __init__(self, inner: Transfer, part: Slice, toxin: Toxin, number: int) -> None:
        self._inner, self._part, self._toxin, self._number = inner, part, toxin, number

    def poll(self) -> TransferState:
        match self._toxin:
            case Toxin.FAIL:
                return TransferState.FAILED
            case Toxin.LIE:
                return TransferState.DONE
            case Toxin.STALL | Toxin.LATE:
                return TransferState.RUNNING
            case Toxin.DIE:
                self._inner.poll()
                return TransferState.FAILED
        state = self._inner.poll()
        if self._toxin is Toxin.FLIP and state is TransferState.DONE:
            at = self._number * 7919 % self._part.nbytes
            ctypes.c_uint8.from_address(self._part.local + at).value ^= 1 << self._number % 8
        return state
