"""The same on whatever this machine has: NCCL between two GPUs where there are two, gloo on the CPU elsewhere."""

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from support.device_groups import DeviceSeed, fork
from support.groups import AtShare
from support.seed_node import until

from rfork.errors import SeedError, SeedLost
from rfork.transports.collective import SEED, Group, Meeting, backend_for
from rfork.transports.courier import Courier

HAS_TWO_GPUS = torch.cuda.is_available() and torch.cuda.device_count() > 1
SEED_DEVICE, DEVICE = (torch.device("cuda:0"), torch.device("cuda:1")) if HAS_TWO_GPUS else (torch.device("cpu"),) * 2
TESTS = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def seed() -> Iterator[DeviceSeed]:
    with ExitStack() as stack:
        yield DeviceSeed(stack, SEED_DEVICE)


def test_every_byte_arrives(seed: DeviceSeed) -> None:
    shard, report = fork(seed.listener, DEVICE)
    assert seed.holds(shard)
    assert (report.protocol, report.verify) == (backend_for(DEVICE), "full")


def test_three_clients_at_once_are_never_crossed(seed: DeviceSeed) -> None:
    done: list[bool] = []
    threads = [
        threading.Thread(target=lambda: done.append(seed.holds(fork(seed.listener, DEVICE)[0]))) for _ in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(90)
    assert done == [True] * 3


def test_a_client_that_gives_up_leaves_nothing_that_writes(seed: DeviceSeed) -> None:
    def give_up() -> None:
        raise SeedLost("this client gave up")

    with pytest.raises(SeedLost, match="gave up"):
        fork(seed.listener, DEVICE, AtShare(0.5, give_up))
    assert seed.holds(fork(seed.listener, DEVICE)[0])


LOST = {
    "stopped-50": ("0.5", signal.SIGSTOP),
    "killed-0": ("0", signal.SIGKILL),
    "killed-50": ("0.5", signal.SIGKILL),
    "killed-99": ("0.99", signal.SIGKILL),
}
if not HAS_TWO_GPUS:
    del LOST["killed-0"], LOST["killed-50"], LOST["killed-99"]  # test_servers.py kills real clients there


@pytest.mark.parametrize(("share", "how"), LOST.values(), ids=LOST.keys())
def test_a_client_that_is_lost_costs_one_group(seed: DeviceSeed, share: str, how: signal.Signals) -> None:
    """Killed it is noticed at once, stopped by the deadline of one frame; this process lives, the next is served."""
    argv = [sys.executable, "-m", "support.device_groups", seed.listener, str(DEVICE), share]
    client = subprocess.Popen(argv, cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        assert client.stdout is not None
        assert client.stdout.readline().startswith("at ")
        os.kill(client.pid, how)
        until(lambda: seed.broadcasts.num_groups == 0, 30.0)
    finally:
        client.kill()
        client.wait(10)
        client.stdout.close()
    assert seed.holds(fork(seed.listener, DEVICE)[0])


def test_memory_is_released_only_after_the_groups_ended(seed: DeviceSeed) -> None:
    def release() -> None:
        with seed.agent.changing("release", alters=False, settles=False, unmaps=True):
            assert all(s.quiet.is_set() for s in seed.broadcasts._groups.values())

    with pytest.raises(SeedError):
        fork(seed.listener, DEVICE, AtShare(0.3, release))
    until(lambda: seed.broadcasts.num_groups == 0)


def test_a_member_that_greets_and_never_connects_is_given_up_in_time() -> None:
    """It may have been stopped right then: neither joining nor the first word waits longer than joining may take."""
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    started_s = time.monotonic()
    greeting = threading.Thread(target=greet, args=(port,))
    greeting.start()
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    with pytest.raises(SeedLost):  # noqa: PT012 (gloo gives up when the group is made, NCCL at its first operation)
        group = Group(
            Meeting("127.0.0.1", port, "half", "127.0.0.1"),
            SEED,
            device,
            join_timeout_s=2.0,
            operation_timeout_s=2.0,
            listening=listening,
        )
        try:
            Courier(group, [], progress_timeout_s=2.0, check=lambda: None).word(b"x")
        finally:
            group.close(30.0)
    assert time.monotonic() - started_s < 60.0
    greeting.join(30)


def greet(port: int) -> None:
    """Be there, as a client is, and do no more."""
    store = dist.TCPStore("127.0.0.1", port, 2, False, datetime.timedelta(seconds=30), wait_for_workers=False)
    own = dist.PrefixStore("half", store)
    own.set("here/1", b"1")
    with contextlib.suppress(RuntimeError):  # the seed's end of the store, which it gives up
        own.wait(["never"], datetime.timedelta(seconds=30))
