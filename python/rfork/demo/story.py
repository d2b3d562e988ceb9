"""The order of events: A from disk, B from A, A killed, C from B while D asks the dead A, and everything compared.

A and B are started by the same command: a planner has the one read the disk and names it to the other. C and D start
together: on two cores a start takes 20 s alone, and 35 s each for two at a time.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.progress import TaskID

import rfork
from rfork.demo import model as models
from rfork.demo.facts import Facts, InstanceFacts, check_all
from rfork.demo.planner import DemoPlanner
from rfork.demo.screen import Screen, size, weights_line
from rfork.demo.server import HOST, DemoFailed, Server, free_ports

PROMPTS = ("Hello world", "The weights of a model", "def fork(seed):", "1 2 3 4")
NUM_TOKENS = 16
_POLL_S = 0.2
_START_S = 300.0
_ANSWER_S = 120.0
_SLOWEST_DISK = 50e6
"""Bytes a second below which we call a disk stuck, and a digest too."""

COMMON_FLAGS = (
    "--skip-server-warmup",
    "--disable-radix-cache",  # a cached prefix changes the shapes that are computed, and so the last bits
    *("--max-total-tokens", "4096", "--max-running-requests", "8"),
    *("--random-seed", "1"),
)
CPU_FLAGS = ("--sleep-on-idle",)  # else an idle scheduler spins on a core, and the next start takes twice as long
CUDA_FLAGS = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none"),
    "--disable-cuda-graph",
)
SAME_FLAGS = ("--load-format", "remote_instance", "--remote-instance-weight-loader-backend", "transfer_engine")


def fork_flags(port: int) -> tuple[str, ...]:
    """What makes an instance take its weights from the one at `port`."""
    return (
        *SAME_FLAGS,
        *("--remote-instance-weight-loader-seed-instance-ip", HOST),
        *("--remote-instance-weight-loader-seed-instance-service-port", str(port)),
    )


@dataclass
class Story:
    """One run. Leaving its block kills every server and removes what was made; logs stay where something went wrong."""

    screen: Screen
    device: str
    num_gpus: int
    versions: dict[str, str]
    model: Path | None
    model_nbytes: int
    logs: Path | None
    servers: list[Server] = field(default_factory=list)
    planner: DemoPlanner | None = None

    def __enter__(self) -> Story:
        self._started_s = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="rfork-demo-"))
        self._own_logs = self.logs is None
        self._logs = self.logs or self._folder / "logs"
        for path in (self._folder / "tmp", self._logs):
            path.mkdir(parents=True, exist_ok=True)
        self._names: dict[str, str] = {}
        self._steps: dict[str, TaskID | None] = {}
        self._facts: list[InstanceFacts] = []
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as killing:  # one that won't die must not save the others
            for server in self.servers:
                killing.callback(server.kill)
            if self.planner is not None:
                killing.callback(self.planner.kill)
        failed = kind is not None and issubclass(kind, DemoFailed)
        keep = failed and self._own_logs and any(self._logs.iterdir())
        for path in [self._folder / "model", self._folder / "tmp"] if keep else [self._folder]:
            shutil.rmtree(path, ignore_errors=True)

    def tell(self) -> Facts:
        """Run it all. Raises DemoFailed where it can't go on; a check that fails is in the facts."""
        path, nbytes = self._prepare_model()
        port_a, port_b, port_c, port_d, port = free_ports(5)
        far_gpu = 1 if self.num_gpus > 1 else 0
        with self.screen.live():
            planner = self._start_planner(port)
            a = self._start("A", path, port_a, 0, SAME_FLAGS, "asks the planner", planner.url)
            self._wait([a], nbytes)
            self._ask([a], nbytes)
            b = self._start("B", path, port_b, far_gpu, SAME_FLAGS, "by the same command", planner.url)
            self._wait([b], nbytes)
            self._ask([b], nbytes)
            self._kill(a)
            c = self._start("C", path, port_c, 0, fork_flags(port_b), "forks from B")
            d = self._start("D", path, port_d, far_gpu, fork_flags(port_a), "is told to fork from A, which is dead")
            self._wait([c, d], nbytes)
            self._ask([c, d], nbytes)
        checks = check_all(self._facts, nbytes)
        return Facts(
            ok=all(check.ok for check in checks),
            seconds=round(time.monotonic() - self._started_s, 1),
            versions={"rfork": rfork.__version__, **self.versions},
            device=self.device,
            model=str(path) if self.model else f"random Llama, {size(nbytes)}",
            model_nbytes=nbytes,
            prompts=PROMPTS,
            instances=tuple(self._facts),
            checks=checks,
        )

    # -- steps -----------------------------------------------------------------------------------------------------

    def _prepare_model(self) -> tuple[Path, int]:
        if self.model is not None:
            return self.model, models.weights_nbytes(self.model)
        path = self._folder / "model"
        with self.screen.live():
            step = self.screen.begin(f"making a model of at least {size(self.model_nbytes)}")
            started_s = time.monotonic()
            try:
                nbytes = models.make(path, self.model_nbytes)
            except OSError as error:
                what = f"a model of {size(self.model_nbytes)} below {path}"
                raise DemoFailed(f"can't write {what}: {error.strerror}") from error
            took_s = time.monotonic() - started_s
            self.screen.done(step, f"a Llama of {size(nbytes)} with random weights, made in {took_s:.1f} s")
        return path, nbytes

    def _start_planner(self, port: int) -> DemoPlanner:
        step = self.screen.begin(f"a planner starts on port {port}")
        self.planner = DemoPlanner(port, self._environment(), self._logs / "planner.log", self._folder)
        self.planner.wait()
        self.screen.done(step, f"a planner answers at {self.planner.url}")
        return self.planner

    def _start(
        self, name: str, model: Path, port: int, gpu: int, flags: Sequence[str], what: str, planner_url: str = ""
    ) -> Server:
        own = CPU_FLAGS if self.device == "cpu" else (*CUDA_FLAGS, "--base-gpu-id", str(gpu))
        server = Server(
            name,
            port,
            ["--model-path", str(model), *COMMON_FLAGS, *own, *flags],
            env={**self._environment(), **({"RFORK_PLANNER_URL": planner_url} if planner_url else {})},
            log=self._logs / f"{name}.log",
            cwd=self._folder,
            gpu=gpu if self.device == "cuda" else None,
        )
        self.servers.append(server)
        self._steps[name] = self.screen.begin(f"{name} starts on port {port}, {what}")
        return server

    def _environment(self) -> dict[str, str]:
        """The user's, without what would make this another demo."""
        env = {k: v for k, v in os.environ.items() if not k.startswith("RFORK_") and k != "SGLANG_PLUGINS"}
        env |= {
            "RFORK_ADVERTISE_HOST": HOST,
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
            "TMPDIR": str(self._folder / "tmp"),  # SGLang leaves its sockets behind
        }
        if self.device == "cpu":
            env |= {"SGLANG_PLATFORM": "host_cpu", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        return env

    def _wait(self, servers: Sequence[Server], nbytes: int) -> None:
        limit_s = _START_S + nbytes / _SLOWEST_DISK
        waiting = list(servers)
        while waiting:
            for server in list(waiting):
                if server.is_up():
                    waiting.remove(server)
                    assert server.status is not None
                    self._names[server.status.instance_id] = server.name
                    self.screen.done(self._steps.pop(server.name), weights_line(server.name, server, self._names))
                elif server.age_s > limit_s:
                    said = f"its state is {server.status.state}" if server.status else "it does not answer"
                    raise DemoFailed(f"{server.name} is not ready after {server.age_s:.0f} s: {said}", server)
            if waiting:
                self.screen.still(f"{', '.join(s.name for s in waiting)}: {waiting[0].age_s:.0f} s")
                time.sleep(_POLL_S)

    def _ask(self, servers: Sequence[Server], nbytes: int) -> None:
        """Tokens and digests, one server at a time: two would share the cores, and gain nothing."""
        limit_s = _ANSWER_S + nbytes / _SLOWEST_DISK
        for server in servers:
            step = self.screen.begin(f"{server.name} answers {len(PROMPTS)} prompts and digests its weights")
            tokens = tuple(server.generate(prompt, NUM_TOKENS, limit_s) for prompt in PROMPTS)
            checksums = server.checksums(limit_s)
            self._facts.append(_facts_of(server, tokens, checksums))
            got = f"{sum(map(len, tokens))} tokens, and digests of {len(checksums)} tensors"
            self.screen.done(step, f"{server.name} gave {got}")

    def _kill(self, server: Server) -> None:
        count = len(server.pids)
        server.kill()
        self.screen.done(None, f"{server.name} is killed: {count} processes and their memory are gone")


def _facts_of(server: Server, tokens: tuple[tuple[int, ...], ...], checksums: dict[str, str]) -> InstanceFacts:
    status = server.status
    if status is None or status.weights is None:
        raise DemoFailed(f"{server.name} does not say where its weights came from", server)
    flag = "--remote-instance-weight-loader-seed-instance-service-port"
    asked_for = f"{HOST}:{server.argv[server.argv.index(flag) + 1]}" if flag in server.argv else "planner"
    return InstanceFacts(
        name=server.name,
        instance_id=status.instance_id,
        asked_for=asked_for,
        gpu=server.gpu,
        ready_s=round(server.ready_s or 0.0, 2),
        generation=status.generation,
        weights=status.weights,
        tokens=tokens,
        checksums=checksums,
    )
