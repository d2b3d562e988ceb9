"""Random faults: one number decides everything about a case, so that a failed one can be played again."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from rfork.clock import SystemClock
from rfork.transports.toxic import Moment, ToxicTransport, Toxin
from support.chaos import Ending, Stage
from support.wire import Trouble, Wire

NUM_READS = 14
"""A pull takes 12 reads, and some more where it reads a chunk again."""
ANSWER_NBYTES = 9000
"""Status, lease, manifest and digests together."""

TOXINS = (*(t for t in Toxin if t is not Toxin.NONE), Toxin.NONE)
QUICK = (Trouble.CUT, Trouble.RESET, Trouble.NOISE, Trouble.FLIP, Trouble.REFUSE)


@dataclass
class Case:
    """What goes wrong. `toxins` are keyed by (engine, read); `changes` are reads at which the first seed reloads."""

    number: int
    toxins: dict[tuple[int, int], Toxin] = field(default_factory=dict)
    lasting: Toxin | None = None
    changes: frozenset[int] = frozenset()
    trouble: Trouble = Trouble.NONE
    after_nbytes: int = 0
    wrong_byte: bool = False
    noisy: bool = False
    num_seeds: int = 2

    @classmethod
    def roll(cls, number: int) -> Case:
        dice = random.Random(number)
        case = cls(number, num_seeds=dice.choice((1, 2, 2)))
        for _ in range(dice.choice((0, 1, 1, 2, 4))):
            case.toxins[dice.randrange(3), dice.randrange(NUM_READS)] = dice.choice(TOXINS)
        if dice.random() < 0.1:
            case.lasting = dice.choice((Toxin.FLIP, Toxin.LIE, Toxin.TRUNCATE))
        if dice.random() < 0.15:
            case.changes = frozenset(dice.sample(range(NUM_READS), dice.randrange(1, 4)))
        if dice.random() < 0.4 or not (case.toxins or case.lasting or case.changes):
            case.trouble = Trouble.HOLE if dice.random() < 0.02 else dice.choice(QUICK)
            case.after_nbytes = dice.randrange(ANSWER_NBYTES)
        case.wrong_byte = dice.random() < 0.1
        case.noisy = dice.random() < 0.03
        return case

    @property
    def num_faults(self) -> int:
        others = (self.lasting is not None, self.trouble is not Trouble.NONE, self.wrong_byte, self.noisy)
        return sum(t is not Toxin.NONE for t in self.toxins.values()) + len(self.changes) + sum(others)


class Table:
    """Where cases are played: two seeds, the first behind a bad network. `tally` counts how starts ended."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.stage = Stage(stack, num_seeds=2)
        port = urlsplit(self.stage.addresses[0]).port
        assert port is not None
        self.wire = stack.enter_context(Wire(port))
        listener = self.stage.seeds[0].node._listener
        assert listener is not None
        listener.url = self.wire.url
        self.tally: Counter[str] = Counter()
        self.num_faults = 0

    def play(self, number: int) -> Ending:
        """One start under the faults of a case. Raises AssertionError, which names the case, where it ends wrong."""
        case, stage = Case.roll(number), self.stage
        stage.seeds[0].wait("serving")
        transport = ToxicTransport(stage.transport(), lambda at: self._poison(case, at), noisy=case.noisy)
        addresses = [self.wire.url, stage.addresses[1]][: case.num_seeds]
        clock = SystemClock() if case.trouble is Trouble.HOLE else None
        self.wire.trouble(case.trouble, case.after_nbytes, seed=number)
        try:
            with self._wrong_byte(case):
                ending = stage.load(transport, addresses=addresses, clock=clock, match_timeout_s=0.5)
            assert transport.wake() == 0, "a late read has written"
            assert ending.elapsed_s < 400, ending
            if ending.source == "exit":
                assert case.noisy, ending
            else:
                stage.assert_right(ending)
        except Exception as error:
            raise AssertionError(f"case {number} ({case}): {type(error).__name__}: {error}") from error
        finally:
            self.wire.trouble(Trouble.NONE)
        self.tally[f"{ending.source} {ending.reason}".strip()] += 1
        self.num_faults += case.num_faults
        return ending

    def _poison(self, case: Case, at: Moment) -> Toxin:
        if at.number in case.changes and at.engine == 0:
            self._reload()
        toxin = case.toxins.get((at.engine, at.number), Toxin.NONE)
        if toxin is Toxin.NONE and case.lasting and at.number > 0 and at.part.nbytes != 4096:
            return case.lasting
        return toxin

    def _reload(self) -> None:
        """Other bytes for a while, and the fence has moved when the old ones are back."""
        weight = self.stage.models[0].layers[5]
        kept = weight.clone()
        with self.stage.agent.changing("a reload", alters=False):
            weight.fill_(0xAA)
            weight.copy_(kept)

    @contextlib.contextmanager
    def _wrong_byte(self, case: Case) -> Iterator[None]:
        if not case.wrong_byte:
            yield
            return
        dice = random.Random(case.number + 1)
        layers = self.stage.models[0].layers
        weight = layers[dice.randrange(len(layers))].view(-1)
        at, bit = dice.randrange(weight.numel()), 1 << dice.randrange(8)
        # A reload compares digests with those of the publication, and would rightly end the seed.
        object.__setattr__(case, "changes", frozenset())
        weight[at] ^= bit
        try:
            yield
        finally:
            weight[at] ^= bit
