"""Processes that never outlive us: each starts a session of its own, and ends with it or with us."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

_KILL_WAIT_S = 15.0
_TRACKER_WAIT_S = 3.0

_TIED = (
    "import ctypes, os, signal, sys\n"
    "ctypes.CDLL(None).prctl(1, signal.SIGKILL)\n"  # PR_SET_PDEATHSIG, kept over exec: not even SIGKILL orphans it
    "os.getppid() == int(sys.argv[1]) or sys.exit('the parent is gone')\n"
    "os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n"
)


def tied(python_args: Sequence[str]) -> list[str]:
    """The command of this Python with `python_args` as a child that is killed when the thread that starts it ends."""
    return [sys.executable, "-c", _TIED, str(os.getpid()), *python_args]


class Group:
    """One child and all that it starts, in one session. Its pid names the session as long as we have not reaped it."""

    def __init__(self, python_args: Sequence[str], env: Mapping[str, str], log: Path, cwd: Path) -> None:
        """Start this Python with `python_args`, output to `log`. Only in the main thread: the child is tied to it."""
        with log.open("wb") as out:
            self._process = subprocess.Popen(
                tied(python_args),
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._process.pid

    @property
    def ended(self) -> str | None:
        """How the child ended, None while it runs. It stays unreaped, so that its pid stays ours."""
        if self._process.returncode is not None:
            return _shown(self._process.returncode)
        found = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if found is None:
            return None
        return _shown(found.si_status if found.si_code == os.CLD_EXITED else -found.si_status)

    def members(self) -> list[int]:
        """Live processes of the session."""
        return [] if self._process.returncode is not None else session_members(self.pid)

    def kill(self) -> None:
        """End all of them, as a power cut would, and wait until none is left. Raises TimeoutError if one stays."""
        if self._process.returncode is not None:
            return
        started_s = time.monotonic()
        while members := self.members():
            age_s = time.monotonic() - started_s
            if age_s > _KILL_WAIT_S:
                raise TimeoutError(f"processes {members} are still there {_KILL_WAIT_S:g} s after SIGKILL")
            for pid in members:
                if age_s > _TRACKER_WAIT_S or not _is_tracker(pid):
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)
        self._process.wait(_KILL_WAIT_S)


def session_members(session: int) -> list[int]:
    """Live processes (no zombies) of a session."""
    found = []
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        with contextlib.suppress(OSError, ValueError, IndexError):
            state, _parent, _group, of = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[:4]
            if int(of) == session and state not in "ZX":
                found.append(int(entry))
    return found


def _is_tracker(pid: int) -> bool:
    """Python's resource tracker: it removes the semaphores of the dead, and ends by itself once all of them are."""
    with contextlib.suppress(OSError):
        return b"multiprocessing.resource_tracker" in Path(f"/proc/{pid}/cmdline").read_bytes()
    return False


def _shown(returncode: int) -> str:
    if returncode >= 0:
        return f"with status {returncode}"
    with contextlib.suppress(ValueError):
        return f"by {signal.Signals(-returncode).name}"
    return f"by signal {-returncode}"


class Stopped(BaseException):
    """The user, or whoever runs us, wants us to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextlib.contextmanager
def stopped_by_signals(numbers: Sequence[signal.Signals]) -> Iterator[None]:
    """Turn these signals into `Stopped` in the main thread, once; those that follow change nothing, as we clean up."""

    def stop(number: int, _frame: object) -> None:
        for each in numbers:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
