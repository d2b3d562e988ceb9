"""What every one-sided transport does: one suite for the reference and for the real thing."""

from __future__ import annotations

import pytest
from support.buffers import Buffer, slices_of

from rfork.binding import Region, Slice
from rfork.clock import SystemClock
from rfork.errors import SeedLost, TransportError
from rfork.transports.base import Engine, Transfer, TransferState
from rfork.transports.read import ReadFailed, Window, read_all

from .conftest import Opener

CLOCK = SystemClock()
WINDOW = Window(num_slices=4, nbytes=1 << 20)


def connected(open_engine: Opener, nbytes: int) -> tuple[Engine, Buffer, Engine, Buffer]:
    """A seed with filled memory and a client with empty memory of the same size, both registered."""
    seed, client = open_engine(), open_engine()
    source, target = Buffer(nbytes).fill(), Buffer(nbytes)
    seed.register([source.region])
    client.register([target.region])
    return seed, source, client, target


def wait(transfer: Transfer) -> TransferState:
    deadline = CLOCK.now() + 10
    while (state := transfer.poll()) is TransferState.RUNNING:
        assert CLOCK.now() < deadline, "a read of the same host takes no ten seconds"
        CLOCK.sleep(0.001)
    return state


@pytest.mark.parametrize("nbytes", [1, 4095, 65_537, 8 << 20])
@pytest.mark.parametrize("slice_nbytes", [1 << 16, 1 << 30])
def test_bytes_arrive_equal(open_engine: Opener, nbytes: int, slice_nbytes: int) -> None:
    seed, source, client, target = connected(open_engine, nbytes)
    moved: list[int] = []
    slices = slices_of(target, source.address, slice_nbytes)
    done = read_all(
        client, seed.session_id, slices, window=WINDOW, progress_timeout_s=10, clock=CLOCK, on_bytes=moved.append
    )
    assert done == sum(moved) == nbytes
    assert target == source


def test_a_reader_hears_how_far_everything_has_landed(open_engine: Opener) -> None:
    """What lies before the mark is there, byte for byte, while later slices still fly."""
    seed, source, client, target = connected(open_engine, 1 << 20)
    slices = slices_of(target, source.address, 1 << 16)
    marks: list[int] = []

    def landed(count: int) -> None:
        marks.append(count)
        assert target.view[: count << 16] == source.view[: count << 16]

    read_all(client, seed.session_id, slices, window=WINDOW, progress_timeout_s=10, clock=CLOCK, on_landed=landed)
    assert marks == sorted(set(marks))
    assert marks[-1] == len(slices) == 16


def test_an_unregistered_remote_range_fails_at_once(open_engine: Opener) -> None:
    seed, _, client, target = connected(open_engine, 4096)
    elsewhere = Buffer(4096).fill()
    before = CLOCK.now()
    with pytest.raises(ReadFailed, match=r"failed, after 0 of 4096 bytes"):
        read_all(
            client,
            seed.session_id,
            slices_of(target, elsewhere.address, 4096),
            window=WINDOW,
            progress_timeout_s=10,
            clock=CLOCK,
        )
    assert CLOCK.now() - before < 5
    assert target.num_nonzero_tail(0) == 0


def test_a_failed_read_says_which_slices_are_missing(open_engine: Opener) -> None:
    """The next seed is asked for these only, where its digests are the same."""
    seed, source, client, target = connected(open_engine, 4 * 4096)
    slices = slices_of(target, source.address, 4096)
    slices[2] = Slice(slices[2].local, Buffer(4096).address, 4096)
    with pytest.raises(ReadFailed) as caught:
        read_all(client, seed.session_id, slices, window=Window(1, 1), progress_timeout_s=10, clock=CLOCK)
    assert caught.value.part == slices[2]
    assert caught.value.missing == (slices[2], slices[3])
    assert caught.value.done_nbytes == 2 * 4096


def test_a_closed_peer_fails(open_engine: Opener) -> None:
    seed, source, client, target = connected(open_engine, 4096)
    assert wait(client.submit(seed.session_id, Slice(target.address, source.address, 4096))) is TransferState.DONE
    seed.close(10)
    with pytest.raises(SeedLost):
        read_all(
            client,
            seed.session_id,
            slices_of(target, source.address, 4096),
            window=WINDOW,
            progress_timeout_s=10,
            clock=CLOCK,
        )


def test_nobody_at_the_address_is_a_lost_seed(open_engine: Opener) -> None:
    client, target = open_engine(), Buffer(4096)
    client.register([target.region])
    with pytest.raises(SeedLost):
        client.submit("127.0.0.1:1", Slice(target.address, 4096, 4096))


def test_nothing_empty_is_submitted(open_engine: Opener) -> None:
    """Some fabrics abort the process on it (P09)."""
    seed, source, client, target = connected(open_engine, 4096)
    with pytest.raises(ValueError, match="0 bytes"):
        client.submit(seed.session_id, Slice(target.address, source.address, 0))


def test_an_ended_transfer_is_never_polled_again(open_engine: Opener) -> None:
    """Mooncake has freed it by then, and would crash."""
    seed, source, client, target = connected(open_engine, 4096)
    transfer = client.submit(seed.session_id, Slice(target.address, source.address, 4096))
    assert wait(transfer) is TransferState.DONE
    with pytest.raises(RuntimeError, match="again"):
        transfer.poll()


def test_overlapping_registrations_are_refused(open_engine: Opener) -> None:
    engine, buffer = open_engine(), Buffer(3 * 4096)
    engine.register([Region(buffer.address, 2 * 4096)])
    with pytest.raises(TransportError, match="overlap"):
        engine.register([Region(buffer.address + 4096, 2 * 4096)])


def test_touching_registrations_are_not_overlapping(open_engine: Opener) -> None:
    engine, buffer = open_engine(), Buffer(2 * 4096)
    engine.register([Region(buffer.address, 4096), Region(buffer.address + 4096, 4096)])
    engine.unregister([Region(buffer.address, 4096)])
    engine.register([Region(buffer.address, 4096)])


def test_a_closed_engine_does_nothing_any_more(open_engine: Opener) -> None:
    seed, source, client, target = connected(open_engine, 4096)
    client.close(10)
    client.close(10)
    with pytest.raises(TransportError, match="closed"):
        client.submit(seed.session_id, Slice(target.address, source.address, 4096))
    with pytest.raises(TransportError, match="closed"):
        client.register([target.region])


def test_a_read_limit_is_kept(open_engine: Opener) -> None:
    seed, source, client, target = connected(open_engine, 4 << 20)
    before = CLOCK.now()
    read_all(
        client,
        seed.session_id,
        slices_of(target, source.address, 1 << 18),
        window=WINDOW,
        progress_timeout_s=10,
        clock=CLOCK,
        limit_gbps=0.02,
    )
    assert target == source
    assert 0.15 < CLOCK.now() - before < 5, "4 MiB at 20 MB/s take 0.2 s"
