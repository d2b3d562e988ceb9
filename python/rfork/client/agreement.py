"""One outcome for all ranks of an instance (I7), over a shared key-value board with explicit time-outs.

No collective runs here: a rank that died or hangs makes the others time out and say who is missing, never hang with it.
"""

from __future__ import annotations

import time
from typing import Protocol

import msgspec

from rfork.errors import RForkError


class AgreementLost(RForkError):
    """A rank did not answer in time, so nobody knows what it loaded. Consequence: the process exits with this
    reason.
    """

    reason = "agreement"


class Board(Protocol):
    """A key-value store that all ranks of one WORLD see. Keys are written once."""

    def set(self, key: str, value: bytes) -> None: ...

    def get(self, key: str, timeout_s: float) -> bytes:
        """The value of `key`; raises TimeoutError if nobody has set it within `timeout_s`."""


class Vote(msgspec.Struct, frozen=True):
    """What one rank found: `why` explains a no, `fact` must be equal on all ranks (a generation, say).

    `reason` is the stable word for it; `stop` with a no says that no other seed could help either.
    """

    ok: bool
    why: str = ""
    fact: str = ""
    stop: bool = False
    reason: str = ""


class Agreement:
    """Agreement of `num_ranks` ranks about one load. With one rank nothing is written or awaited."""

    def __init__(self, board: Board | None, *, rank: int, num_ranks: int, name: str, timeout_s: float) -> None:
        if num_ranks > 1 and board is None:
            raise ValueError("several ranks need a board to agree on")
        self._board, self._name = board, name
        self.rank, self.num_ranks, self.timeout_s = rank, num_ranks, timeout_s

    @property
    def is_leader(self) -> bool:
        return self.rank == 0

    def from_leader(self, step: str, value: bytes | None, *, extra_s: float = 0.0) -> bytes:
        """Rank 0 passes its value, the others None; all return rank 0's.

        `extra_s` is what rank 0 may take to find its value, beyond the time-out. Raises AgreementLost after both.
        """
        if self.is_leader:
            assert value is not None, "the leader must bring the value"
            if self._board is not None and self.num_ranks > 1:
                self._board.set(f"{self._name}/{step}", value)
            return value
        assert self._board is not None
        try:
            return self._board.get(f"{self._name}/{step}", self.timeout_s + extra_s)
        except TimeoutError as error:
            raise AgreementLost(f"rank 0 did not say '{step}' within {self.timeout_s + extra_s:.0f} s") from error

    def vote(self, step: str, mine: Vote, *, extra_s: float = 0.0) -> Vote:
        """Everybody's verdict: ok only if all are ok and all facts are equal; `why` names the first rank that objects.

        `extra_s` is what another rank may still need before it votes, beyond the time-out. Raises AgreementLost if a
        vote is missing after both, which count for all ranks together.
        """
        if self.num_ranks == 1:
            return mine
        assert self._board is not None
        self._board.set(f"{self._name}/{step}/{self.rank}", msgspec.msgpack.encode(mine))
        deadline = time.monotonic() + self.timeout_s + extra_s
        votes = [mine if r == self.rank else self._vote_of(step, r, deadline) for r in range(self.num_ranks)]
        for rank, vote in enumerate(votes):
            if not vote.ok:
                why = vote.why if rank == self.rank else f"rank {rank}: {vote.why}"
                return Vote(False, why, stop=any(v.stop for v in votes), reason=vote.reason)
        facts = {v.fact for v in votes}
        if len(facts) > 1:
            return Vote(False, f"ranks disagree on {step}: {', '.join(sorted(facts))}")
        return mine

    def _vote_of(self, step: str, rank: int, deadline: float) -> Vote:
        assert self._board is not None
        try:
            data = self._board.get(f"{self._name}/{step}/{rank}", max(0.1, deadline - time.monotonic()))
        except TimeoutError as error:
            raise AgreementLost(f"rank {rank} did not vote on '{step}' in time") from error
        return msgspec.msgpack.decode(data, type=Vote)
