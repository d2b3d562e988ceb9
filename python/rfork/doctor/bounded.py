"""A probe in a process of its own: whatever it imports or opens, it can't take the doctor along.

`python -m rfork.doctor.bounded MODULE` runs `rfork.doctor.probes.MODULE.probe(config)` and writes its findings to the
descriptor named on the command line; stdout and stderr are free for what libraries print.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence

import msgspec

from rfork.config import Config, load_config
from rfork.demo.processes import tied
from rfork.doctor.finding import Finding, fail
from rfork.errors import ConfigError

_SHOWN_LINES = 3
Probe = Callable[[Config], list[Finding]]


def run_bounded(module: str, argument: str | None, timeout_s: float) -> list[Finding]:
    """The findings of a probe; where it crashes or takes too long, a failure that says so. Never raises."""
    read_fd, write_fd = os.pipe()
    command = ["-m", "rfork.doctor.bounded", module, str(write_fd), argument or ""]
    try:
        child = subprocess.Popen(
            tied(command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=[write_fd],
            start_new_session=True,
        )
    except OSError as error:
        os.close(read_fd)
        os.close(write_fd)
        return [fail(module, f"can't start a process: {error}", "")]
    os.close(write_fd)
    with open(read_fd, "rb") as answer:
        try:
            said, _ = child.communicate(timeout=timeout_s)
        except BaseException as error:
            _kill(child)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            return [fail(module, f"no result after {timeout_s:g} s", f"run `{_shown(command)}` to see where it waits")]
        return _parse(module, answer.read(), child.returncode, said.decode(errors="replace"), command)


def _parse(module: str, data: bytes, status: int, said: str, command: Sequence[str]) -> list[Finding]:
    try:
        return msgspec.json.decode(data, type=list[Finding])
    except msgspec.MsgspecError:
        how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
        lines = [line.strip() for line in said.splitlines() if line.strip()][-_SHOWN_LINES:]
        text = f"the process that looked ended {how}" + (f": {' | '.join(lines)}" if lines else "")
        return [fail(module, text, f"run `{_shown(command)}` to see all that it says")]


def _kill(child: subprocess.Popen[bytes]) -> None:
    os.killpg(child.pid, signal.SIGKILL)
    child.communicate()


def _shown(command: Sequence[str]) -> str:
    return f"{sys.executable} -m rfork.doctor.bounded {command[2]} 1"


def main(module: str, fd: str, argument: str = "") -> None:
    probe: Probe = importlib.import_module(f"rfork.doctor.probes.{module}").probe
    try:
        config = load_config(argument or None)
    except ConfigError:  # a finding of its own; everything else is still worth a look
        config = Config()
    findings = probe(config)
    with open(int(fd), "wb") as out:
        out.write(msgspec.json.encode(findings))
        out.flush()
        # At once: libraries that were looked at may take long, or crash, when the interpreter ends.
        os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
