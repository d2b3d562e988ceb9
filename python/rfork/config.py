"""One configuration from every source: `--rfork-config`, `RFORK_<KEY>`, `RFORK_CONFIG`, defaults, in this order.

`load_config()` is called once per process, before a device is touched. Whatever is wrong raises ConfigError in one line
that names the key, what was expected, what was got, and the key that was probably meant.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from rfork import config_values as values
from rfork.config_values import Invalid
from rfork.errors import ConfigError
from rfork.identity import Content

ENV_PREFIX = "RFORK_"
CONTROL_ENV = "RFORK_CONTROL"
INSTANCE_ENV = "RFORK_INSTANCE_ID"
LISTENER_ENV = "RFORK_LISTENER_URL"
NOT_KEYS = {"RFORK_CONFIG", CONTROL_ENV, INSTANCE_ENV, LISTENER_ENV, "RFORK_VENV", "RFORK_VENV_COMPAT"}
"""Variables with our prefix that are no settings: all in one, what a main process tells its ranks, and make's."""

MAX_CONFIG_NBYTES = 1 << 20
ALIASES = {"rfork_scheduler_url": "planner_url"}
SECRETS = {"key"}
_KUBERNETES = re.compile(r"_(SERVICE_(HOST|PORT(_\w+)?)|PORT(_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)?)$")
"""What Kubernetes injects for a Service called `rfork-…`: not ours, and no reason to refuse to start."""


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, checked. `KEYS` says what each means; `key` and passwords of URLs are kept out of `repr`."""

    planner_url: str | None = None
    seeds: tuple[str, ...] = ()
    fallback: str = "auto"
    weights: str = "checkpoint"
    verify: str = "full"
    seed: str = "on"
    backend: str = "auto"
    protocol: str = "auto"
    stock_nccl_clients: str = "off"
    group_clients: tuple[str, ...] = ()
    ib_device: str | dict[str, str] | None = None
    advertise_host: str | None = None
    listen: tuple[str | None, int] | None = None
    port_range: tuple[int, int] | None = None
    content: Content | None = None
    capacity: int = 8
    lease_ttl_s: float = 30.0
    read_gbps_limit: float | None = None
    labels: dict[str, str] = {}
    key: str | None = None
    key_file: str | None = None
    ca_file: str | None = None
    tls_server_name: str | None = None
    tls_cert_file: str | None = None
    tls_key_file: str | None = None
    seek_timeout_s: float = 30.0
    plan_timeout_s: float = 1200.0
    storage_jitter_s: float = 30.0
    match_timeout_s: float = 60.0
    connect_timeout_s: float = 10.0
    read_timeout_s: float = 30.0
    settle_timeout_s: float = 120.0
    close_timeout_s: float = 30.0
    agree_timeout_s: float = 120.0
    publish_timeout_s: float = 300.0
    drain_timeout_s: float = 30.0

    def __repr__(self) -> str:
        default = Config()
        shown = [f for f in self.__struct_fields__ if getattr(self, f) != getattr(default, f)]
        return f"Config({', '.join(f'{f}={_shown(f, getattr(self, f))}' for f in shown)})"


class Key(NamedTuple):
    """One setting: how it is written, how it is parsed (raises Invalid), what it does."""

    name: str
    type: str
    parse: Callable[[Any], Any]
    meaning: str


KEYS = (
    Key(
        "planner_url",
        "URL, or several",
        values.urls,
        "planner that chooses seeds, or several of one fleet: the next is asked where one does not answer; also "
        "understood as `rfork_scheduler_url`",
    ),
    Key(
        "seeds",
        "list of [dns+][https://]host:port",
        values.seeds,
        "seeds to try in order; `dns+`: every address of a name",
    ),
    Key(
        "fallback",
        "auto, never or a load format",
        values.load_format,
        "what loads the weights when no seed can: SGLang's own choice, nothing (exit), or the named loader",
    ),
    Key(
        "weights",
        "checkpoint or live",
        values.one_of("checkpoint", "live"),
        "`checkpoint`: refuse a seed whose weights were updated in memory; `live`: take them with their version",
    ),
    Key("verify", "full, sample or off", values.one_of("full", "sample", "off"), "share of the bytes that is digested"),
    Key("seed", "on or off", values.one_of("on", "off"), "offer this instance's weights; `off` opens no port"),
    Key(
        "backend",
        "auto, transfer_engine or nccl",
        values.one_of("auto", "transfer_engine", "nccl"),
        "transport, where SGLang's own flag does not name it",
    ),
    Key(
        "protocol",
        "auto, rdma, nvlink_intra or tcp",
        values.one_of("auto", "rdma", "nvlink_intra", "tcp"),
        "path of the bytes; `auto` offers the fastest that both sides have",
    ),
    Key(
        "stock_nccl_clients",
        "on or off",
        values.one_of("on", "off"),
        "broadcast to clients without R-Fork too; they name nothing that could be compared, so you vouch for them",
    ),
    Key(
        "group_clients",
        "list of addresses or networks",
        values.networks,
        "clients of broadcasts, where there is no fleet key: gloo dials these too, and not just who called; with NCCL "
        "these are served too, and not just private addresses",
    ),
    Key("ib_device", "text, or {device index: text}", values.device_map, "RDMA devices, for all devices or for each"),
    Key("advertise_host", "host", values.host, "address under which other hosts reach this one"),
    Key("listen", "[host]:port", values.listen, "where rfork's own listener binds; port 0 takes a free one"),
    Key(
        "port_range",
        "low-high",
        values.port_range,
        "ports that rfork's listener and transfer engines may bind; engines take 1024 to 32767 only",
    ),
    Key("content", "checkpoint:<id>", values.content, "names the weights where their files can't be read here"),
    Key("capacity", "integer from 1", values.integer(1, 100_000), "clients that may read at a time"),
    Key("lease_ttl_s", "seconds", values.seconds(1, 3600), "how long a lease lives without renewal"),
    Key("read_gbps_limit", "number above 0", values.number(0.001, 1e6), "GB/s that one rank reads at most"),
    Key("labels", "{name: text}", values.text_map, "where this instance is (zone, fabric); near seeds come first"),
    Key("key", "text", values.secret, "fleet key itself; from a file or the environment only"),
    Key("key_file", "path", values.path, "file with the fleet key, and the previous one below; re-read on change"),
    Key("ca_file", "path", values.path, "certificate authority of planner and seeds"),
    Key("tls_server_name", "host", values.host, "name in their certificates, where it is not their address"),
    Key("tls_cert_file", "path", values.path, "certificate chain of rfork's own listener, which then speaks HTTPS"),
    Key("tls_key_file", "path", values.path, "private key of that certificate"),
    Key("seek_timeout_s", "seconds", values.seconds(), "finding a seed: names, planner, waiting for a busy one"),
    Key(
        "plan_timeout_s",
        "seconds",
        values.seconds(),
        "waiting for a seed that the planner knows will come, before the disk is read",
    ),
    Key(
        "storage_jitter_s",
        "seconds",
        values.seconds(0, 3600),
        "spread of a fleet that reads the disk because no planner answers",
    ),
    Key("match_timeout_s", "seconds", values.seconds(), "lease, manifest and digests: each request to a seed"),
    Key("connect_timeout_s", "seconds", values.seconds(), "the first tiny read of each endpoint"),
    Key("read_timeout_s", "seconds", values.seconds(), "reading without progress, not the whole read"),
    Key("settle_timeout_s", "seconds", values.seconds(), "digests and derived state after the last byte"),
    Key("close_timeout_s", "seconds", values.seconds(), "destroying an engine; past it the process exits"),
    Key("agree_timeout_s", "seconds", values.seconds(), "all ranks agreeing on one outcome"),
    Key("publish_timeout_s", "seconds", values.seconds(), "a rank answering its node: digests, second check"),
    Key("drain_timeout_s", "seconds", values.seconds(0, 86_400), "readers finishing before a shutdown goes on"),
)
_BY_NAME = {key.name: key for key in KEYS}


def describe_keys() -> list[tuple[str, str, str, str]]:
    """Rows for the guide: key, type, default, meaning."""
    default = Config()
    return [(k.name, k.type, _shown_default(getattr(default, k.name)), k.meaning) for k in KEYS]


def load_config(argument: str | None = None, environ: Mapping[str, str] | None = None) -> Config:
    """The configuration of this process. `argument` is the value of `--rfork-config`: inline JSON or a file's path."""
    environ = os.environ if environ is None else environ
    merged: dict[str, Any] = {}
    if environ.get("RFORK_CONFIG"):
        merged |= _checked(_read(environ["RFORK_CONFIG"], "RFORK_CONFIG"), "RFORK_CONFIG")
    merged |= _from_environment(environ)
    if argument:
        merged |= _checked(_read(argument, "--rfork-config"), "--rfork-config", in_argv=_is_inline(argument))
    config = Config(**merged)
    _check_together(config)
    return config


