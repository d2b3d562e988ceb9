"""Bytes that land after a read was given up: with the engine kept, as most would, and destroyed, as R-Fork does.

    python -m bench.late                                                                        # TCP, in this host
    python -m bench.late --protocol nvlink_intra --seed-device cuda:0 --device cuda:1 --gib 16   # NVLink, two GPUs

Half of the bytes have landed when something happens to the seed: it is stopped (and woken later), it is killed, or the
client alone loses patience. The client then waits for `--patience-s`, gives up, and keeps or destroys its engine. From
there on its memory must rest: what still changes in it would be written into whatever uses that memory next. Each case
has a seed, an engine and memory of its own. Exits 1 if a byte lands after an engine was destroyed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch

from rfork.binding import Region, Slice
from rfork.clock import SystemClock
from rfork.transports.base import Engine
from rfork.transports.mooncake import MooncakeTransport
from rfork.transports.read import ReadFailed, Window, read_all
from rfork.transports.select import PACES

HOST = "127.0.0.1"
GIB, MIB = 1 << 30, 1 << 20
START_S, CLOSE_S = 120.0, 30.0
WHAT = ("stopped", "killed", "nothing")


class Impatient(Exception):
    """The client gives up though nothing is wrong."""


class Outcome(NamedTuple):
    """`given_up_nbytes` had landed when the client gave up, `late_nbytes` changed afterwards."""

    seed: str
    engine: str
    how: str
    given_up_nbytes: int
    close_s: float
    late_nbytes: int


def serve(pipe: Connection, protocol: str, device: str, nbytes: int) -> None:
    """A seed: memory full of ones, until it is killed."""
    memory = torch.full((nbytes,), 1, dtype=torch.uint8, device=device)
    engine = transport(protocol, device).open()
    engine.register([Region(memory.data_ptr(), nbytes)])
    synchronize(device)
    pipe.send((engine.session_id, memory.data_ptr()))
    signal.pause()


def transport(protocol: str, device: str) -> MooncakeTransport:
    return MooncakeTransport(protocol=protocol, host=HOST, device_index=torch.device(device).index)


def synchronize(device: str) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


@contextlib.contextmanager
def seed(options: argparse.Namespace) -> Iterator[tuple[int, str, int]]:
    """Process id, session id and address."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    arguments = (there, options.protocol, options.seed_device, options.nbytes)
    process = context.Process(target=serve, args=arguments, daemon=True)
    process.start()
    assert process.pid is not None
    try:
        if not here.poll(START_S):
            raise TimeoutError(f"the seed did not start within {START_S:g} s")
        yield process.pid, *here.recv()
    finally:
        process.kill()
        process.join()


def case(what: str, destroy: bool, options: argparse.Namespace) -> Outcome:
    with seed(options) as (pid, session_id, address):
        memory = torch.zeros(options.nbytes, dtype=torch.uint8, device=options.device)
        synchronize(options.device)
        engine = transport(options.protocol, options.device).open()
        engine.register([Region(memory.data_ptr(), options.nbytes)])
        strike: dict[str, Callable[[], None]] = {
            "stopped": lambda: os.kill(pid, signal.SIGSTOP),
            "killed": lambda: os.kill(pid, signal.SIGKILL),
            "nothing": give_up,
        }
        how = read(engine, session_id, memory, address, strike[what], options)
        started_s = time.monotonic()
        if destroy:
            engine.close(CLOSE_S)
        close_s = time.monotonic() - started_s
        before = memory.clone()
        if what == "stopped":
            os.kill(pid, signal.SIGCONT)
        time.sleep(options.wait_s)
        synchronize(options.device)
        late, landed = count(memory, before), int(count(before, None))
        if not destroy:
            engine.close(CLOSE_S)
    return Outcome(what, "destroyed" if destroy else "kept", how, landed, close_s, late)


def give_up() -> None:
    raise Impatient("the client lost patience")


def read(
    engine: Engine, peer: str, memory: torch.Tensor, there: int, strike: Callable[[], None], options: argparse.Namespace
) -> str:
    """Read until it fails, and say how. Strikes once, at half of the bytes."""
    pace = PACES[options.protocol]
    size = min(pace.slice_nbytes, options.nbytes // 16)
    slices = [
        Slice(memory.data_ptr() + at, there + at, min(size, options.nbytes - at))
        for at in range(0, options.nbytes, size)
    ]
    landed, struck = 0, False

    def on_bytes(nbytes: int) -> None:
        nonlocal landed, struck
        landed += nbytes
        if landed >= options.nbytes // 2 and not struck:
            struck = True
            strike()

    window = Window(pace.flying_slices, min(pace.flying_nbytes, options.nbytes // 4), pace.longest_nap_s)
    patience_s = options.patience_s
    try:
        read_all(
            engine, peer, slices, window=window, progress_timeout_s=patience_s, clock=SystemClock(), on_bytes=on_bytes
        )
    except ReadFailed as error:
        return "failed" if "failed" in str(error) else "no progress"
    except Impatient:
        return "gave up"
    return "all read"


def count(memory: torch.Tensor, before: torch.Tensor | None) -> int:
    """Bytes that differ from `before`, or from zero."""
    parts = memory.split(64 * MIB)
    if before is None:
        return sum(int(now.count_nonzero()) for now in parts)
    return sum(int((now != then).count_nonzero()) for now, then in zip(parts, before.split(64 * MIB), strict=True))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--protocol", choices=["tcp", "nvlink_intra", "rdma"], default="tcp")
    parser.add_argument("--seed-device", default="cpu")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gib", type=float, default=1.0)
    parser.add_argument("--patience-s", type=float, default=1.0, help="without progress, before the read is given up")
    parser.add_argument("--wait-s", type=float, default=2.0, help="how long late bytes are waited for")
    parser.add_argument("--out", help="file for the figures, as JSON")
    options = parser.parse_args()
    options.nbytes = int(options.gib * GIB)
    outcomes = [case(what, destroy, options) for what in WHAT for destroy in (False, True)]
    if options.out:
        with open(options.out, "w") as file:
            json.dump([outcome._asdict() for outcome in outcomes], file, indent=1)
    say = sys.stdout.write
    say(f"{options.protocol}, {options.seed_device} to {options.device}, {options.nbytes / MIB:,.0f} MiB\n")
    say(f"{'seed':8} {'engine':9}  {'the read':11} {'had landed':>11} {'closed in':>9} {'landed late':>12}\n")
    for o in outcomes:
        had, late = f"{o.given_up_nbytes / MIB:,.0f} MiB", f"{o.late_nbytes / MIB:,.1f} MiB"
        say(f"{o.seed:8} {o.engine:9}  {o.how:11} {had:>11} {o.close_s:>7.3f} s {late:>12}\n")
    return 1 if any(o.late_nbytes for o in outcomes if o.engine == "destroyed") else 0


if __name__ == "__main__":
    sys.exit(main())
