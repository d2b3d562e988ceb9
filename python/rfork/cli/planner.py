"""`rfork planner`: run a planner."""

from __future__ import annotations

import enum
import gc
import logging
from typing import Annotated

import typer
import uvicorn

from rfork import patience
from rfork.auth import PLANNER, Guard
from rfork.cli import _planner
from rfork.clock import SystemClock
from rfork.errors import ConfigError
from rfork.keys import keyring
from rfork.planner.app import create_app
from rfork.planner.legacy import LegacyBook
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.planner.store import open_store
from rfork.tls import Certificate
from rfork.transports.addresses import is_loopback

DEFAULT = Policy()


class LogLevel(enum.StrEnum):
    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


def command(
    host: str = typer.Option("127.0.0.1", help="Address to listen on."),
    port: int = typer.Option(7700, min=0, max=65535, help="Port to listen on."),
    store: str = typer.Option(
        "memory",
        envvar="RFORK_STORE",
        callback=_planner.no_secret_in_argv,
        help="memory, or redis://host:port/db for several planners; with a password only in the variable.",
    ),
    policy: str = typer.Option("{}", envvar="RFORK_POLICY", help="Policy knobs as JSON, see `--show-policy`."),
    show_policy: bool = typer.Option(False, "--show-policy", help="Print all knobs with their values and exit."),
    interval_s: float = typer.Option(
        DEFAULT.interval_s, help="Seconds between heartbeats; what must outlast some of them grows with it."
    ),
    key_file: str = typer.Option(
        "", "--key-file", envvar="RFORK_KEY_FILE", help="The fleet key (or RFORK_KEY): all must prove it then."
    ),
    tls_cert_file: str = typer.Option(
        "", envvar="RFORK_TLS_CERT_FILE", help="Serve HTTPS with this certificate chain."
    ),
    tls_key_file: str = typer.Option("", envvar="RFORK_TLS_KEY_FILE", help="The private key of that certificate."),
    legacy: bool = typer.Option(True, help="Speak vLLM-Ascend RFork's header protocol too, where there is no key."),
    legacy_anonymous: bool = typer.Option(
        False, "--legacy-anonymous", help="Speak it even where there is a key, which it can't prove."
    ),
    log_level: Annotated[LogLevel, typer.Option(case_sensitive=False, help="How much is logged.")] = LogLevel.INFO,
) -> None:
    """Choose seeds for clients. Keeps its state in memory; a restart is refilled by heartbeats.

    Exit status: 2 wrong usage or settings, 3 it can't listen at that address.
    """
    knobs = _planner.parse_policy(policy, interval_s)
    if show_policy:
        _planner.print_json(knobs)
        return
    try:
        shared = open_store(store, horizon_s=2 * knobs.ttl_s, num_claims=knobs.disk_claims)
        keys = keyring(None, key_file) if key_file else keyring(_planner.settings().key, None)
        certificate = Certificate.of(tls_cert_file, tls_key_file)
    except (ValueError, ConfigError) as error:
        raise _planner.usage(str(error)) from None
    logging.basicConfig(level=log_level.upper(), format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if not is_loopback(host) and keys is None:
        logging.getLogger("rfork.planner").warning(
            "listening on %s:%d without a fleet key: whoever reaches it can register and ask", host, port
        )
    gc.set_threshold(50_000, 20, 50)  # the state has no cycles: full collections only stall answers
    service = PlannerService(knobs, SystemClock(), shared)
    speaks_legacy = legacy_anonymous or (legacy and keys is None)
    app = create_app(
        service,
        guard=Guard(keys, lambda: (PLANNER,)) if keys is not None else None,
        legacy=LegacyBook() if speaks_legacy else None,
    )
    config = uvicorn.Config(
        app,
        host=host,
        port=port,
        ssl_certfile=certificate.cert_file if certificate else None,
        ssl_keyfile=certificate.key_file if certificate else None,
        ws="none",
        log_level="warning",
        access_log=False,
        timeout_keep_alive=30,  # longer than clients keep a connection, so that none is reused while it is closed here
        timeout_graceful_shutdown=5,
    )
    patience.run(config, patience.PLANNER, let_go=service.let_go)