def _is_inline(text: str) -> bool:
    return text.lstrip()[:1] in ("{", "[", '"')


def _read(text: str, source: str) -> dict[str, Any]:
    if not _is_inline(text):
        try:
            data = Path(text).read_bytes()[: MAX_CONFIG_NBYTES + 1]
        except OSError as error:
            raise ConfigError(f"{source}: can't read {text!r}: {error.strerror or error}") from None
        source, text = f"{source} ({text})", data.decode(errors="replace")
    if len(text) > MAX_CONFIG_NBYTES:
        raise ConfigError(f"{source}: expected at most {MAX_CONFIG_NBYTES} bytes of JSON")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source}: expected a JSON object, got text that is not JSON ({error})") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{source}: expected a JSON object, got {values.shown(found)}")
    return found


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for variable in sorted(environ):
        if not variable.startswith(ENV_PREFIX) or variable in NOT_KEYS or not environ[variable].strip():
            continue
        name = variable.removeprefix(ENV_PREFIX).lower()
        if name not in _BY_NAME and (name in ALIASES or f"rfork_{name}" in ALIASES):
            name = ALIASES.get(name) or ALIASES[f"rfork_{name}"]
        if name not in _BY_NAME and _KUBERNETES.search(variable):
            continue
        found |= _checked({name: environ[variable].strip()}, variable)
    return found


