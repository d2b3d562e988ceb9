"""Flags and words of a fork, as a user types and reads them; shared by all tests that start real servers."""

from __future__ import annotations

import re
from typing import Any

from support.server import HOST, Fleet, Server

SEED = "--remote-instance-weight-loader-start-seed-via-transfer-engine"
ENV = {"RFORK_ADVERTISE_HOST": HOST}
SERVING_S = 60.0

LAST_LINE = re.compile(
    r"rfork: weights from (seed (?P<seed>i-[0-9a-f]{16}) at (?P<address>\S+) \((?P<facts>.*)\)"
    r"|checkpoint \(reason (?P<reason>[^:)]+)(: .*)?\))$"
)


def fork_from(port: int, *, backend: str | None = "transfer_engine") -> tuple[str, ...]:
    """SGLang's own flags for a fork from the instance at `port` of this host."""
    flags = ("--load-format", "remote_instance")
    if backend is not None:
        flags += ("--remote-instance-weight-loader-backend", backend)
    prefix = "--remote-instance-weight-loader-seed-instance"
    return (*flags, f"{prefix}-ip", HOST, f"{prefix}-service-port", str(port))


def start_seed(fleet: Fleet, model: Any, *flags: str, **how: Any) -> Server:
    """A server from disk that serves its weights when this returns."""
    return settled(serving(fleet.start(model, SEED, *flags, **{**how, "env": {**ENV, **how.get("env", {})}})))


def start_fork(fleet: Fleet, model: Any, seed_port: int, *flags: str, **how: Any) -> Server:
    """A server that asked to fork, and answers: whether it forked is for the test to look at."""
    server = fleet.start(model, *fork_from(seed_port), *flags, **{**how, "env": {**ENV, **how.get("env", {})}})
    return settled(server) if how.get("wait", True) else server


def serving(server: Server) -> Server:
    """Wait until it is a seed; an instance is one a moment after it answers."""
    return server.wait_for("to serve its weights", lambda: status(server)["state"] == "serving", SERVING_S)


def settled(server: Server) -> Server:
    """Wait for the last line of its start."""
    return server.wait_for("to end its start", lambda: last_line(server) is not None, SERVING_S)


def status(server: Server) -> dict[str, Any]:
    return dict(server.get("/rfork/v1/status").json())


def weights(server: Server) -> dict[str, Any]:
    """Where its weights came from, as `/rfork/v1/status` tells."""
    return dict(status(server)["weights"])


def rfork_lines(server: Server) -> list[str]:
    """What R-Fork logged, without SGLang's prefix."""
    return re.findall(r"\brfork(?:: | \d).*", server.log())


def last_line(server: Server) -> re.Match[str] | None:
    """The one line of fixed form that ends every start, in its parts."""
    found = [match for line in server.log().splitlines() if (match := LAST_LINE.search(line))]
    assert len(found) <= 1, found
    return found[0] if found else None
