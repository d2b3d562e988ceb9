"""multiprocessing's "spawn" without its imports: each child is a fork that was made before anything was patched.

SGLang spawns its scheduler and detokenizer, and each of them imports SGLang anew (12 s on two cores). `install()` forks
a few blanks of the current process while it is still as a fresh interpreter would be: everything imported, no plugin
loaded, no thread started. When SGLang later "spawns", a blank is handed what a spawned interpreter is handed on its
command line and pipe, and runs the same standard-library function on it. So the child sees what it sees in production:
pickled arguments, plugins not yet loaded, its own call stack. Only the import time is missing.

When the blanks run out, the real "spawn" takes over: slower and equally right.
"""

import atexit
import io
import json
import os
import socket
import sys
import threading
from dataclasses import dataclass
from multiprocessing import context, forkserver, popen_fork, popen_forkserver, popen_spawn_posix, reduction, spawn, util
from multiprocessing.process import BaseProcess
from multiprocessing.resource_tracker import getfd

MAX_MESSAGE = 1 << 20
MAX_FDS = 64
# These spawn children themselves, so they get blanks of their own.
PARENTS = ("run_data_parallel_controller_process",)


@dataclass(frozen=True)
class Blank:
    pid: int
    channel: socket.socket


_blanks: list[Blank] = []


def install(num_blanks: int) -> None:
    """Fork the blanks, and let this process's "spawn" use them. Call it before any plugin loads or thread starts."""
    assert threading.active_count() == 1, "a fork copies one thread only, and whatever locks the others hold"
    for _ in range(num_blanks):
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            ours.close()
            for blank in _blanks:
                blank.channel.close()
            _blanks.clear()
            leave(_wait_and_become_a_process, theirs, num_blanks)
        theirs.close()
        _blanks.append(Blank(pid, ours))
    context.SpawnProcess._Popen = staticmethod(
        lambda process: (WarmPopen if _blanks else popen_spawn_posix.Popen)(process)
    )


class WarmPopen(popen_fork.Popen):
    """What `popen_spawn_posix.Popen` does, with a blank in the place of a new interpreter."""

    method = "spawn"
    DupFd = popen_forkserver._DupFd  # refers to the n-th descriptor that was sent, where spawn's refers to its number

    def __init__(self, process: BaseProcess) -> None:
        self._fds: list[int] = []
        super().__init__(process)

    def duplicate_for_child(self, fd: int) -> int:
        self._fds.append(fd)
        return len(self._fds) - 1

    def _launch(self, process: BaseProcess) -> None:
        tracker_fd = getfd()
        payload = io.BytesIO()
        context.set_spawning_popen(self)
        try:
            reduction.dump(spawn.get_preparation_data(process._name), payload)
            reduction.dump(process, payload)
        finally:
            context.set_spawning_popen(None)
        target = getattr(getattr(process, "_target", None), "__name__", "")
        message = {"environ": dict(os.environ), "cwd": os.getcwd(), "is_parent": target in PARENTS}
        self.sentinel, alive = os.pipe()  # closed by the child's death, whatever its cause
        pipe, feed = os.pipe()
        blank = _blanks.pop(0)
        socket.send_fds(blank.channel, [json.dumps(message).encode()], [pipe, tracker_fd, alive, *self._fds])
        blank.channel.close()
        os.close(pipe)
        os.close(alive)
        self.pid = blank.pid
        self.finalizer = util.Finalize(self, util.close_fds, (self.sentinel, feed))
        with open(feed, "wb", closefd=False) as file:
            file.write(payload.getbuffer())


def _wait_and_become_a_process(channel: socket.socket, num_blanks: int) -> None:
    data, fds, _, _ = socket.recv_fds(channel, MAX_MESSAGE, MAX_FDS)
    channel.close()
    if not data:  # the parent is gone, or never needed this one
        return
    pipe, tracker_fd, _alive, *inherited = fds
    message = json.loads(data)
    os.environ.clear()
    os.environ.update(message["environ"])
    os.chdir(message["cwd"])
    context.SpawnProcess._Popen = staticmethod(popen_spawn_posix.Popen)
    if message["is_parent"]:
        install(num_blanks)
    forkserver._forkserver._inherited_fds = inherited
    sys.argv = [sys.argv[0], "--multiprocessing-fork"]
    spawn.spawn_main(pipe_handle=pipe, tracker_fd=tracker_fd)


def leave(function, *args) -> None:
    """Run `function` as an interpreter runs a program, and end the process as an interpreter ends. Never returns."""
    status = 1
    try:
        try:
            function(*args)
            status = 0
        except SystemExit as request:
            status = _exit_status(request.code)
        except BaseException:
            # Kept as the interpreter keeps them: what their frames hold is not to be collected while it shuts down.
            sys.last_type, sys.last_value, sys.last_traceback = sys.exc_info()
            sys.excepthook(*sys.exc_info())
        threading._shutdown()
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
    finally:
        os._exit(status)


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1
