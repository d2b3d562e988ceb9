"""R-Fork's share of the server arguments: one new flag, and the take-over of the flags that ask for a fork or a seed.

SGLang's own R-Fork is keyed on two settings, `load_format == "remote_instance"` and the start-seed flag. While
arguments are resolved both are moved into a `ForkRequest` that travels with the ServerArgs into every process, and
SGLang resolves the rest as for a load from disk. So all of its own R-Fork machinery (bootstrap server, registration,
group ports) stays asleep, and the loader that it picks by itself is the fallback loader.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import logging
import os
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from typing import Any

from rfork.config import Config, did_you_mean, load_config
from rfork.errors import ConfigError
from sglang_rfork.srt.compat import installed_release

log = logging.getLogger("rfork")

REMOTE_INSTANCE = "remote_instance"
SEED_FLAG = "remote_instance_weight_loader_start_seed_via_transfer_engine"
BACKEND_FLAG = "remote_instance_weight_loader_backend"
GROUP_PORTS_FLAG = "remote_instance_weight_loader_send_weights_group_ports"
FLAG_ATTRIBUTE = "_rfork_flag"
REQUEST_ATTRIBUTE = "_rfork_request"

SERVED_BACKENDS = ("transfer_engine", "nccl")
"""Backends that R-Fork takes over; with any other, SGLang's own code does what it always did."""

IMPOSSIBLE = {
    "use_ray": "--use-ray: ranks that are Ray actors load no plugins",
    "smg_grpc_mode": "--smg-grpc-mode: a gRPC front end has no HTTP port on which clients could ask",
    "grpc_mode": "--grpc-mode: a gRPC front end has no HTTP port on which clients could ask",
    "encoder_only": "--encoder-only: an encoder server has neither schedulers nor their model loader",
    "ep_join_mode": "--elastic-ep-join-mode: a group that joins has ranks beyond those that any seed counts",
    "elastic_ep_rejoin": "--elastic-ep-rejoin: a group that joins has ranks beyond those that any seed counts",
}
"""Arguments with which nothing of R-Fork can work, and why."""

_command_line: contextvars.ContextVar[Namespace | None] = contextvars.ContextVar("rfork_command_line", default=None)


class NotGiven(str):
    """The default of a flag that the user did not type; reads and compares as the plain string."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class ForkRequest:
    """What the user asked R-Fork for. `seed_address` is host:port, or None where a planner or a list serves.

    `backend` is transfer_engine or nccl; `group_ports` are the seed's ports for nccl, by rank, or empty for free ones.
    """

    client: bool
    seed: bool
    draft_client: bool
    seed_address: str | None
    backend: str = "transfer_engine"
    group_ports: tuple[int, ...] = ()


def add_cli_args(result: Any, parser: ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args: `--rfork-config`, and a mark on the backend's default."""
    group = parser.add_argument_group("R-Fork")
    group.add_argument(
        "--rfork-config",
        action=_Once,
        default=None,
        metavar="JSON|FILE",
        help="R-Fork settings as inline JSON or the path of a JSON file; the keys are in the guide "
        "(docs/advanced_features/rfork.md) and work as RFORK_<KEY> in the environment too.",
    )
    for action in parser._actions:
        if action.dest == BACKEND_FLAG and isinstance(action.default, str):
            action.default = NotGiven(action.default)
            action.type = _text_with_its_mark


class _Once(Action):
    """A flag that counts once: argparse would drop all but the last without a word."""

    def __call__(self, parser: ArgumentParser, namespace: Namespace, values: Any, option_string: Any = None) -> None:
        if getattr(namespace, self.dest, None) is not None:
            raise SystemExit(
                f"rfork: refusing to start: {option_string} is given twice (a --config file counts); expected one JSON "
                "object or file with all settings"
            )
        setattr(namespace, self.dest, values)


def _text_with_its_mark(text: str) -> str:
    """What argparse makes of a value: it passes defaults too, and plain `str` would take the mark off them."""
    return text


