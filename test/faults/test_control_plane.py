"""Faults of the network between a client and a seed's listener, and of the seed behind it, in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest
from support.chaos import Stage
from support.leaks import nothing_left
from support.wire import Trouble, Wire

from rfork.client.lease import RELEASE_TIMEOUT_S
from rfork.clock import SystemClock
from rfork.transports.toxic import Moment, ToxicTransport, Toxin

STATUS, LEASE, LATER = 600, 3000, 6000
"""Bytes of answers after which the status, the lease and the manifest have surely begun."""
CALL_S = 1.5
"""For each question: the seed without a fault answers within it on a busy machine too."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with ExitStack() as stack:
        yield Stage(stack, num_seeds=2)


@pytest.fixture(autouse=True)
def nothing_is_left(stage: Stage) -> Iterator[None]:
    with nothing_left(stage.fabric):
        yield


@pytest.fixture
def wire(stage: Stage) -> Iterator[Wire]:
    port = urlsplit(stage.addresses[0]).port
    assert port is not None
    with Wire(port) as wire:
        yield wire


def through(wire: Wire, stage: Stage) -> None:
    """The first seed names the proxy as its listener's address, so that leases pass it too."""
    listener = stage.seeds[0].node._listener
    assert listener is not None
    listener.url = wire.url


@pytest.fixture(autouse=True)
def own_listener(stage: Stage) -> Iterator[None]:
    listener = stage.seeds[0].node._listener
    assert listener is not None
    own = listener.url
    yield
    listener.url = own


@pytest.mark.parametrize("after_nbytes", [0, 100, STATUS, LEASE, LATER])
@pytest.mark.parametrize("kind", [Trouble.REFUSE, Trouble.HOLE, Trouble.CUT, Trouble.RESET, Trouble.NOISE])
def test_an_answer_that_does_not_arrive(kind: Trouble, after_nbytes: int, wire: Wire, stage: Stage) -> None:
    """Bounded by the phase's own time-out, and the next seed has the weights."""
    through(wire, stage)
    wire.trouble(kind, after_nbytes)
    clock = SystemClock()
    addresses = [wire.url, stage.addresses[1]]
    ending = stage.load(addresses=addresses, clock=clock, seek_timeout_s=CALL_S, match_timeout_s=CALL_S)
    assert ending.source == "seed", ending
    assert ending.elapsed_s < 3 * CALL_S + RELEASE_TIMEOUT_S + 5
    stage.assert_right(ending)


@pytest.mark.parametrize("kind", [Trouble.REFUSE, Trouble.HOLE, Trouble.CUT, Trouble.RESET, Trouble.NOISE])
def test_the_only_seed_can_not_be_reached(kind: Trouble, wire: Wire, stage: Stage) -> None:
    through(wire, stage)
    wire.trouble(kind, 0)
    ending = stage.load(addresses=[wire.url], clock=SystemClock(), seek_timeout_s=0.5, match_timeout_s=0.5)
    assert (ending.source, ending.reason) == ("disk", "unreachable"), ending
    stage.assert_right(ending)


@pytest.mark.parametrize("after_nbytes", range(0, LATER, 397))
def test_a_wrong_bit_on_the_control_plane(after_nbytes: int, wire: Wire, stage: Stage) -> None:
    """An address, a size or a digest may be wrong then: another seed or the disk, never other weights."""
    through(wire, stage)
    wire.trouble(Trouble.FLIP, after_nbytes, seed=after_nbytes)
    ending = stage.load(addresses=[wire.url, stage.addresses[1]], seek_timeout_s=0.5, match_timeout_s=0.5)
    stage.assert_right(ending)


def test_a_seed_that_stops_granting_between_two_questions(stage: Stage) -> None:
    """It was serving when it was found, and is paused when it is asked for a lease."""
    with stage.agent.changing("an update", alters=False):
        stage.seeds[0].wait("paused")
        ending = stage.load()
        assert ending.report is not None
        assert ending.report.seed is not None
        assert ending.report.seed.instance_id == stage.seeds[1].node.instance_id
    stage.seeds[0].wait("serving")
    stage.assert_right(ending)


@pytest.mark.parametrize("number", [0, 1, 5, 10, 11])
def test_weights_that_change_while_they_are_read(number: int, stage: Stage) -> None:
    """The first seed takes an update at that read: the client has the old weights in the end, from the second."""
    done: list[int] = []

    def update(at: Moment) -> Toxin:
        if at.number == number and not done:
            done.append(number)
            with stage.agent.changing("a reload", alters=False):
                stage.models[0].layers[0].fill_(7)
                stage.models[0].layers[0].copy_(stage.models[1].layers[0])
        return Toxin.NONE

    ending = stage.load(ToxicTransport(stage.transport(), update))
    assert done
    assert ending.report is not None
    assert ending.report.seed is not None
    assert ending.report.seed.instance_id == stage.seeds[1].node.instance_id
    stage.seeds[0].wait("serving")
    stage.assert_right(ending)


def test_a_revoked_lease_ends_the_read(stage: Stage) -> None:
    """The node revokes at the first word of a change; what the fence has to say comes on top."""

    def change(at: Moment) -> Toxin:
        if at.number == 3 and at.engine == 0:
            with stage.agent.changing("a change", alters=False):
                pass
        return Toxin.NONE

    ending = stage.load(ToxicTransport(stage.transport(), change), addresses=stage.addresses[:1])
    stage.seeds[0].wait("serving")
    assert ending.source == "disk"
    assert ending.reason in ("fence", "stale_generation")
    stage.assert_right(ending)


def test_a_byte_that_is_wrong_in_the_seeds_memory(stage: Stage) -> None:
    """Published digests differ from what is read, twice: the other seed is taken."""
    weight = stage.models[0].layers[4]
    weight[200, 17] ^= 1
    try:
        ending = stage.load(addresses=stage.addresses[:1])
        other = stage.load()
    finally:
        weight[200, 17] ^= 1
    assert (ending.source, ending.reason) == ("disk", "digest_mismatch")
    assert "layers.4" in ending.detail
    assert other.source == "seed"
    stage.assert_right(other)
