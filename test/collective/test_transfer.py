"""Seed and client in one process, over real gloo groups: what arrives, what is refused, what a failure leaves."""

import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import msgspec
import pytest
import torch
from support.groups import LIMITS, SETTINGS, AtShare, GroupSeed, many, receive
from support.seed_node import until
from support.seed_rank import BufferShard

from rfork.client.sources import signer_of
from rfork.config import Config
from rfork.errors import (
    DigestMismatch,
    FenceBroken,
    ManifestMismatch,
    NotQuiet,
    SeedError,
    SeedLost,
    SeedRefused,
    SeedUnreachable,
)
from rfork.transports.collective import SEED, Group
from rfork.transports.frames import PACES
from rfork.wire.collective import INIT_PATH

KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def seed(stack: ExitStack) -> GroupSeed:
    return GroupSeed(stack, many()).serve()


def quiet(seed: GroupSeed) -> None:
    until(lambda: seed.broadcasts.num_groups == 0)


def test_a_client_gets_every_byte_and_says_how(seed: GroupSeed) -> None:
    """The report names the backend, the bytes, and that they were verified."""
    target = seed.target()
    with seed.take() as lease:
        report = receive(target, lease)
    assert seed.holds(target)
    assert (report.protocol, report.verify, report.origin_verified) == ("gloo", "full", True)
    assert report.nbytes == 12_000_000
    quiet(seed)


def test_tensors_of_any_size_arrive(stack: ExitStack) -> None:
    """One byte, odd sizes, many small ones in a frame, one that takes several frames."""
    seed = GroupSeed(stack, BufferShard(sizes=(1, 7, 4096, *[13] * 500, 1_000_003, 262_144, 3))).serve()
    assert seed.holds(seed.fork())


