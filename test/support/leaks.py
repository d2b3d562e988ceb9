"""What a fork could leave behind in its process: counted before and after."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import psutil
import torch
from tqdm import tqdm

from rfork.transports.memory import MemoryFabric

TIMEOUT_S = 10.0
"""For the other end: a seed closes its socket when it hears of it."""

KEPT = ("asyncio_", "AnyIO")
"""Workers that a seed's listener starts as requests come, and keeps."""

tqdm.monitor_interval = 0  # else the first progress bar of the process leaves a thread


class Held(NamedTuple):
    sockets: int
    threads: int
    tensors: int
    processes: int
    registrations: int

    def __sub__(self, other: Held) -> Held:
        return Held(*(mine - theirs for mine, theirs in zip(self, other, strict=True)))


def held(fabric: MemoryFabric) -> Held:
    """What this process holds now; registrations are those of all engines on `fabric`."""
    return Held(
        sockets=open_sockets(),
        threads=sum(not t.name.startswith(KEPT) for t in threading.enumerate()),
        tensors=sum(issubclass(type(found), torch.Tensor) for found in gc.get_objects()),
        processes=len(psutil.Process().children()),
        registrations=fabric.num_regions,
    )


@contextlib.contextmanager
def old_objects_aside() -> Iterator[None]:
    """Don't look at what there is already: a count of all that torch has made takes a tenth of a second. Nested uses do
    nothing.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextlib.contextmanager
def nothing_left(fabric: MemoryFabric) -> Iterator[None]:
    """Whatever happens inside, no more is held in the end than before."""
    gc.collect()
    before = held(fabric)
    yield
    deadline = time.monotonic() + TIMEOUT_S
    while max(left := held(fabric) - before) > 0:
        assert time.monotonic() < deadline, f"left behind: {left}"
        gc.collect()
        time.sleep(0.01)


def open_sockets() -> int:
    """Sockets that this process holds."""
    num = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            num += os.readlink(f"/proc/self/fd/{fd}").startswith("socket:")
        except OSError:
            continue  # the one that listed them
    return num
