"""`rfork planner`: run a planner."""

from __future__ import annotations

import gc
import ipaddress
import logging

import typer
import uvicorn

from rfork.clock import SystemClock
from rfork.planner.app import create_app
from rfork.planner.legacy import LegacyBook
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.store import open_store

DEFAULT = Policy()


def command(
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(7700, min=0, max=65535, help="Port to listen on."),
    store: str = typer.Option(
        "memory", envvar="RFORK_STORE", help="memory, or redis://host:port/db for several planners."
    ),
    policy: str = typer.Option("{}", envvar="RFORK_POLICY", help="Policy knobs as JSON, see `--show-policy`."),
    show_policy: bool = typer.Option(False, "--show-policy", help="Print all knobs with their values and exit."),
    interval_s: float = typer.Option(
        DEFAULT.interval_s, help="Seconds between heartbeats; entries live three times that."
    ),
    legacy: bool = typer.Option(True, help="Speak vLLM-Ascend RFork's header protocol too."),
    log_level: str = typer.Option("info", help="debug, info, warning or error."),
) -> None:
    """Choose seeds for clients. Keeps its state in memory; a restart is refilled by heartbeats."""
    from rfork.cli import _planner

    knobs = _planner.parse_policy(policy, interval_s)
    if show_policy:
        _planner.print_json(knobs)
        return
    try:
        shared = open_store(store, horizon_s=2 * knobs.ttl_s)
    except ValueError as error:
        raise _planner.usage(str(error)) from None
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not _is_loopback(host):
        logging.getLogger("rfork.planner").warning(
            "listening on %s:%d without a fleet key: whoever reaches it can register and ask", host, port
        )
    gc.set_threshold(50_000, 20, 50)  # the state has no cycles: full collections only stall answers
    service = PlannerService(knobs, SystemClock(), shared)
    app = create_app(service, legacy=LegacyBook() if legacy else None)
    uvicorn.run(
        app,
        host=host,
        port=port,
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,  # longer than clients keep a connection, so that none is reused while it is closed here
        timeout_graceful_shutdown=5,
    )


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
