"""Drills with real servers: one instance starts from another while something ends, freezes, changes or falls silent.

A drill says what it did and how the start ended, and raises AssertionError where that is wrong: weights that are not
the checkpoint's, a reason that does not fit, a bound that did not hold, or a place at the seed that did not come back.
"""

from __future__ import annotations

import contextlib
import random
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rfork.config import Config
from support.forking import ENV, fork_from, last_line, serving, start_seed, status, weights
from support.middleman import Middleman
from support.models import Models
from support.outside import image_of, lease_on
from support.planner import Planner, instance_id, until
from support.server import HOST, Fleet, Generation, Server

LARGER = {"num_hidden_layers": 8}
"""9 MB, read at 1 MB/s: there is time to do something in the middle."""

SLOWLY = {"RFORK_READ_GBPS_LIMIT": "0.001"}
BOUNDS = {
    "RFORK_SEEK_TIMEOUT_S": "5",
    "RFORK_MATCH_TIMEOUT_S": "3",
    "RFORK_CONNECT_TIMEOUT_S": "2",
    "RFORK_READ_TIMEOUT_S": "2",
    "RFORK_CLOSE_TIMEOUT_S": "10",
}
BOUND_S = 90.0
"""For a whole start, its fallback and a busy machine included; the phases' own bounds add up to a third of it."""

LEASE_TTL_S = 3
CAPACITY = Config().capacity
PLANNED = ("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine")
"""The command that needs no address."""
MOMENTS = {"0%": 0, "50%": 50, "99%": 90}
LATE = "99%"
"""Whoever is this far may have it all by the time that something happens."""
LOST = ("seed_lost", "unreachable", "unknown_lease", "fence")
CHANGED = ("fence", "stale_generation", "paused", "live_content", "key_mismatch", "not_ready", "digest_mismatch")


class Drill(NamedTuple):
    """`what` happens `when`: at that part of the read, or to that question of the control plane."""

    what: str
    when: str

    def __str__(self) -> str:
        return f"{self.what} at {self.when}"


READING = ("seed killed", "seed frozen", "seed frozen and woken", "client killed", "client frozen", "update")
ASKING = ("silence", "nonsense")
PLANNING = ("planner killed", "planner frozen", "planner restarted")
ASKED = "ask"
"""A client waits for the planner's answer, as the only seed is full."""
QUESTIONS = ("/rfork/v1/status", "/rfork/v1/leases", "/manifest", "/digests")
DRILLS = (
    *(Drill(what, when) for what in READING for when in MOMENTS),
    *(Drill(what, when) for what in ASKING for when in QUESTIONS),
    Drill("crowd", "once"),
    *(Drill(what, when) for what in PLANNING for when in (ASKED, "50%")),
    Drill("stale entry", "once"),
)


