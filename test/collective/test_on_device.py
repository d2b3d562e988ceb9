"""The same on whatever this machine has: NCCL between two GPUs where there are two, gloo on the CPU elsewhere."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from support.device_groups import DeviceSeed, fork
from support.groups import AtShare
from support.seed_node import until

from rfork.errors import SeedError, SeedLost
from rfork.transports.collective import backend_for

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


@pytest.mark.parametrize(
    ("share", "how"),
    [("0", signal.SIGKILL), ("0.5", signal.SIGKILL), ("0.99", signal.SIGKILL), ("0.5", signal.SIGSTOP)],
    ids=["killed-0", "killed-50", "killed-99", "stopped-50"],
)
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
