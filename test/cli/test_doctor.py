"""The doctor on this environment, and on environments that are broken for real.

Not here: a system library that is missing. Hiding one from a process needs root or a compiler; the words for it are
tested with the transport.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from cli.environments import distribution, first_on_path, package, python_without, run_rfork

from rfork.doctor.bounded import run_bounded
from rfork.doctor.checkup import PROBES
from rfork.doctor.finding import Finding, Level
from rfork.doctor.probes.mooncake import LIBRARIES, missing_packages
from rfork.transports.mooncake_import import DEBIAN_PACKAGES

SUBJECTS = (
    "Python",
    "configuration",
    "plugin",
    "platform",
    "SGLang",
    "hooks",
    "Mooncake",
    "GPUs",
    "RDMA",
    "address",
    "ports",
)
PROBE_S = 150.0


@pytest.fixture
def ask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., list[Finding]]:
    """Run one probe, with variables and with files before everything that is installed."""

    def ask(module: str, *, timeout_s: float = PROBE_S, **env: str) -> list[Finding]:
        for name, value in {"SGLANG_PLATFORM": "host_cpu", "PYTHONPATH": first_on_path(tmp_path), **env}.items():
            monkeypatch.setenv(name, value)
        return run_bounded(module, None, timeout_s)

    return ask


def failures(findings: list[Finding]) -> list[Finding]:
    return [finding for finding in findings if finding.level is Level.FAIL]


def command_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []  # it ended, or is a zombie: either way it runs nothing


@pytest.mark.timeout(300)
def test_this_environment_is_fine() -> None:
    done = run_rfork("doctor", "--json", env={"SGLANG_PLATFORM": "host_cpu", "RFORK_ADVERTISE_HOST": "127.0.0.1"})
    report = json.loads(done.stdout)
    assert [f for f in report["findings"] if f["level"] == "fail"] == []
    assert report["ok"] is True
    assert done.returncode == 0
    subjects = [f["subject"] for f in report["findings"]]
    assert set(SUBJECTS) <= set(subjects)
    loopback = next(f for f in report["findings"] if f["subject"] == "loop-back")
    assert loopback["text"].startswith("tcp at 127.0.0.1: 1024 bytes read and compared")


@pytest.mark.timeout(300)
def test_a_wrong_setting_fails_and_the_rest_is_still_looked_at(tmp_path: Path) -> None:
    """Here without SGLang and Mooncake too, so that it says all that is missing in one go."""
    python = python_without(tmp_path / "venv")
    done = run_rfork("doctor", python=python, env={"RFORK_FALBACK": "auto", "SGLANG_PLATFORM": ""})
    assert done.returncode == 1
    assert "✗ configuration RFORK_FALBACK: unknown key 'falback'; did you mean 'fallback'?" in done.stdout
    assert "✗ SGLang" in done.stdout
    assert "→ pip install 'sglang>=0.5.16,<0.5.24'" in done.stdout
    assert "✗ Mooncake" in done.stdout
    assert "sglang-rfork[cpu]" in done.stdout
    assert "✗ loop-back" in done.stdout
    assert "forks won't work here" in done.stdout


class TestPlugin:
    def test_a_filter_that_leaves_it_out(self, ask: Callable[..., list[Finding]]) -> None:
        (finding,) = failures(ask("plugin", SGLANG_PLUGINS="host_cpu,other"))
        assert "SGLANG_PLUGINS=host_cpu,other leaves 'rfork' out" in finding.text
        assert "add rfork to SGLANG_PLUGINS" in finding.remedy

    def test_a_filter_that_names_it(self, ask: Callable[..., list[Finding]]) -> None:
        assert failures(ask("plugin", SGLANG_PLUGINS="host_cpu, rfork")) == []

    def test_a_platform_that_is_not_installed(self, ask: Callable[..., list[Finding]]) -> None:
        (finding,) = failures(ask("plugin", SGLANG_PLATFORM="nowhere"))
        assert (
            "SGLANG_PLATFORM=nowhere names no platform plugin that is installed (installed: host_cpu)" in finding.text
        )


class TestSGLang:
    @pytest.mark.parametrize("version", ["0.9.0", "0.5.15.post1", "0.5.24"])
    def test_a_release_without_a_table(self, version: str, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        distribution(tmp_path, "sglang", version)
        (finding,) = failures(ask("sglang"))
        assert finding.text.startswith(f"SGLang {version} is installed; ")
        assert finding.remedy == "pip install 'sglang>=0.5.16,<0.5.24'"

    def test_names_that_are_gone(self, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        """A release that claims to be one we know, and is not."""
        distribution(tmp_path, "sglang", "0.5.23")
        package(tmp_path, {"sglang/__init__.py": "", "sglang/srt/__init__.py": "", "sglang/srt/server_args.py": ""})
        (finding,) = failures(ask("sglang"))
        assert finding.subject == "hooks"
        assert "sglang.srt.server_args.ServerArgs.add_cli_args (arguments.add) is not there" in finding.text
        assert "and" in finding.text
        assert "more" in finding.text


class TestMooncake:
    def test_two_wheels_fight(self, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        distribution(tmp_path, "mooncake-transfer-engine", "0.3.13")
        (finding,) = failures(ask("mooncake"))
        assert (
            "2 wheels overwrite each other's files: mooncake-transfer-engine 0.3.13 and mooncake-transfer-engine-"
            in finding.text
        )
        assert finding.remedy.startswith("pip uninstall mooncake-transfer-engine mooncake-transfer-engine-")

    def test_a_wheel_that_is_too_old(self, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        package(tmp_path, {"mooncake/__init__.py": "", "mooncake/engine.py": "class TransferEngine: pass"})
        (finding,) = failures(ask("mooncake"))
        assert "is too old" in finding.text

    def test_every_system_library_is_known_by_its_package(self) -> None:
        assert missing_packages() == []
        packages = {DEBIAN_PACKAGES[library.partition(".")[0]] for library in LIBRARIES}
        assert packages == {"libibverbs1", "librdmacm1", "libnuma1", "libcurl4"}


class TestHazards:
    def test_a_library_that_aborts_ends_its_probe_only(self, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        code = "import os, sys\nprint('terminate called', file=sys.stderr, flush=True)\nos.abort()"
        package(tmp_path, {"mooncake/__init__.py": "", "mooncake/engine.py": code})
        (finding,) = failures(ask("mooncake"))
        assert finding.text == "the process that looked ended by SIGABRT: terminate called"
        assert "-m rfork.doctor.bounded mooncake 1" in finding.remedy

    def test_a_library_that_hangs_is_left_behind(self, ask: Callable[..., list[Finding]], tmp_path: Path) -> None:
        package(tmp_path, {"mooncake/__init__.py": "", "mooncake/engine.py": "import time\ntime.sleep(600)"})
        (finding,) = failures(ask("mooncake", timeout_s=4.0))
        assert finding.text == "no result after 4 s"
        assert [child for child in psutil.Process().children() if "rfork.doctor.bounded" in command_of(child)] == []

    def test_the_command_of_a_probe_can_be_run_by_hand(self) -> None:
        command = [sys.executable, "-m", "rfork.doctor.bounded", "network", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert {f["subject"] for f in json.loads(done.stdout)} >= {"address", "ports"}


class TestNetwork:
    def test_loopback_is_a_warning(self, ask: Callable[..., list[Finding]]) -> None:
        address = next(f for f in ask("network", RFORK_ADVERTISE_HOST="127.0.0.1") if f.subject == "address")
        assert address.level is Level.WARN
        assert "only clients on this host" in address.remedy

    def test_an_address_to_listen_on_is_none_to_reach(self, ask: Callable[..., list[Finding]]) -> None:
        (finding,) = failures(ask("network", RFORK_ADVERTISE_HOST="0.0.0.0"))
        assert "an address to listen on" in finding.text

    def test_a_name_that_does_not_resolve(self, ask: Callable[..., list[Finding]]) -> None:
        (finding,) = failures(ask("network", RFORK_ADVERTISE_HOST="no-such-host.invalid"))
        assert "does not resolve" in finding.text

    def test_ports_that_are_taken(self, ask: Callable[..., list[Finding]]) -> None:
        with socket.create_server(("", 0)) as holder:
            port = holder.getsockname()[1]
            found = failures(ask("network", RFORK_LISTEN=f":{port}", RFORK_PORT_RANGE=f"{port}-{port}"))
        assert f":{port}: Address already in use" in found[0].text
        assert "0 free ports left" in found[1].text

    def test_an_address_that_is_elsewhere_fails_the_read(self, ask: Callable[..., list[Finding]]) -> None:
        (finding,) = failures(ask("loopback", RFORK_ADVERTISE_HOST="198.51.100.7", RFORK_CONNECT_TIMEOUT_S="1"))
        assert finding.text.startswith("tcp at 198.51.100.7: ")
        assert "is the advertised address this host's own" in finding.remedy

    def test_ports_are_those_of_the_configuration(self, ask: Callable[..., list[Finding]]) -> None:
        """The other process has all of it too, the secret included, and shows none of that in its arguments."""
        settings = {"RFORK_PORT_RANGE": "15000-15400", "RFORK_CONTENT": "checkpoint:a", "RFORK_KEY": "k" * 40}
        (finding,) = ask("loopback", RFORK_ADVERTISE_HOST="127.0.0.1", **settings)
        assert finding.text.startswith("tcp at 127.0.0.1: 1024 bytes read and compared"), finding

    def test_a_protocol_that_is_not_here(self, ask: Callable[..., list[Finding]]) -> None:
        if os.path.isdir("/sys/class/infiniband"):
            pytest.skip("this host has RDMA devices")
        (finding,) = failures(ask("loopback", RFORK_PROTOCOL="rdma"))
        assert "no active RDMA device" in finding.text


def test_every_probe_has_a_deadline() -> None:
    assert all(0 < probe.timeout_s <= 240 for probe in PROBES)
