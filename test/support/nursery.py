"""The process that all test servers are children of: it starts them, reports how they end, and outlives none of them.

`main` gets one end of a socket. It reads requests and writes events, each a JSON object on a line:

    {"id": 1, "how": "warm" | "cold", "module": "sglang.launch_server" | "script": "/path.py", "argv": [...],
     "env": {...}, "cwd": "...", "log": "/path", "num_blanks": 3}      start one         -> {"id": 1, "pid": 17}
                                                               it ended (or was killed) -> {"id": 1, "status": -9}
    {"release": 1}                                                     forget it, so that its pid may be used again

"cold" is a new interpreter, as users start SGLang. "warm" is a fork of this process, which imports SGLang on the first
such request and never loads a plugin itself; see warm_spawn.py for how SGLang's own children come about then. When the
other end of the socket closes, however that came about, every server still there is killed and the nursery ends.

A child that ended stays a zombie until it is released: its pid, which is also its session's id, can't be given to
another process meanwhile, so that killing "what is left of that session" is always safe.
"""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
import threading
import time
from typing import Any

import setproctitle

from support import warm_spawn

# Now: it can't find where the title lies once the environment has been changed, as each server does.
setproctitle.getproctitle()

# What SGLang's processes import by the time they are ready. Names that a release lacks are skipped.
IMPORTS = (
    "sglang.srt.server_args",
    "sglang.launch_server",
    "sglang.srt.entrypoints.engine",
    "sglang.srt.entrypoints.http_server",
    "sglang.srt.managers.scheduler",
    "sglang.srt.managers.tp_worker",
    "sglang.srt.managers.detokenizer_manager",
    "sglang.srt.managers.data_parallel_controller",
    "sglang.srt.model_executor.model_runner",
    "sglang.srt.layers.attention.torch_native_backend",
    "sglang.srt.mem_cache.registry",
)


def main(control_fd: int) -> None:
    Nursery(socket.socket(fileno=control_fd)).run()


class Nursery:
    def __init__(self, control: socket.socket) -> None:
        self.control = control
        self.children: dict[int, int] = {}  # request id -> pid
        self.ended: set[int] = set()
        self.imported = False

    def run(self) -> None:
        wake, wake_fd = socket.socketpair()
        wake.setblocking(False)
        wake_fd.setblocking(False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a Ctrl-C is pytest's to handle
        signal.set_wakeup_fd(wake_fd.fileno(), warn_on_full_buffer=False)
        selector = selectors.DefaultSelector()
        selector.register(self.control, selectors.EVENT_READ)
        selector.register(wake, selectors.EVENT_READ)
        buffer = b""
        while True:
            ready = {key.fileobj for key, _ in selector.select()}
            if wake in ready:
                wake.recv(4096)
                self.report_ends()
            if self.control in ready:
                chunk = self.control.recv(65536)
                if not chunk:
                    break
                *lines, buffer = (buffer + chunk).split(b"\n")
                for line in lines:
                    self.handle(json.loads(line))
        for pid in self.children.values():
            kill_session(pid)

    def handle(self, request: dict[str, Any]) -> None:
        if "release" in request:
            pid = self.children.pop(request["release"])
            self.ended.discard(request["release"])
            os.waitpid(pid, 0)
            return
        if request["how"] == "warm":
            self.import_sglang()
        ready, said = os.pipe()
        pid = os.fork()
        if pid == 0:
            os.close(ready)
            self.become(request, said)
        os.close(said)
        os.read(ready, 1)  # until its session is its own: who hears of the pid may ask for the session at once
        os.close(ready)
        self.children[request["id"]] = pid
        self.send({"id": request["id"], "pid": pid})

    def report_ends(self) -> None:
        for id, pid in self.children.items():
            if id in self.ended:
                continue
            end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if end is not None:
                self.ended.add(id)
                self.send({"id": id, "status": end.si_status if end.si_code == os.CLD_EXITED else -end.si_status})

    def send(self, event: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # if the other end is gone, the main loop is about to read that too
            self.control.sendall(json.dumps(event).encode() + b"\n")

    def import_sglang(self) -> None:
        if self.imported:
            return
        started = time.monotonic()
        for name in IMPORTS:
            try:
                importlib.import_module(name)
            except ModuleNotFoundError as error:
                if error.name not in IMPORTS:
                    raise
        from sglang.srt.models import registry

        # Every model file: SGLang imports all of them to find one.
        getattr(registry, "import_model_classes", lambda _: None)("sglang.srt.models")
        gc.collect()
        gc.freeze()  # keeps the collector of each fork from touching, and so copying, every page
        assert threading.active_count() == 1, threading.enumerate()
        self.imported = True
        print(f"nursery: imported SGLang in {time.monotonic() - started:.1f} s", file=sys.stderr, flush=True)

    def become(self, request: dict[str, Any], said: int) -> None:
        """In the child: turn into the server that was asked for. Never returns."""
        os.setsid()
        os.close(said)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        self.control.close()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.chdir(request["cwd"])
        os.environ.update(request["env"])
        cold = request["how"] == "cold"
        warm_spawn.leave(self.exec_program if cold else self.run_program, request)

    def exec_program(self, request: dict[str, Any]) -> None:
        program = ["-m", request["module"]] if "module" in request else [request["script"]]
        os.execv(sys.executable, [sys.executable, *program, *request["argv"]])

    def run_program(self, request: dict[str, Any]) -> None:
        import numpy

        sys.path.insert(0, request["cwd"])
        numpy.random.seed()  # Python's own generator seeds itself anew in a fork, this one does not
        sys.modules.pop(request.get("module"), None)  # it is about to become __main__
        setproctitle.setproctitle("warm blank")
        warm_spawn.install(request["num_blanks"])
        setproctitle.setproctitle(" ".join(["warm", request.get("module") or request["script"], *request["argv"]]))
        if "module" in request:
            sys.argv = [request["module"], *request["argv"]]
            runpy.run_module(request["module"], run_name="__main__", alter_sys=True)
        else:
            sys.argv = [request["script"], *request["argv"]]
            runpy.run_path(request["script"], run_name="__main__")


def session_pids(session: int) -> list[int]:
    """Return the processes of a session that are alive; zombies don't count."""
    pids = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            with open(f"/proc/{entry}/stat") as file:
                state, _, _, sid = file.read().rpartition(")")[2].split()[:4]
        except (OSError, ValueError):
            continue  # it ended while we looked
        if int(sid) == session and state not in "ZX":
            pids.append(int(entry))
    return pids


def kill_session(session: int) -> None:
    """Kill every process of a session, and those that they start meanwhile. Returns when none is left."""
    while pids := session_pids(session):
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)
