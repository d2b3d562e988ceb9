"""Real SGLang servers for tests: `Fleet` starts them, `Server` is one of them.

    with Fleet(folder) as fleet:
        seed = fleet.start(models.path("llama"))
        client = fleet.start(models.path("llama"), *fork_flags, env={"RFORK_SEEDS": seed.address})
        assert client.generate("hello") == seed.generate("hello")

All servers of a fleet are gone when its block ends, however it ends.
"""

import contextlib
import itertools
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import httpx
import psutil

from support.nursery import kill_session, session_pids
from support.ports import PortBlock, lend

HOST = "127.0.0.1"
READY_S = 120.0
STOP_S = 30.0
POLL_S = 0.05

BASE_ENV = {
    "SGLANG_PLATFORM": "host_cpu",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    # Servers share few cores: two threads each are slower than one, and spin while they wait for each other.
    "OMP_NUM_THREADS": "1",
}

# In `env`: SGLang as released, without R-Fork.
STOCK = {"SGLANG_PLUGINS": "host_cpu"}

MODULE = "sglang.launch_server"

# What `pip install sglang` puts beside the interpreter; `sglang serve` is the newer way to start a server.
SGLANG = Path(sys.executable).with_name("sglang")

# What makes a server quick to start, small and quiet. Each is SGLang's own flag.
FLAGS = (
    "--skip-server-warmup",
    "--sleep-on-idle",  # else an idle scheduler spins on a core, and the next server takes twice as long to start
    "--disable-radix-cache",  # a cached prefix changes the shapes that are computed, and so the last bits
    *("--max-total-tokens", "2048", "--max-running-requests", "8"),
    *("--random-seed", "1"),
)


class ServerFailed(AssertionError):
    """A server did not do what the test waited for. The message ends with the end of its log."""


@dataclass(frozen=True)
class Generation:
    """What one request generated; compare `tokens`, since text hides ids that no character stands for."""

    tokens: tuple[int, ...]
    text: str


