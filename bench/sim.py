"""How long until N instances of one model are ready, by policy, with the real planner core and a simulated fleet.

    python bench/sim.py                 table for 1 … 4,096 instances
    python bench/sim.py --png out.png   and a plot (needs matplotlib)
    python bench/sim.py --faults        the tree at one size with crashes, slow readers and planner restarts

All instances start at once with no seed. Reading the disk takes one round, as does reading a seed that has no other
reader; readers of one seed share its link equally. The ideal is ⌈log2(N+1)⌉ rounds: every holder, the disk included,
serves one client per round.

    serial    one seed, one client at a time
    star      one seed, everybody at once
    capacity  every loaded instance seeds, up to its capacity at once
    tree      every loaded instance seeds, one client each while others wait (the default)
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import heapq
import itertools
import json
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rfork.planner.events import Deliver, Event, Parked, Tick
from rfork.planner.lifecycle import PlannerError
from rfork.planner.policy import Policy
from rfork.planner.state import PlannerState
from rfork.wire.planner import (
    Answer,
    Ask,
    FallBack,
    ForkFrom,
    Heartbeat,
    InstanceState,
    LeaseView,
    Outcome,
    ReadDisk,
    Report,
)

KEY = "5" * 64
SIZES = (1, 4, 16, 64, 256, 1024, 4096)
POLICIES = ("serial", "star", "capacity", "tree")
CLOSED_FORM_ABOVE = 256
"""Serial and star take N rounds; larger ones are not simulated."""


@dataclass
class Faults:
    """Chances per transfer and event times, in rounds."""

    crash: float = 0.0
    slow: float = 0.0
    slowness: float = 10.0
    planner_restarts: tuple[float, ...] = ()
    warm_up: float = 0.0


@dataclass
class Node:
    """One instance. `readers` maps a client to the share of the model that it has yet to read."""

    name: str
    reads_at_most: float = 1.0
    ready_at: float | None = None
    seeds: bool = False
    alive: bool = True
    readers: dict[str, float] = field(default_factory=dict)
    updated_at: float = 0.0
    epoch: int = 0
    excluded: list[str] = field(default_factory=list)
    asked_at: float = 0.0


class Fleet:
    """N instances around one PlannerState, driven by a heap of timed calls."""

    def __init__(self, num: int, policy: str, *, round_s: float, capacity: int, faults: Faults, seed: int) -> None:
        fan_out = {"serial": 1, "star": 0, "capacity": 0, "tree": 1}[policy]
        self.capacity = {"serial": 1, "star": 256, "capacity": capacity, "tree": capacity}[policy]
        self.clones_seed = policy in ("capacity", "tree")
        self.policy = Policy(
            fan_out=fan_out, settle_s=0.0, patience_s=6 * round_s, wait_bound_s=1e6, wait_bound_max_s=1e6
        )
        self.settling = Policy(fan_out=fan_out, patience_s=6 * round_s, wait_bound_s=1e6, wait_bound_max_s=1e6)
        self.state = PlannerState(self.policy, 0.0)
        self.round_s, self.faults, self.random = round_s, faults, random.Random(seed)
        self.now = 0.0
        self.calls: list[tuple[float, int, Callable[[], None]]] = []
        self.order = itertools.count()
        self.polls = itertools.count()
        self.target = num
        self.num_ready = 0
        self.disk_reads = 0
        self.failures = 0
        self.longest_wait_s = 0.0
        self.nodes: dict[str, Node] = {}
        for n in range(num):
            self.add(f"i-{n}")

    def add(self, name: str) -> None:
        slow = self.random.random() < self.faults.slow
        self.nodes[name] = Node(name, 1 / self.faults.slowness if slow else 1.0, asked_at=self.now)
        self.at(0.0, lambda: self.ask(self.nodes[name]))

    def at(self, delay_s: float, call: Callable[[], None]) -> None:
        heapq.heappush(self.calls, (self.now + delay_s, next(self.order), call))

    def run(self) -> float:
        """Rounds until all are ready."""
        for when in self.faults.planner_restarts:
            self.at(when * self.round_s, self.restart_planner)
        self.at(1.0, self.tick)
        while self.num_ready < self.target:
            self.now, _, call = heapq.heappop(self.calls)
            call()
        return self.now / self.round_s

    def feed(self, event: Event) -> None:
        try:
            effects = self.state.handle(event, self.now)
        except PlannerError:
            return
        for effect in effects:
            if isinstance(effect, Deliver):
                self.at(0.0, lambda e=effect: self.told(self.nodes[e.client], e.answer))  # type: ignore[misc]

    def tick(self) -> None:
        self.feed(Tick())
        self.at(1.0, self.tick)

    def restart_planner(self) -> None:
        """All memory is lost; seeds are heard of with their next heartbeat, waiting clients ask again."""
        self.state = PlannerState(self.settling, self.now)
        for node in self.nodes.values():
            if node.alive and node.ready_at is None and not self.is_reading(node):
                self.at(self.random.uniform(0.5, 1.5), lambda n=node: self.ask(n))  # type: ignore[misc]

    def is_reading(self, node: Node) -> bool:
        return node.epoch % 2 == 1

    def ask(self, node: Node) -> None:
        if node.alive and node.ready_at is None and not self.is_reading(node):
            waited_s = self.now - node.asked_at
            ask = Ask(client=node.name, instance_key=KEY, wait_s=30.0, waited_s=waited_s, exclude=node.excluded[-8:])
            self.feed(Parked(ask, next(self.polls)))

    def told(self, node: Node, answer: Answer) -> None:
        if not node.alive or node.ready_at is not None or self.is_reading(node):
            return
        if isinstance(answer, ReadDisk | FallBack):
            self.begin(node)
            self.disk_reads += 1
            self.keep_reading(node, isinstance(answer, ReadDisk))
            self.at(self.round_s, lambda: self.finish(node, ""))
        elif isinstance(answer, ForkFrom):
            self.fork(node, self.nodes[answer.candidates[0].instance_id])
        elif answer.reason != "replaced":
            self.ask(node)

    def begin(self, node: Node) -> None:
        node.epoch += 1
        self.longest_wait_s = max(self.longest_wait_s, self.now - node.asked_at)

    def fork(self, node: Node, seed: Node) -> None:
        if not seed.alive:
            self.fail(node, seed, "unreachable")
        elif len(seed.readers) >= self.capacity:
            self.feed(
                Report(client=node.name, instance_key=KEY, seed=seed.name, outcome=Outcome.REFUSED, reason="busy")
            )
            self.at(0.1, lambda: self.ask(node))
        else:
            self.begin(node)
            self.progress(seed)
            seed.readers[node.name] = 1.0
            self.reschedule(seed)
            if self.random.random() < self.faults.crash:
                self.at(self.random.uniform(0, self.round_s), lambda: self.crash(seed))

    def fail(self, node: Node, seed: Node, reason: str) -> None:
        self.failures += 1
        node.excluded.append(seed.name)
        self.feed(Report(client=node.name, instance_key=KEY, seed=seed.name, outcome=Outcome.FAILED, reason=reason))
        self.at(0.5, lambda: self.ask(node))

    def progress(self, seed: Node) -> None:
        """Bring what readers have left up to now."""
        if seed.readers:
            share = (self.now - seed.updated_at) / self.round_s / len(seed.readers)
            elapsed = (self.now - seed.updated_at) / self.round_s
            for name in seed.readers:
                seed.readers[name] -= min(share, elapsed * self.nodes[name].reads_at_most)
        seed.updated_at = self.now

    def reschedule(self, seed: Node) -> None:
        seed.epoch += 2
        epoch = seed.epoch
        if seed.readers:
            rate = 1 / len(seed.readers)
            first = min(left / min(rate, self.nodes[name].reads_at_most) for name, left in seed.readers.items())
            self.at(max(first, 0.0) * self.round_s, lambda: self.reap(seed, epoch))

    def reap(self, seed: Node, epoch: int) -> None:
        if seed.epoch != epoch or not seed.alive:
            return
        self.progress(seed)
        done = [name for name, left in seed.readers.items() if left <= 1e-9]
        for name in done:
            del seed.readers[name]
        self.reschedule(seed)
        for name in done:
            self.finish(self.nodes[name], seed.name)
        self.beat(seed, InstanceState.SERVING)

    def finish(self, node: Node, parent: str) -> None:
        if not node.alive or node.ready_at is not None:
            return
        node.ready_at = self.now
        self.num_ready += 1
        self.feed(Report(client=node.name, instance_key=KEY, seed=parent, outcome=Outcome.LOADED))
        if self.clones_seed or not parent:
            self.at(self.faults.warm_up * self.round_s, lambda: self.begin_seeding(node))

    def begin_seeding(self, node: Node) -> None:
        if node.alive:
            node.seeds, node.updated_at = True, self.now
            self.beat(node, InstanceState.SERVING)
            self.keep_beating(node)

    def keep_beating(self, node: Node) -> None:
        if node.alive:
            self.at(
                self.random.uniform(9, 10), lambda: (self.beat(node, InstanceState.SERVING), self.keep_beating(node))
            )  # type: ignore[func-returns-value]

    def keep_reading(self, node: Node, is_elected: bool) -> None:
        """Heartbeats of an instance that reads the disk, until it is a seed."""
        if node.alive and not node.seeds:
            self.beat(node, InstanceState.STARTING, reads_disk=is_elected)
            self.at(self.random.uniform(9, 10), lambda: self.keep_reading(node, is_elected))

    def beat(self, node: Node, state: InstanceState, *, reads_disk: bool = False) -> None:
        if node.alive:
            self.feed(
                Heartbeat(
                    instance_id=node.name,
                    instance_key=KEY,
                    state=state,
                    listener=f"http://{node.name}",
                    capacity=self.capacity,
                    reads_disk=reads_disk,
                    leases=[LeaseView(client=name) for name in node.readers],
                )
            )

    def crash(self, seed: Node) -> None:
        """The seed is killed; its readers fail, and a replacement starts under a new name."""
        if not seed.alive or not seed.seeds:
            return
        seed.alive = False
        if seed.ready_at is not None:
            self.num_ready -= 1
        for name in list(seed.readers):
            reader = self.nodes[name]
            reader.epoch += 1
            self.at(1.0, lambda r=reader: self.fail(r, seed, "seed_lost"))  # type: ignore[misc]
        seed.readers.clear()
        self.add(f"{seed.name}r")


def rounds(num: int, policy: str, args: argparse.Namespace, faults: Faults) -> tuple[float, Fleet | None]:
    if policy in ("serial", "star") and num > CLOSED_FORM_ABOVE:
        return float(num), None
    fleet = Fleet(num, policy, round_s=args.round_s, capacity=args.capacity, faults=faults, seed=args.seed)
    return fleet.run(), fleet


def ideal(num: int) -> int:
    return math.ceil(math.log2(num + 1))


def scale(args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    for num in args.sizes:
        row: dict[str, Any] = {"instances": num, "ideal": ideal(num)}
        for policy in POLICIES:
            row[policy] = round(rounds(num, policy, args, Faults())[0], 2)
        rows.append(row)
    return rows


def faults(args: argparse.Namespace) -> list[dict[str, Any]]:
    num = args.sizes[-1] if len(args.sizes) == 1 else 1024
    cases = {
        "none": Faults(),
        "2 % of transfers kill their seed": Faults(crash=0.02),
        "5 % of readers are 10 x slower": Faults(slow=0.05),
        "planner restarts in rounds 1, 3 and 6": Faults(planner_restarts=(0.5, 3.5, 6.5)),
        "warm-up of one round": Faults(warm_up=1.0),
        "all of these": Faults(crash=0.02, slow=0.05, planner_restarts=(0.5, 3.5, 6.5), warm_up=1.0),
    }
    rows = []
    for name, case in cases.items():
        took, fleet = rounds(num, "tree", args, case)
        assert fleet is not None
        rows.append(
            {
                "faults": name,
                "instances": num,
                "rounds": round(took, 2),
                "ideal": ideal(num),
                "disk_reads": fleet.disk_reads,
                "failed_transfers": fleet.failures,
                "longest_wait_rounds": round(fleet.longest_wait_s / args.round_s, 1),
            }
        )
    return rows


def plot(rows: list[dict[str, Any]], path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    sizes = [row["instances"] for row in rows]
    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    for policy in POLICIES:
        axes.plot(sizes, [row[policy] for row in rows], marker="o", label=policy)
    axes.plot(sizes, [row["ideal"] for row in rows], "k--", label="ideal ⌈log2(N+1)⌉")
    axes.set(xscale="log", yscale="log", xlabel="instances that start at once", ylabel="rounds until all are ready")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--round-s", type=float, default=10.0, help="seconds of one undisturbed transfer")
    parser.add_argument("--capacity", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1, help="of the random numbers")
    parser.add_argument("--faults", action="store_true")
    parser.add_argument("--png")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = faults(args) if args.faults else scale(args)
    if args.json:
        print(json.dumps(rows))
    else:
        widths = {name: max(len(name), *(len(str(row[name])) for row in rows)) + 2 for name in rows[0]}
        print("".join(name.rjust(width) for name, width in widths.items()))
        for row in rows:
            print("".join(str(row[name]).rjust(width) for name, width in widths.items()))
    if args.png and not args.faults:
        plot(rows, args.png)


if __name__ == "__main__":
    main()