def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args: bring `--rfork-config` along; bad values stop here, before a GPU is touched."""
    token = _command_line.set(args)
    try:
        with one_line(None):
            load_config(_flag_of(args))
        server_args = original(cls, args)
    finally:
        _command_line.reset(token)
    setattr(server_args, FLAG_ATTRIBUTE, _flag_of(args))
    return server_args


def _flag_of(args: Namespace | None) -> str | None:
    return getattr(args, "rfork_config", None)


def _is_from_command_line(server_args: Any) -> bool:
    return _command_line.get() is not None or hasattr(server_args, FLAG_ATTRIBUTE)


@contextlib.contextmanager
def one_line(server_args: Any) -> Iterator[None]:
    """On the command line a ConfigError ends the process in one line; in a program it stays an exception."""
    try:
        yield
    except ConfigError as error:
        if _is_from_command_line(server_args):
            raise SystemExit(f"rfork: refusing to start: {error}") from None
        raise


def take_over(server_args: Any, view: Any, declare: Callable[[dict[str, Any]], None]) -> None:
    """Move what asks for R-Fork out of SGLang's sight. `view` reads arguments as resolved so far, `declare` sets them.

    A backend that R-Fork does not serve keeps SGLang's own behaviour. Raises ConfigError for what can't work.
    """
    backend = _backend(server_args, view)
    if backend not in SERVED_BACKENDS:
        return
    client = view.load_format == REMOTE_INSTANCE
    draft_format = view.speculative_draft_load_format
    seed = bool(getattr(view, SEED_FLAG)) or backend == "nccl"
    if not (client or seed or draft_format == REMOTE_INSTANCE):
        return
    refuse_the_impossible(view)
    check_fallback(settings_of(server_args).fallback)
    request = ForkRequest(
        client=client,
        seed=seed or client,
        draft_client=draft_format == REMOTE_INSTANCE or (client and draft_format is None),
        seed_address=_seed_address(view),
        backend=backend,
        group_ports=_group_ports(view) if backend == "nccl" else (),
    )
    hidden: dict[str, Any] = {SEED_FLAG: False}
    if client:
        hidden["load_format"] = "auto"
    if draft_format == REMOTE_INSTANCE:
        hidden["speculative_draft_load_format"] = None
    if getattr(view, "startup_weight_load_mode", "serial") == "overlap":
        # It streams a checkpoint past every loader, ours included, and a model isn't whole when its loader returns.
        log.warning("rfork: --startup-weight-load-mode overlap has no effect where R-Fork is asked for")
        hidden["startup_weight_load_mode"] = "serial"
    declare(hidden)
    setattr(server_args, REQUEST_ATTRIBUTE, request)


def refuse_the_impossible(view: Any) -> None:
    """Raise ConfigError, by name, for what neither a fork nor a seed can work with: before anything is spawned."""
    problems = [why for name, why in IMPOSSIBLE.items() if getattr(view, name, False)]
    if getattr(view, "weight_cache_mode", "off") not in ("off", None):
        problems.append(f"--weight-cache-mode {view.weight_cache_mode}: these weights belong to another process")
    if (getattr(view, "dwdp_size", 1) or 1) > 1:
        problems.append(f"--dwdp-size {view.dwdp_size}: experts become windows into the memory of other ranks")
    if os.environ.get("SGLANG_RUST_SERVER", "").lower() in ("1", "true", "yes", "y"):
        problems.append("SGLANG_RUST_SERVER: the Rust front end has no place for R-Fork's end-points")
    if problems:
        raise ConfigError(f"R-Fork can't work with {'; nor with '.join(problems)}")


def check_fallback(fallback: str) -> None:
    """Raise ConfigError for a loader that this release of SGLang does not have: else it shows when it is needed."""
    formats = {str(each.value) for each in installed_release().get("arguments.load_formats")} - {REMOTE_INSTANCE}
    if fallback not in (known := ["auto", "never", *sorted(formats - {"auto"})]):
        meant = did_you_mean(fallback, known) or f"; known: {', '.join(known)}"
        raise ConfigError(f"fallback: expected auto, never or a load format of SGLang, got {fallback!r}{meant}")


def _backend(server_args: Any, view: Any) -> str:
    given = getattr(view, BACKEND_FLAG)
    chosen = settings_of(server_args).backend
    if view.load_format != REMOTE_INSTANCE and view.speculative_draft_load_format != REMOTE_INSTANCE:
        is_typed = _is_from_command_line(server_args) and not isinstance(given, NotGiven)
        wants_nccl = given == "nccl" if is_typed else chosen == "nccl" and bool(getattr(view, SEED_FLAG))
        return "nccl" if wants_nccl else "transfer_engine"
    if isinstance(given, NotGiven):
        return "transfer_engine" if chosen == "auto" else chosen
    if not _is_from_command_line(server_args) and given == "nccl" and chosen != "auto":
        return chosen  # a program can't leave a mark on the default; the setting that somebody made decides
    return str(given)


def _seed_address(view: Any) -> str | None:
    host = view.remote_instance_weight_loader_seed_instance_ip
    port = view.remote_instance_weight_loader_seed_instance_service_port
    if host is None and port is None:
        return None
    if host is None or port is None:
        half = "-service-port" if port is None else "-ip"
        raise ConfigError(f"half a seed address: --remote-instance-weight-loader-seed-instance{half} is missing")
    scheme = "https://" if getattr(view, "ssl_certfile", None) else ""  # one command line starts every instance
    return f"{scheme}[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{scheme}{host}:{port}"


def _group_ports(view: Any) -> tuple[int, ...]:
    ports = tuple(int(p) for p in getattr(view, GROUP_PORTS_FLAG) or ())
    if wrong := [p for p in ports if not 0 < p < 65536]:
        raise ConfigError(f"--{GROUP_PORTS_FLAG.replace('_', '-')}: expected ports from 1 to 65535, got {wrong[0]}")
    return ports


def resolution_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The load-format step of SGLang's argument pipeline (0.5.20 and later)."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    def declare(fields: dict[str, Any]) -> None:
        declare_resolution(server_args, "rfork", **fields)

    with one_line(server_args):
        take_over(server_args, resolving_view(server_args), declare)
    previous(server_args)


def around_load_format_step(original: Callable[..., Any], server_args: Any) -> Any:
    """AROUND the same step where it is a method or a plain function (0.5.16 to 0.5.19)."""

    def declare(fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            setattr(server_args, name, value)

    with one_line(server_args):
        take_over(server_args, server_args, declare)
    return original(server_args)


def api_key_of(view: Any) -> str | None:
    """What opens the seed's control end-points where it has this server's own keys; for an address that the user typed.

    SGLang takes the admin key alone there where there is one.
    """
    return getattr(view, "admin_api_key", None) or getattr(view, "api_key", None) or None


def after_internal_state(result: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER Scheduler.get_internal_state: older releases answer with all that the arguments carry, ours among it."""
    state = result.internal_state
    if isinstance(state, dict):
        for name in (FLAG_ATTRIBUTE, REQUEST_ATTRIBUTE):
            state.pop(name, None)


def request_of(server_args: Any) -> ForkRequest | None:
    """The request that travels with `server_args`, or None where R-Fork was not asked for."""
    return getattr(server_args, REQUEST_ATTRIBUTE, None)


def settings_of(server_args: Any) -> Config:
    """R-Fork's settings for this server, from the flag, the environment and the defaults. Raises ConfigError."""
    return load_config(getattr(server_args, FLAG_ATTRIBUTE, _flag_of(_command_line.get())))
