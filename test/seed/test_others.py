"""The other nodes of an instance: asked within a bound, whatever they do, also while Python ends."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from typing import NamedTuple

from support.transport_peer import python_environment

from rfork.config import Config
from rfork.seed.others import CALL_S, OtherNodes


class Node(NamedTuple):
    """What is asked of a node here."""

    other_listeners: tuple[str, ...]
    config: Config = Config()
    instance_id: str = "i-1"


def test_a_node_that_takes_calls_and_answers_none_costs_the_bound() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        others = OtherNodes(Node((f"http://127.0.0.1:{silent.getsockname()[1]}",)))  # type: ignore[arg-type]
        started_s = time.monotonic()
        others.wait_drained(0.0)
        others.wait_drained(0.5)
        assert time.monotonic() - started_s < CALL_S - 1


def test_they_are_asked_while_python_ends() -> None:
    """An offline Engine shuts down from atexit, when thread pools take nothing any more."""
    program = """
import atexit
from types import SimpleNamespace
from rfork.config import Config
from rfork.seed.others import OtherNodes
node = SimpleNamespace(other_listeners=("http://127.0.0.1:1",), config=Config(), instance_id="i-1")
atexit.register(lambda: print("asked", OtherNodes(node).statuses(), flush=True))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, env=python_environment()
    )
    assert done.stdout == "asked [None]\n", done.stderr
