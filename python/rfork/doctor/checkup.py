"""All probes, bounded, a few at a time; findings come in a fixed order whatever ends first."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

from rfork.config import Config, load_config
from rfork.doctor.bounded import run_bounded
from rfork.doctor.finding import Finding, fail, ok
from rfork.errors import ConfigError

MAX_AT_A_TIME = 3


class Bound(NamedTuple):
    """A probe's module, and the seconds that it may take (a cold disk included)."""

    module: str
    timeout_s: float


PROBES = (
    Bound("plugin", 120),
    Bound("sglang", 240),
    Bound("mooncake", 120),
    Bound("gpu", 120),
    Bound("network", 30),
    Bound("loopback", 120),
)


def check_all(argument: str | None) -> Iterator[Finding]:
    """Findings of the configuration, then of each probe. `argument` is what `--rfork-config` would be."""
    yield _python()
    try:
        config = load_config(argument)
    except ConfigError as error:
        yield fail(
            "configuration", str(error), "servers refuse to start with this; correct it, then run the doctor again"
        )
        argument = None
    else:
        yield _configuration(config)
    pool = ThreadPoolExecutor(MAX_AT_A_TIME)
    try:
        # The slowest first; they are shown in the order of PROBES.
        by_time = sorted(PROBES, key=lambda bound: -bound.timeout_s)
        running = {bound: pool.submit(run_bounded, bound.module, argument, bound.timeout_s) for bound in by_time}
        for bound in PROBES:
            yield from running[bound].result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    return ok("Python", f"{version} at {sys.prefix}, rfork {importlib.metadata.version('sglang-rfork')}")


def _configuration(config: Config) -> Finding:
    shown = repr(config)[len("Config(") : -1]
    return ok("configuration", shown or "all defaults")