def _checked(raw: Mapping[str, Any], source: str, *, in_argv: bool = False) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for name, value in raw.items():
        key = _BY_NAME.get(ALIASES.get(name, name))
        if key is None:
            raise ConfigError(f"{source}: unknown key {name!r}{_near_miss(name)}")
        if value is None:
            continue
        if in_argv and (key.name in SECRETS or _has_password(value)):
            raise ConfigError(
                f"{source}: {name} carries a secret, which every user of the host can read in the process list; "
                f"expected it in a file or in RFORK_{key.name.upper()}"
            )
        if key.name in out:
            raise ConfigError(f"{source}: {key.name} is given twice, under an alias too")
        try:
            out[key.name] = key.parse(value)
        except Invalid as error:
            got = "(hidden)" if key.name in SECRETS else values.shown(value)
            raise ConfigError(f"{source}: {name}: expected {error}, got {got}") from None
    return out


def _has_password(value: object) -> bool:
    texts = value if isinstance(value, list) else [value]
    return any(isinstance(text, str) and re.search(r"://[^@]*@", text) for text in texts)


def _shown(name: str, value: object) -> str:
    if name in SECRETS:
        return "***"
    if name == "planner_url" and isinstance(value, str):
        value = ",".join(map(values.without_password, value.split(",")))
    return repr(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a refusal that names the nearest of `known`; empty where none is near."""
    near = difflib.get_close_matches(name.lower(), [*known], n=1, cutoff=0.6)
    return f"; did you mean {near[0]!r}?" if near else ""


def _near_miss(name: str) -> str:
    return did_you_mean(name, [*_BY_NAME, *ALIASES]) or f"; known keys: {', '.join(_BY_NAME)}"


def _check_together(config: Config) -> None:
    if config.key and config.key_file:
        raise ConfigError("key, key_file: expected one of the two, got both")
    if config.listen and config.listen[1] and config.port_range:
        low, high = config.port_range
        if not low <= config.listen[1] <= high:
            raise ConfigError(f"listen: expected a port of port_range {low}-{high}, got {config.listen[1]}")


def _shown_default(value: object) -> str:
    return "–" if value is None or value in ((), {}) else str(value)