class Ground:
    """Where drills are held. A seed is kept for the next drill where the last one has left it whole."""

    def __init__(self, fleet: Fleet, models: Models, *, crowd: int = 8) -> None:
        self.fleet, self.models, self.crowd = fleet, models, crowd
        self.path = models.path("llama", **LARGER)
        self.right: Generation | None = None
        self.planner = Planner(fleet.folder)
        """Runs in drills that need it, and is empty at their beginning; seeds always look for it."""
        self._seed: Server | None = None

    def close(self) -> None:
        self.planner.close()

    def seed(self) -> Server:
        if self._seed is None or self._seed.returncode is not None:
            self._seed = start_seed(self.fleet, self.path, env=self.planner.env(RFORK_LEASE_TTL_S=str(LEASE_TTL_S)))
            self.right = self.right or self._seed.generate()
        return self._seed

    def hold(self, drill: Drill) -> str:
        """Returns how the start ended."""
        seed = self.seed()
        handlers: dict[str, Callable[[Server, str], str]] = {
            "seed killed": self._seed_killed,
            "seed frozen": self._seed_frozen,
            "seed frozen and woken": self._seed_woken,
            "client killed": self._client_killed,
            "client frozen": self._client_frozen,
            "update": self._update,
            "silence": self._silence,
            "nonsense": self._nonsense,
            "crowd": self._crowd,
            "planner killed": self._planner_killed,
            "planner frozen": self._planner_frozen,
            "planner restarted": self._planner_restarted,
            "stale entry": self._stale_entry,
        }
        try:
            with self.fleet.visited():
                return handlers[drill.what](seed, drill.when)
        finally:
            self.planner.kill()

    # What happens while bytes are read

    def _seed_killed(self, seed: Server, when: str) -> str:
        client = self._reading(seed, when)
        seed.kill()
        return self._ended(client, LOST, may_fork=when == LATE)

    def _seed_frozen(self, seed: Server, when: str) -> str:
        client = self._reading(seed, when)
        with seed.frozen():
            ending = self._ended(client, LOST, may_fork=when == LATE)
        serving(seed)
        return ending

    def _seed_woken(self, seed: Server, when: str) -> str:
        """It wakes when the client has given up, and writes on where it can (I8): the client's memory is compared."""
        client = self._reading(seed, when)
        with seed.frozen():
            client.wait_for("to give up", lambda: "falling back" in client.log() or last_line(client), BOUND_S)
        ending = self._ended(client, LOST, may_fork=when == LATE)
        serving(client)
        serving(seed)
        assert image_of(client).differences(image_of(seed)) == []
        return ending

    def _client_killed(self, seed: Server, when: str) -> str:
        client = self._reading(seed, when)
        client.kill()
        return self._place_is_back(seed)

    def _client_frozen(self, seed: Server, when: str) -> str:
        """Longer than its lease lives: it must not go on with weights that it has no right to any more."""
        client = self._reading(seed, when)
        with client.frozen():
            self._place_is_back(seed)
        return self._ended(client, ("unknown_lease", *LOST), may_fork=True)

    def _update(self, seed: Server, when: str) -> str:
        client = self._reading(seed, when)
        seed.post("/update_weights_from_disk", {"model_path": str(self.models.path("llama", seed=1, **LARGER))})
        ending = self._ended(client, CHANGED, may_fork=when == LATE)
        seed.kill()
        return ending

    # What happens to questions

    def _silence(self, seed: Server, question: str) -> str:
        with Middleman(seed) as middleman:
            middleman.hang = {question}
            return self._ended(self._start(middleman.port), ("unreachable",))

    def _nonsense(self, seed: Server, question: str) -> str:
        with Middleman(seed) as middleman:
            middleman.edits[question] = lambda body: bytes(b ^ 0x55 for b in body)
            return self._ended(self._start(middleman.port), ("unreachable", "unverified"))

    def _crowd(self, seed: Server, when: str) -> str:
        """In no hurry: servers that start at once leave each other, and the seed, little of the machine."""
        flags = fork_from(seed.port)
        clients = [self.fleet.start(self.path, *flags, env=ENV, wait=False) for _ in range(self.crowd)]
        endings = {self._ended(client, (), bound_s=BOUND_S * self.crowd) for client in clients}
        assert endings == {"seed"}, endings
        return f"seed, {self.crowd} times"

    # What happens to the planner

    def _planner_killed(self, seed: Server, when: str) -> str:
        with self._planned(seed, when) as client:
            self.planner.kill()
            return self._ended_without_planner(client, when)

    def _planner_frozen(self, seed: Server, when: str) -> str:
        with self._planned(seed, when) as client, self.planner.frozen():
            return self._ended_without_planner(client, when)

    def _planner_restarted(self, seed: Server, when: str) -> str:
        """With nothing in its memory: the seed is heard of again, and so is the client."""
        with self._planned(seed, when, RFORK_SEEK_TIMEOUT_S="30") as client:
            self.planner.kill()
            self.planner.start()
        return self._ended(client, ())

    def _ended_without_planner(self, client: Server, when: str) -> str:
        """Who waits goes to the disk; who reads reads on: a lease is the seed's, not the planner's."""
        return self._ended(client, ("planner_unavailable",) if when == ASKED else ())

    @contextlib.contextmanager
    def _planned(self, seed: Server, when: str, **env: str) -> Iterator[Server]:
        """A client that waits for the planner's answer, or has read that much of what it was told to."""
        self._meet(seed)
        with contextlib.ExitStack() as stack:
            if when == ASKED:
                for number in range(CAPACITY):
                    stack.enter_context(lease_on(seed, client=f"i-{number}"))
                until("it to be full", lambda: self._view(seed).num_leases == CAPACITY, 20)
            client = self._start_planned(**env, **({} if when == ASKED else SLOWLY))
            if when == ASKED:
                client.wait_for_log("rfork: waiting for", BOUND_S)
            else:
                client.wait_for("to read", lambda: percent(client) >= MOMENTS[when], BOUND_S)
            yield client

    def _stale_entry(self, seed: Server, when: str) -> str:
        """The seed is gone and another is at its address, of which the planner knows nothing: 421, and the disk."""
        self._meet(seed, ttl_s=600)
        view = self._view(seed)
        seed.kill()
        port = view.listener.rpartition(":")[2]
        other = start_seed(self.fleet, self.path, env={"RFORK_LISTEN": f"{HOST}:{port}"})
        client = self._start_planned(RFORK_PLAN_TIMEOUT_S="2")
        ending = self._ended(client, ("other_instance",))
        assert '/rfork/v1/leases HTTP/1.1" 421' in other.log()
        assert self.planner.instances().keys() >= {view.instance_id}
        return ending

    def _meet(self, seed: Server, **policy: Any) -> None:
        self.planner.kill()
        self.planner.start(**policy)
        until("the seed to be offered", lambda: (v := self._view(seed)) is not None and v.offered, 30)

    def _view(self, seed: Server) -> Any:
        return self.planner.instances().get(instance_id(seed))

    def _start_planned(self, **env: str) -> Server:
        env = {**BOUNDS, "RFORK_STORAGE_JITTER_S": "2", **env}
        return self.fleet.start(self.path, *PLANNED, env=self.planner.env(**env), wait=False)

    # How a start goes, and how it ends

    def _start(self, port: int, **env: str) -> Server:
        return self.fleet.start(self.path, *fork_from(port), env={**ENV, **BOUNDS, **env}, wait=False)

    def _reading(self, seed: Server, when: str) -> Server:
        """A client that has read as much of the weights as `when` says."""
        client = self._start(seed.port, **SLOWLY)
        client.wait_for("to read", lambda: percent(client) >= MOMENTS[when], BOUND_S)
        return client

    def _ended(
        self, client: Server, reasons: tuple[str, ...], *, may_fork: bool = False, bound_s: float = BOUND_S
    ) -> str:
        client.wait_for("to end its start", lambda: last_line(client) is not None, bound_s)
        report = weights(client)
        assert client.generate() == self.right, f"wrong tokens: {report}"
        if report["source"] == "seed":
            assert may_fork or not reasons, report
            return "seed"
        assert report["fallback_reason"] in reasons, report
        return f"disk {report['fallback_reason']}"

    def _place_is_back(self, seed: Server) -> str:
        """The lease of a client that renews no more runs out."""
        seed.wait_for("to have its place back", lambda: status(seed)["num_readers"] == 0, 10 * LEASE_TTL_S)
        return "expired"


