"""What holds for any order of faults and changes, tried by hypothesis."""

from __future__ import annotations

from typing import NamedTuple

from hypothesis import given, settings
from hypothesis import strategies as st
from support.buffers import Buffer

from rfork.binding import Slice
from rfork.clock import ManualClock
from rfork.seed.standing import Standing
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.read import ReadFailed, Window, read_all
from rfork.transports.toxic import ToxicTransport, Toxin

TOXINS = st.sampled_from([Toxin.NONE] * 8 + [Toxin.REFUSE, Toxin.FAIL, Toxin.STALL, Toxin.LATE, Toxin.DIE])


@settings(max_examples=200)
@given(st.lists(st.tuples(st.integers(1, 64), TOXINS), min_size=1, max_size=20), st.integers(1, 6), st.integers(1, 200))
def test_every_slice_has_landed_or_is_named_as_missing(
    plan: list[tuple[int, Toxin]], num_slices: int, nbytes: int
) -> None:
    fabric = MemoryFabric()
    toxic = ToxicTransport(MemoryTransport(fabric), lambda at: plan[at.number][1])
    total = sum(n for n, _ in plan)
    here, there = Buffer(total), Buffer(total).fill(7)
    seed, engine = MemoryTransport(fabric).open(), toxic.open()
    seed.register([there.region])
    engine.register([here.region])
    slices, at = [], 0
    for size, _ in plan:
        slices.append(Slice(here.address + at, there.address + at, size))
        at += size
    missing: tuple[Slice, ...] = ()
    try:
        read_all(
            engine,
            seed.session_id,
            slices,
            window=Window(num_slices, nbytes),
            progress_timeout_s=3,
            clock=ManualClock(),
        )
    except ReadFailed as error:
        missing = error.missing
    engine.close(1)
    assert toxic.wake() == 0
    assert len(set(missing)) == len(missing)
    assert bool(missing) == any(toxin is not Toxin.NONE for _, toxin in plan)
    for part in set(slices) - set(missing):
        start = part.local - here.address
        assert here.view[start : start + part.nbytes] == there.view[start : start + part.nbytes]


class Change(NamedTuple):
    alters: bool
    whole: bool
    unmaps: bool
    maps: bool
    failed: bool


CHANGES = st.builds(Change, *[st.booleans()] * 5)


@given(st.lists(st.one_of(CHANGES, st.just("other bytes")), max_size=12))
def test_doubtful_weights_are_published_only_after_what_removes_the_doubt(story: list[Change | str]) -> None:
    """Retold from the end: what was the last word on memory, on lost bytes, on half-done updates?"""
    standing = Standing()
    for step in story:
        if isinstance(step, Change):
            standing.changed(**step._asdict())
        else:
            standing.other_bytes()
    changes = [step for step in story if isinstance(step, Change)]
    mapping = [c for c in changes if not c.failed and (c.unmaps or c.maps)]
    is_unmapped = bool(mapping) and mapping[-1].unmaps
    last_loss = max((n for n, step in enumerate(story) if step == "other bytes"), default=-1)
    replaced = any(isinstance(s, Change) and s.alters and not s.failed for s in story[last_loss + 1 :])
    altering = [c for c in changes if c.alters]
    last_whole = max((n for n, c in enumerate(altering) if c.whole), default=-1)
    half_done = any(c.failed for c in altering[max(last_whole, 0) :])
    if is_unmapped or (last_loss >= 0 and not replaced) or (half_done and standing.altered):
        assert standing.against("x", failed=False) is not None
    else:
        assert standing.against("x", failed=False) is None
