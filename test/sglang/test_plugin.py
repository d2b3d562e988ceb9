"""What counts as asking for R-Fork: the words of the command line and the environment, never a path."""

from __future__ import annotations

import sys

import pytest

from sglang_rfork.srt.plugin import asked_for

PROGRAM = "/srv/rfork/remote_instance/launch_server.py"
"""Environments and models may well lie in folders that have our name."""


@pytest.fixture(autouse=True)
def nothing_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [PROGRAM, "--model-path", "/models/rfork/remote_instance"])


@pytest.mark.parametrize(
    "words",
    [
        ["--load-format", "remote_instance"],
        ["--load-format=remote_instance"],
        ["--load-format", "remote-instance"],
        ["--remote-instance-weight-loader-start-seed-via-transfer-engine"],
        ["--remote_instance_weight_loader_seed_instance_ip", "192.0.2.1"],
        ["--rfork-config", "{}"],
        ["--rfork-config={}"],
    ],
    ids=" ".join,
)
def test_a_flag_or_the_load_format_asks(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert not asked_for("main")
    monkeypatch.setattr(sys, "argv", [*sys.argv, *words])
    assert asked_for("main")


def test_a_setting_in_the_environment_asks_and_makes_own_variable_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RFORK_VENV", "/srv/rfork/venv")
    monkeypatch.setenv("RFORK_VENV_COMPAT", "/srv/rfork/venv-0.5.16")
    assert not asked_for("main")
    monkeypatch.setenv("RFORK_PLANNER_URL", "http://127.0.0.1:1")
    assert asked_for("main")