@dataclass
class Server:
    """One running `python -m sglang.launch_server`; `pid` is its main process, whose session holds all the others."""

    name: str
    port: int
    block: PortBlock = field(repr=False)
    log_path: Path = field(repr=False)
    pid: int
    _child: "Child" = field(repr=False)

    def __post_init__(self) -> None:
        # trust_env: no proxy of the machine's gets between us and 127.0.0.1.
        self.http = httpx.Client(base_url=self.url, trust_env=False, timeout=60)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    @property
    def url(self) -> str:
        return f"http://{self.address}"

    # -- asking it -------------------------------------------------------------------------------------------------

    def get(self, path: str, **kwargs: Any) -> httpx.Response:
        return self.http.get(path, **kwargs)

    def post(self, path: str, body: Any = None, **kwargs: Any) -> httpx.Response:
        return self.http.post(path, json={} if body is None else body, **kwargs)

    def generate(self, prompt: str | list[int] = "hello world", *, num_tokens: int = 16, **sampling: Any) -> Generation:
        """Decode greedily, past any end token, and return the tokens."""
        ask = {"input_ids": prompt} if isinstance(prompt, list) else {"text": prompt}
        params = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True, **sampling}
        response = self.post("/generate", {**ask, "sampling_params": params})
        if response.status_code != 200:
            raise self.failure(f"/generate answered {response.status_code}: {response.text[:500]}")
        answer = response.json()
        return Generation(tuple(answer["output_ids"]), answer["text"])

    # -- its life --------------------------------------------------------------------------------------------------

    @property
    def returncode(self) -> int | None:
        """The main process's exit status, -N if signal N ended it, None while it runs."""
        return self._child.status

    def is_ready(self) -> bool:
        try:
            return self.get("/model_info", timeout=5).status_code == 200
        except httpx.TransportError:
            return False

    def wait_until_ready(self, deadline_s: float = READY_S) -> Self:
        """Return once it answers; raise as soon as it can't any more (it ended), or at the deadline."""
        return self.wait_for("to be ready", self.is_ready, deadline_s)

    def wait_for(self, what: str, condition: Any, deadline_s: float) -> Self:
        """Poll a condition of this server while it lives; `what` completes "did not come"."""
        deadline = time.monotonic() + deadline_s
        while not condition():
            if self.returncode is not None:
                raise self.failure(f"ended with status {self.returncode} while the test waited for it {what}")
            if time.monotonic() > deadline:
                raise self.failure(f"took longer than {deadline_s:g} s {what}")
            time.sleep(POLL_S)
        return self

    def wait_for_log(self, text: str, deadline_s: float = READY_S) -> Self:
        return self.wait_for(f"to log {text!r}", lambda: text in self.log(), deadline_s)

    def wait_until_ended(self, deadline_s: float = STOP_S) -> int:
        """Return the main process's exit status."""
        if not self._child.ended.wait(deadline_s):
            raise self.failure(f"was still running after {deadline_s:g} s")
        assert self.returncode is not None
        return self.returncode

    def terminate(self, deadline_s: float = STOP_S) -> int:
        """Ask the main process to stop, as an orchestrator does, wait until it has, and return its exit status."""
        if self.returncode is None:
            os.kill(self.pid, signal.SIGTERM)
        return self.wait_until_ended(deadline_s)

    def kill(self) -> None:
        """End all its processes at once, as a lost node does. Returns when none is left."""
        kill_session(self.pid)
        self._child.ended.wait(STOP_S)

    def signal(self, number: signal.Signals, role: str | None = None) -> None:
        """Send a signal to all its processes, or to those of a role ("scheduler", "detokenizer")."""
        for process in self.processes(role):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    @contextlib.contextmanager
    def frozen(self) -> Iterator[None]:
        """Stop all its processes for a while: it neither answers nor ends, and its memory stays readable."""
        self.signal(signal.SIGSTOP)
        try:
            self.wait_for("to stop", self._is_stopped, STOP_S)
            yield
        finally:
            self.signal(signal.SIGCONT)

    def _is_stopped(self) -> bool:
        try:
            return {process.status() for process in self.processes()} == {psutil.STATUS_STOPPED}
        except psutil.NoSuchProcess:
            return False  # one of them has just ended

    def processes(self, role: str | None = None) -> list[psutil.Process]:
        """Return its live processes; SGLang titles them `sglang::scheduler_TP0` and the like."""
        found = []
        for pid in session_pids(self.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                if role is None or f"sglang::{role}" in " ".join(process.cmdline()):
                    found.append(process)
        return found

    # -- its story -------------------------------------------------------------------------------------------------

    def log(self) -> str:
        return self.log_path.read_text(errors="replace")

    def failure(self, message: str, num_lines: int = 60) -> ServerFailed:
        tail = "\n".join(self.log().splitlines()[-num_lines:])
        return ServerFailed(f"{self.name} (port {self.port}) {message}\n--- end of {self.log_path}:\n{tail}")


class Fleet:
    """The servers of a test, a module or a session; leaving its block kills what is left of them."""

    def __init__(self, folder: Path, nursery: "Nursery | None" = None, env: Mapping[str, str] | None = None) -> None:
        self.folder = folder
        self.env = dict(env or {})
        self.servers: list[Server] = []
        self._own_nursery = nursery is None
        self._nursery = nursery or Nursery(folder)

    def start(
        self,
        model: Path | str,
        *flags: str,
        env: Mapping[str, str] | None = None,
        cold: bool = False,
        serve: bool = False,
        wait: bool = True,
        name: str | None = None,
        defaults: tuple[str, ...] = FLAGS,
        deadline_s: float = READY_S,
    ) -> Server:
        """Start a server and, with `wait`, return once it answers.

        `flags` follow `defaults`. `cold` starts a new interpreter, as users do, instead of forking the warm one.
        `serve` starts it as `sglang serve` instead of `python -m sglang.launch_server`.
        `env` adds to `BASE_ENV`; a variable that SGLang reads while it is imported takes effect in cold starts only.
        """
        block = lend()
        argv = ["--model-path", str(model), "--host", HOST, "--port", str(block.port), *defaults, *flags]
        program = {"script": str(SGLANG), "argv": ["serve", *argv]} if serve else {"module": MODULE, "argv": argv}
        server = self._launch(program, block, name or Path(model).name, env, cold, flags)
        return server.wait_until_ready(deadline_s) if wait else server

    def start_script(
        self,
        script: Path,
        *argv: str,
        env: Mapping[str, str] | None = None,
        cold: bool = False,
        name: str | None = None,
    ) -> Server:
        """Run a Python program (an offline `Engine`, say) as a server is run; it is up to the test to wait for it."""
        return self._launch({"script": str(script), "argv": list(argv)}, lend(), name or script.stem, env, cold, ())

    def _launch(
        self,
        program: dict[str, Any],
        block: PortBlock,
        name: str,
        env: Mapping[str, str] | None,
        cold: bool,
        flags: tuple[str, ...],
    ) -> Server:
        name = f"{len(self.servers)}-{name}"
        log_path = self.folder / f"{name}.log"
        log_path.write_text("")
        request = {
            **program,
            "how": "cold" if cold else "warm",
            "env": {**self.env, **(env or {})},
            "cwd": str(self.folder),
            "log": str(log_path),
            "num_blanks": num_processes(flags),
        }
        child = self._nursery.start(request)
        server = Server(name, block.port, block, log_path, child.pid, child)
        self.servers.append(server)
        return server

    @contextlib.contextmanager
    def visited(self) -> Iterator[Self]:
        """Servers that are started inside the block are gone after it; those from before stay."""
        before = list(self.servers)
        try:
            yield self
        finally:
            for server in self.servers:
                if server not in before:
                    server.kill()

    def stop(self) -> None:
        """Kill what is left of every server, and give the ports back."""
        while self.servers:
            server = self.servers.pop()
            server.kill()
            server.http.close()
            server.block.release()
            self._nursery.release(server._child)
        if self._own_nursery:
            self._nursery.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def num_processes(flags: tuple[str, ...]) -> int:
    """Return how many processes SGLang will spawn for these flags, or a few more."""
    sizes = {"--tp": 1, "--pp": 1, "--dp": 1, "--tokenizer-worker-num": 0}
    for flag, value in itertools.pairwise(flags):
        for known in sizes:
            if flag in (known, f"{known}-size") and value.isdigit():
                sizes[known] = int(value)
    return sizes["--tp"] * sizes["--pp"] * sizes["--dp"] + sizes["--tokenizer-worker-num"] + 2


@dataclass
class Child:
    """A process that the nursery started."""

    id: int
    pid: int = 0
    status: int | None = None
    ended: threading.Event = field(default_factory=threading.Event)


class Nursery:
    """This side of nursery.py: starts it, and turns its events into the state of `Child` objects."""

    def __init__(self, folder: Path) -> None:
        ours, theirs = socket.socketpair()
        program = f"""
import sys
sys.path[0] = {str(Path(__file__).parents[1])!r}
from support.nursery import main
del sys.path[0]  # servers must not see the tests' modules
main({theirs.fileno()})
"""
        self._log = (folder / "nursery.log").open("ab")
        self._process = subprocess.Popen(
            [sys.executable, "-c", program],
            pass_fds=[theirs.fileno()],
            env={**os.environ, **BASE_ENV},
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=self._log,
            start_new_session=True,
        )
        theirs.close()
        self._control = ours
        self._ids = itertools.count()
        self._children: dict[int, Child] = {}
        self._started: queue.Queue[Child | None] = queue.Queue()
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, name="nursery-reader", daemon=True)
        self._reader.start()

    def start(self, request: dict[str, Any], deadline_s: float = 120) -> Child:
        with self._lock:
            child = Child(next(self._ids))
            self._children[child.id] = child
            self._send({"id": child.id, **request})
            if self._started.get(timeout=deadline_s) is not child:
                raise RuntimeError(f"the nursery ended: {Path(self._log.name).read_text()[-4000:]}")
            return child

    def release(self, child: Child) -> None:
        """Forget a child that has ended."""
        if child.ended.wait(STOP_S):
            del self._children[child.id]
            self._send({"release": child.id})

    def stop(self) -> None:
        self._control.shutdown(socket.SHUT_WR)
        self._process.wait(STOP_S)
        self._reader.join(STOP_S)
        self._control.close()
        self._log.close()

    def _send(self, message: dict[str, Any]) -> None:
        self._control.sendall(json.dumps(message).encode() + b"\n")

    def _read(self) -> None:
        for line in self._control.makefile():
            event = json.loads(line)
            child = self._children[event["id"]]
            if "pid" in event:
                child.pid = event["pid"]
                self._started.put(child)
            else:
                child.status = event["status"]
                child.ended.set()
        self._started.put(None)
