"""`rfork check`: the answer of the seed itself, before anything is started. The seed is of a fleet with a key."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from support.forking import ENV, SEED, serving, settled
from support.models import Models
from support.server import BASE_ENV, Fleet, Server

pytestmark = [pytest.mark.server, pytest.mark.spawn]

KEY, API_KEY = "the key of this fleet", "sglangs-own-key"
KEYED = ("--api-key", API_KEY)


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    seed = module_fleet.start(
        models.path("llama"), SEED, "--tp", "2", *KEYED, env={**ENV, "RFORK_KEY": KEY}, wait=False
    )
    seed.http.headers["Authorization"] = f"Bearer {API_KEY}"
    return settled(serving(seed.wait_until_ready()))


def check(address: str, *server_args: str, key: str = KEY) -> tuple[int, str]:
    """With the keys of the fleet, as a server would have them: one in the environment, one among its arguments."""
    command = [sys.executable, "-m", "rfork.cli", "check", address, "--", *KEYED, *server_args]
    environ = {**os.environ, **BASE_ENV, "RFORK_KEY": key}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=170)
    return done.returncode, done.stdout + done.stderr


def test_yes_for_a_server_that_could_fork(seed: Server, models: Models) -> None:
    """Arguments resolve to what running ranks found: every field and the content are compared by the seed."""
    status, said = check(seed.address, "--model-path", str(models.path("llama")), "--tp", "2", "--port", "31000")
    assert (status, said.startswith("target: yes, ")) == (0, True), said


def test_no_names_every_field_that_differs(seed: Server, models: Models) -> None:
    other = models.path("llama", seed=1, rope_theta=20000.0)
    status, said = check(seed.address, "--model-path", str(other))
    assert status == 1, said
    differing = {line.split(":")[0].strip() for line in said.splitlines() if line.startswith("  ")}
    sizes = {"parallel.tp_size", "parallel.moe_tp_size", "parallel.attn_tp_size"}
    assert differing == {"config.rope_parameters.rope_theta", "content", *sizes}
    assert "parallel.tp_size: 1 here, 2 there" in said


def test_without_the_key_it_can_not_tell(seed: Server, models: Models) -> None:
    status, said = check(seed.address, "--model-path", str(models.path("llama")), "--tp", "2", key="")
    assert (status, "can't tell" in said, "RFORK_KEY_FILE" in said) == (2, True, True), said


def test_arguments_that_sglang_does_not_take_are_one_line(seed: Server) -> None:
    """Whatever SGLang and transformers print on the way, a traceback too: what counts is why."""
    status, said = check(seed.address, "--model-path", "/no/such/model")
    assert (status, said.count("\n")) == (2, 1), said
    assert said.startswith("can't tell: SGLang does not take these arguments: ")
    assert "/no/such/model" in said