def percent(client: Server) -> int:
    """How much a client has read, -1 before it reads."""
    return max((int(n) for n in re.findall(r"rfork target:\s+(\d+)%", client.log())), default=-1)


def play_all(folder: Path, first: int, count: int, say: Callable[[str], Any]) -> dict[str, Any]:
    """Drills number first … first + count - 1; each number is a drill."""
    endings: dict[str, int] = {}
    wrong = []
    with Fleet(folder) as fleet, contextlib.closing(Ground(fleet, Models(folder / "models"))) as ground:
        for number in range(first, first + count):
            drill = random.Random(number).choice(DRILLS)
            started_s = time.monotonic()
            try:
                ending = ground.hold(drill)
            except AssertionError as error:
                wrong.append(f"drill {number} ({drill}): {error}"[:4000])
                ending = "wrong"
                ground._seed = None
            endings[ending] = endings.get(ending, 0) + 1
            say(f"{number}: {drill}: {ending} ({time.monotonic() - started_s:.0f} s)")
    return {"endings": endings, "faults": count, "wrong": wrong}


@contextlib.contextmanager
def one_rank_frozen(seed: Server, rank: str) -> Iterator[None]:
    """One rank of a seed answers nobody inside the block."""
    import signal

    seed.signal(signal.SIGSTOP, f"scheduler_{rank}")
    try:
        yield
    finally:
        seed.signal(signal.SIGCONT, f"scheduler_{rank}")