def test_frames_that_the_seed_starts_together_arrive_one_by_one(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NCCL: one call for many broadcasts here, a broadcast for each frame there."""
    monkeypatch.setitem(PACES, "gloo", PACES["gloo"]._replace(batch_frames=5, batch_nbytes=3 << 20))
    together = []
    inner = Group.broadcast_together
    monkeypatch.setattr(
        Group, "broadcast_together", lambda group, views: (together.append(len(views)), inner(group, views))[1]
    )
    seed = GroupSeed(stack, BufferShard(sizes=(1_000_003, 7, 262_144, *[300_000] * 9, 13, 700_001))).serve()
    assert seed.holds(seed.fork())
    assert together
    assert max(together) <= 5
    quiet(seed)


def test_eight_clients_in_a_row_are_served(seed: GroupSeed) -> None:
    for _ in range(8):
        assert seed.holds(seed.fork())
    quiet(seed)


def test_three_clients_at_once_are_never_crossed(seed: GroupSeed) -> None:
    done: list[bool] = []
    threads = [threading.Thread(target=lambda: done.append(seed.holds(seed.fork()))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done == [True] * 3


def test_clients_of_one_given_port_queue(seed: GroupSeed, free_port: int) -> None:
    """A port that the user set aside carries one group at a time; the others wait for their turn."""
    done: list[bool] = []
    how = {"port": free_port, "queue_timeout_s": 20.0}
    threads = [threading.Thread(target=lambda: done.append(seed.holds(seed.fork(**how)))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(40)
    assert done == [True] * 3


def test_a_taken_port_is_refused_as_busy_once_the_queue_is_over(seed: GroupSeed, taken_port: int) -> None:
    target = seed.target()
    with seed.take() as lease, pytest.raises(SeedRefused) as refused:
        receive(target, lease, port=taken_port, queue_timeout_s=0.0)
    assert refused.value.reason == "busy"
    assert target.is_untouched


def test_another_layout_moves_no_byte(seed: GroupSeed) -> None:
    other = GroupSeed(ExitStack(), BufferShard(sizes=(8,))).target()
    with seed.take() as lease, pytest.raises(ManifestMismatch):
        receive(other, lease)
    assert other.is_untouched
    assert seed.broadcasts.num_groups == 0


def test_a_change_on_the_seed_ends_the_transfer(seed: GroupSeed) -> None:
    """The client ends with an error, never with bytes of two generations; the seed serves the new ones."""
    changed = threading.Event()

    def change() -> None:
        with seed.agents[0].changing("an update"):
            seed.shard.buffer.fill(9)
        changed.set()

    target = seed.target()
    with seed.take() as lease, pytest.raises(SeedError):
        receive(target, lease, observer=AtShare(0.5, change))
    assert changed.is_set()
    quiet(seed)


def test_a_change_that_unmaps_waits_until_nothing_is_sent(seed: GroupSeed) -> None:
    """Memory goes away only once no group reads it."""
    sending: list[int] = []

    def release() -> None:
        with seed.agents[0].changing("release", alters=False, settles=False, unmaps=True):
            sending.append(sum(not s.quiet.is_set() for s in seed.broadcasts._groups.values()))

    with seed.take() as lease, pytest.raises(SeedError):
        receive(seed.target(), lease, observer=AtShare(0.3, release))
    assert sending == [0]


def test_memory_stays_until_a_group_that_would_not_end_has_ended(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its client hears of it, but its memory may still be read: what unmaps is refused, each time, until it is over."""
    may_end, end = threading.Event(), Group._end

    def late(group: Group, inner: object) -> None:
        if group.member == SEED:
            may_end.wait(60)
        end(group, inner)

    monkeypatch.setattr(Group, "_end", late)
    seed = GroupSeed(stack, many(), limits=LIMITS._replace(close_timeout_s=0.5, max_groups=1)).serve()
    stack.callback(may_end.set)
    assert seed.holds(seed.fork())
    for _ in range(2):
        with pytest.raises(NotQuiet, match="a group still reads"):
            seed.broadcasts.close("release")
    assert seed.broadcasts.num_groups == 1
    may_end.set()
    assert seed.holds(seed.fork()), "its place is free again"
    quiet(seed)
    seed.broadcasts.close("release")


def test_a_client_that_stops_halfway_leaves_the_seed_to_the_next(seed: GroupSeed) -> None:
    """An exception on the client ends its group; the seed notices, and serves on."""

    def stop() -> None:
        raise SeedLost("this client gave up")

    with seed.take() as lease, pytest.raises(SeedLost, match="gave up"):
        receive(seed.target(), lease, observer=AtShare(0.5, stop))
    assert seed.holds(seed.fork())
    quiet(seed)


def test_bytes_that_changed_under_an_unmoved_fence_are_found(seed: GroupSeed) -> None:
    """Digests are the last word: a write that nobody announced is named."""
    seed.shard.buffer.view[5_000_000] ^= 1
    with seed.take() as lease, pytest.raises(DigestMismatch, match=r"layers\.16\.weight"):
        receive(seed.target(), lease)


def test_a_lease_that_ended_opens_nothing(seed: GroupSeed) -> None:
    lease = seed.take()
    lease.release()
    body = {"master_address": "127.0.0.1", "ports": "0", "group_rank": 0, "world_size": 2, "backend": "gloo"}
    answer = seed.http.post(INIT_PATH, json={**body, "lease": lease.reply.lease})
    assert (answer.status_code, answer.json()["reason"]) == (404, "unknown_lease")
    assert seed.broadcasts.num_groups == 0


def test_a_seed_whose_rank_was_fenced_between_lease_and_group_refuses(seed: GroupSeed) -> None:
    with seed.take() as lease:
        with seed.agents[0].changing("an update"):
            pass
        with pytest.raises((SeedRefused, FenceBroken, SeedUnreachable)):
            receive(seed.target(), lease)


def test_a_client_is_refused_by_name_where_verification_is_impossible(stack: ExitStack) -> None:
    """A lineage that was not verified is refused by a client that wants all of it verified, as with a pull."""
    seed = GroupSeed(stack).serve(verified=False)
    with seed.take() as lease:
        with pytest.raises(SeedRefused) as refused:
            receive(seed.target(), lease)
        assert refused.value.reason == "unverified"
        target = seed.target()
        receive(target, lease, settings=msgspec.structs.replace(SETTINGS, verify="sample"))
    assert seed.holds(target)


def test_a_rate_limit_is_kept_by_the_seed(seed: GroupSeed, monkeypatch: pytest.MonkeyPatch) -> None:
    """12 MB at 24 MB/s take half a second; nothing is started before its time, to wait on the device that serves."""
    started_s: list[float] = []
    inner = Group.broadcast

    def broadcast(group: Group, tensor: torch.Tensor) -> None:
        if group.member == SEED:
            started_s.append(time.monotonic())
        inner(group, tensor)

    monkeypatch.setattr(Group, "broadcast", broadcast)
    with seed.take() as lease:
        report = receive(seed.target(), lease, settings=msgspec.structs.replace(SETTINGS, limit_gbps=0.024))
    assert report.phases_s["read"] > 0.4
    _, *frames_s, _ = started_s  # without header and trailer
    assert frames_s[len(frames_s) // 2] - frames_s[0] > 0.2


def test_a_limit_does_not_outlast_a_change(seed: GroupSeed, caplog: pytest.LogCaptureFixture) -> None:
    """A seed that waits until it may send more gives up when its weights change."""
    caplog.set_level("INFO")

    def change() -> None:
        with seed.agents[0].changing("an update"):
            pass

    timer = threading.Timer(0.5, change)
    timer.start()
    slow = msgspec.structs.replace(SETTINGS, limit_gbps=0.001)
    with seed.take() as lease, pytest.raises(SeedError):
        receive(seed.target(), lease, settings=slow)
    timer.join()
    until(lambda: any("given up: an update" in record.getMessage() for record in caplog.records))


def test_a_client_that_stands_still_is_given_up_within_the_deadline(stack: ExitStack) -> None:
    """No progress for so long ends the group, whatever the client does; the next is served at once."""
    seed = GroupSeed(stack, many(), limits=LIMITS._replace(progress_timeout_s=1.5, close_timeout_s=4.0)).serve()
    given_up = threading.Event()

    def stand_still() -> None:
        until(lambda: seed.broadcasts.num_groups == 0, 10.0)
        given_up.set()

    with seed.take() as lease, pytest.raises(SeedError):
        receive(seed.target(), lease, observer=AtShare(0.2, stand_still))
    assert given_up.is_set()
    assert seed.holds(seed.fork())


def test_a_fleet_key_is_proven_here_as_everywhere(stack: ExitStack) -> None:
    """Who has the key is served; who has not learns neither port nor name."""
    seed = GroupSeed(stack, many(), key=KEY)
    signer = signer_of(Config(key=KEY), "i-keyed")
    seed.serve()
    target = seed.target()
    with seed.take("i-keyed", signer=signer) as lease:
        body = {"master_address": "", "ports": "0", "group_rank": 0, "world_size": 2, "backend": "gloo"}
        assert seed.http.post(INIT_PATH, json={**body, "lease": lease.reply.lease}).status_code == 401
        receive(target, lease, signer=signer)
    assert seed.holds(target)
