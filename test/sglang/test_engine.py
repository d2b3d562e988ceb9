"""The service of a node's main process: a start that fails leaves nothing in the program that may try again."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.leaks import open_sockets
from support.ports import lend
from support.seed_node import until
from support.server import HOST

from rfork.config import CONTROL_ENV, INSTANCE_ENV, LISTENER_ENV
from rfork.errors import ConfigError
from sglang_rfork.srt.entrypoints import engine
from sglang_rfork.srt.server_args import REQUEST_ATTRIBUTE, ForkRequest

NO_PLANNER_YET = {"planner_url": f"https://{HOST}:1", "ca_file": "/nowhere/ca.pem"}


@pytest.fixture
def listen() -> Iterator[str]:
    block = lend()
    yield f"{HOST}:{block.port}"
    block.release()


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    before = open_sockets(), {t for t in threading.enumerate() if t.name.startswith("rfork")}
    yield
    assert engine.running_node() is None
    assert not {CONTROL_ENV, INSTANCE_ENV, LISTENER_ENV} & os.environ.keys()
    until(lambda: open_sockets() <= before[0])
    until(lambda: {t for t in threading.enumerate() if t.name.startswith("rfork")} <= before[1])


@pytest.fixture(autouse=True)
def logging_as_it_was() -> Iterator[None]:
    """SGLang's launch sets the root logger up anew."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def arguments() -> Any:
    """What a server that was asked to be a seed has resolved."""
    seed = ForkRequest(client=False, seed=True, draft_client=False, seed_address=None)
    fields = dict.fromkeys(("dist_init_addr", "enable_dp_attention", "log_level_http"))
    fields |= {"log_level": "warning", "host": HOST, "node_rank": 0, "nnodes": 1, "tp_size": 1, "pp_size": 1}
    return SimpleNamespace(**fields, dp_size=1, **{REQUEST_ATTRIBUTE: seed})


def launch(monkeypatch: pytest.MonkeyPatch, original: Callable[..., Any], **config: object) -> Any:
    monkeypatch.setenv("RFORK_CONFIG", json.dumps(config))
    return engine.around_launch(original, type("Engine", (), {}), server_args=arguments())


@pytest.mark.parametrize("backend", ["transfer_engine", "nccl"])
def test_the_first_line_names_the_transport_that_was_asked_for(backend: str, caplog: pytest.LogCaptureFixture) -> None:
    request = ForkRequest(client=False, seed=True, draft_client=False, seed_address=None, backend=backend)
    with caplog.at_level(logging.INFO, "rfork"):
        engine.start_node(arguments(), request)
    engine.stop_node()
    assert f" hooks applied, transport {backend}, role main" in caplog.messages[0]


def never(*args: Any, **kwargs: Any) -> None:
    raise AssertionError("no rank is started where the node could not be")


def test_an_engine_whose_planner_is_not_known_yet_can_be_made_once_it_is(
    listen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The port is free again, and the environment says nothing of the node that failed."""
    for _ in range(2):
        with pytest.raises(ConfigError, match=r"ca_file /nowhere/ca\.pem"):
            launch(monkeypatch, never, listen=listen, **NO_PLANNER_YET)
    assert CONTROL_ENV not in os.environ
    assert launch(monkeypatch, lambda *args, **kwargs: "launched", listen=listen) == "launched"
    assert str(engine.running_node().listener_url).endswith(listen)
    engine.stop_node()


def test_a_listener_that_can_not_bind_leaves_no_control_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="can't bind"):
        launch(monkeypatch, never, listen="192.0.2.1:1")


def test_ranks_that_do_not_start_end_their_node(listen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        launch(monkeypatch, fail, listen=listen)
