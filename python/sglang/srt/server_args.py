"""R-Fork's share of the server arguments: one new flag, and the take-over of the flags that ask for a fork or a seed.

SGLang's own R-Fork is keyed on two settings, `load_format == "remote_instance"` and the start-seed flag. While
arguments are resolved both are moved into a `ForkRequest` that travels with the ServerArgs into every process, and
SGLang resolves the rest as for a load from disk. So all of its own R-Fork machinery (bootstrap server, registration,
group ports) stays asleep, and the loader that it picks by itself is the fallback loader.
"""

from __future__ import annotations

import contextvars
import dataclasses
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from typing import Any

from rfork.config import Config, load_config

REMOTE_INSTANCE = "remote_instance"
SEED_FLAG = "remote_instance_weight_loader_start_seed_via_transfer_engine"
BACKEND_FLAG = "remote_instance_weight_loader_backend"
FLAG_ATTRIBUTE = "_rfork_flag"
REQUEST_ATTRIBUTE = "_rfork_request"

_flag_being_parsed: contextvars.ContextVar[str | None] = contextvars.ContextVar("rfork_flag", default=None)


class NotGiven(str):
    """The default of a flag that the user did not type; reads and compares as the plain string."""

    __slots__ = ()


@dataclasses.dataclass(frozen=True)
class ForkRequest:
    """What the user asked R-Fork for. `seed_address` is host:port, or None where a planner or a list serves."""

    client: bool
    seed: bool
    draft_client: bool
    seed_address: str | None


def add_cli_args(result: Any, parser: ArgumentParser) -> None:
    """AFTER ServerArgs.add_cli_args: `--rfork-config`, and a mark on the backend's default."""
    group = parser.add_argument_group("R-Fork")
    group.add_argument(
        "--rfork-config",
        default=None,
        metavar="JSON|FILE",
        help="R-Fork settings as inline JSON or the path of a JSON file; the keys are in the guide "
        "(docs/advanced_features/rfork.md) and work as RFORK_<KEY> in the environment too.",
    )
    for action in parser._actions:
        if action.dest == BACKEND_FLAG and isinstance(action.default, str):
            action.default = NotGiven(action.default)


def from_cli_args(original: Callable[..., Any], cls: type, args: Namespace) -> Any:
    """AROUND ServerArgs.from_cli_args: bring `--rfork-config` along; a bad value stops here, before a GPU is
    touched.
    """
    flag = getattr(args, "rfork_config", None)
    load_config(flag)
    token = _flag_being_parsed.set(flag)
    try:
        server_args = original(cls, args)
    finally:
        _flag_being_parsed.reset(token)
    setattr(server_args, FLAG_ATTRIBUTE, flag)
    return server_args


def take_over(server_args: Any, view: Any, declare: Callable[[dict[str, Any]], None]) -> None:
    """Move what asks for R-Fork out of SGLang's sight. `view` reads arguments as resolved so far, `declare` changes
    them.

    A backend that R-Fork does not serve (`modelexpress`) keeps SGLang's own behaviour.
    """
    if _backend(server_args, view) != "transfer_engine":
        return
    client = view.load_format == REMOTE_INSTANCE
    draft_format = view.speculative_draft_load_format
    seed = bool(getattr(view, SEED_FLAG))
    if not (client or seed or draft_format == REMOTE_INSTANCE):
        return
    request = ForkRequest(
        client=client,
        seed=seed or client,
        draft_client=draft_format == REMOTE_INSTANCE or (client and draft_format is None),
        seed_address=_seed_address(view),
    )
    hidden: dict[str, Any] = {SEED_FLAG: False}
    if client:
        hidden["load_format"] = "auto"
    if draft_format == REMOTE_INSTANCE:
        hidden["speculative_draft_load_format"] = None
    declare(hidden)
    setattr(server_args, REQUEST_ATTRIBUTE, request)


def _backend(server_args: Any, view: Any) -> str:
    typed = getattr(view, BACKEND_FLAG)
    if view.load_format != REMOTE_INSTANCE and view.speculative_draft_load_format != REMOTE_INSTANCE:
        return "transfer_engine"
    if not isinstance(typed, NotGiven):
        return str(typed)
    chosen = settings_of(server_args).backend
    return "transfer_engine" if chosen == "auto" else chosen


def _seed_address(view: Any) -> str | None:
    host = view.remote_instance_weight_loader_seed_instance_ip
    port = view.remote_instance_weight_loader_seed_instance_service_port
    if host is None or port is None:
        return None
    return f"[{host}]:{port}" if ":" in host and not host.startswith("[") else f"{host}:{port}"


def resolution_step(server_args: Any, previous: Callable[[Any], None]) -> None:
    """The load-format step of SGLang's argument pipeline (0.5.20 and later)."""
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    take_over(
        server_args, resolving_view(server_args), lambda fields: declare_resolution(server_args, "rfork", **fields)
    )
    previous(server_args)


def around_load_format_step(original: Callable[..., Any], server_args: Any) -> Any:
    """AROUND the same step where it is a method or a plain function (0.5.16 to 0.5.19)."""

    def declare(fields: dict[str, Any]) -> None:
        for name, value in fields.items():
            setattr(server_args, name, value)

    take_over(server_args, server_args, declare)
    return original(server_args)


def request_of(server_args: Any) -> ForkRequest | None:
    """The request that travels with `server_args`, or None where R-Fork was not asked for."""
    return getattr(server_args, REQUEST_ATTRIBUTE, None)


def settings_of(server_args: Any) -> Config:
    """R-Fork's settings for this server, from the flag, the environment and the defaults. Raises ConfigError."""
    return load_config(getattr(server_args, FLAG_ATTRIBUTE, _flag_being_parsed.get()))
