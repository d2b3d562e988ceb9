"""Make the environment that the demo, the tests and development run in; quick when nothing has changed.

    $ python3 tools/setup.py              # .venv, or where RFORK_VENV says, with SGLang 0.5.23
    $ python3 tools/setup.py --tests      # and what only tests need
    $ python3 tools/setup.py --lock requirements/sglang-0.5.16.txt --venv .venv-0.5.16

Needs Python 3.11 or later and nothing else. What is installed is what the lock says, to the version; a stamp in the
environment names the lock and the checkout that it was made for, and as long as they match there is nothing to do.
"""

import argparse
import ctypes
import fcntl
import hashlib
import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REQUIREMENTS = ROOT / "requirements"
STAMP = ".rfork-setup.json"
# What an editable install is made of: when one of these changes, it is made again.
METADATA = ("pyproject.toml", "setup.py", "platforms/host_cpu/pyproject.toml")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lock", type=Path, default=REQUIREMENTS / "sglang-0.5.23.txt", help="versions to install")
    parser.add_argument("--venv", type=Path, default=Path(os.environ.get("RFORK_VENV") or ROOT / ".venv"))
    parser.add_argument("--tests", action="store_true", help="also install the system packages that only tests need")
    options = parser.parse_args()
    if sys.version_info < (3, 11):  # noqa: UP036 (nothing has checked this before us)
        raise SystemExit(f"R-Fork needs Python 3.11 or later; {sys.executable} is {platform.python_version()}")
    install_system_packages({"run", "test"} if options.tests else {"run"})
    venv = options.venv.absolute()
    venv.parent.mkdir(parents=True, exist_ok=True)
    with only_one_at_a_time(venv):
        bring_up_to_date(venv, options.lock.resolve())


def bring_up_to_date(venv: Path, lock: Path) -> None:
    wanted = {
        "lock": digest([lock]),
        "python": platform.python_version(),
        "checkout": str(ROOT),
        "metadata": digest([ROOT / name for name in METADATA]),
    }
    stamp = venv / STAMP
    found = json.loads(stamp.read_text()) if stamp.exists() else {}
    if found == wanted:
        return
    started = time.monotonic()
    if any(found.get(key) != wanted[key] for key in ("lock", "python")):
        stamp.unlink(missing_ok=True)  # from here on the environment is neither the old nor the new
        say(f"making {venv}")
        run([sys.executable, "-m", "venv", "--clear", venv])
        say(f"installing {lock.name} (6 GB, mostly torch; a minute or a few)")
        install_lock(venv, lock)
    say("installing this checkout")
    pip(
        venv,
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--editable",
        ROOT,
        "--editable",
        ROOT / "platforms/host_cpu",
    )
    stamp.write_text(json.dumps(wanted, indent=1))
    say(f"done in {time.monotonic() - started:.0f} s")


def install_lock(venv: Path, lock: Path) -> None:
    """Install exactly the lock, with uv for speed, or else with pip, which knows this machine's settings."""
    uv = next(line for line in lock.read_text().splitlines() if line.startswith("uv=="))
    pip(venv, "install", uv)
    quick = [venv / "bin/uv", "pip", "install", "--quiet", "--python", venv / "bin/python", "--no-deps", "-r", lock]
    if subprocess.run(quick, check=False).returncode != 0:
        say("uv could not; trying pip, which knows this machine's own settings")
        pip(venv, "install", "--no-deps", "-r", lock)
    # Else the first server compiles these while it starts, in each of its processes at once, and takes twice as long.
    site = next((venv / "lib").glob("python3.*")) / "site-packages"
    large = [site / name for name in ("sglang", "torch", "transformers", "triton")]
    subprocess.run([venv / "bin/python", "-m", "compileall", "-q", "-q", "-j", "0", *large], check=False)


def pip(venv: Path, *arguments: str | Path) -> None:
    run([venv / "bin/python", "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments])


def run(command: list[str | Path]) -> None:
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"setup: failed: {' '.join(map(str, command))}")


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def digest(files: list[Path]) -> str:
    return hashlib.sha256(b"\0".join(file.read_bytes() for file in files)).hexdigest()


@contextmanager
def only_one_at_a_time(venv: Path) -> Iterator[None]:
    with venv.with_name(venv.name + ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# --------------------------------------------------------------------------------------------------------------------
# What comes from the system


def install_system_packages(purposes: set[str]) -> None:
    missing = [package for package, probe, purpose in system_packages() if purpose in purposes and not present(probe)]
    if not missing:
        return
    install = ["apt-get", "install", "--yes", "--no-install-recommends", *missing]
    if shutil.which("apt-get") is None:
        say(f"not found: {', '.join(missing)} (Debian's names). Install what this system calls them, then try again.")
    elif os.geteuid() != 0:
        raise SystemExit(
            f"setup: system packages are missing. Run this, then try again:\n\n    sudo {' '.join(install)}\n"
        )
    else:
        say(f"installing {' '.join(missing)}")
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        for command in (["apt-get", "update", "--quiet", "--quiet"], [*install, "--quiet", "--quiet"]):
            if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=False).returncode != 0:
                raise SystemExit(f"setup: failed: {' '.join(command)}")


def system_packages() -> Iterator[tuple[str, str, str]]:
    for line in (REQUIREMENTS / "debian.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            package, probe, purpose, _why = line.split(maxsplit=3)
            yield package, probe, purpose


def present(probe: str) -> bool:
    kind, _, name = probe.partition(":")
    if kind == "program":
        return shutil.which(name) is not None
    if kind == "module":
        return importlib.util.find_spec(name) is not None
    try:
        ctypes.CDLL(name)
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
