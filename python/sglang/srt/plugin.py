"""SGLang's entry point into R-Fork: the one list of hooks, registered per process role, strict where R-Fork is asked
for.

SGLang loads general plugins at the start of every process and swallows their errors. Where the user asked for R-Fork
that would mean a server that silently loads from disk, so here a hook that can't be applied stops the process with
the reason.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import logging
import multiprocessing
import os
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import rfork
from rfork.config import CONTROL_ENV, NOT_KEYS
from sglang_rfork.srt.compat import FIRST, LAST, Release, installed_release
from sglang_rfork.srt.server_args import resolution_step

log = logging.getLogger("rfork")

SUPPORTED = f"SGLang 0.5.{FIRST} to 0.5.{LAST}"

_CALLERS = {
    ("sglang.srt.managers.scheduler", "run_scheduler_process"): "scheduler",
    ("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"): "other",
    ("sglang.srt.managers.data_parallel_controller", "run_data_parallel_controller_process"): "other",
}
"""Who calls SGLang's load_plugins() in a child process, as (module, function), and the role that tells."""


@dataclasses.dataclass(frozen=True)
class Hook:
    """One hook: the compat row that names its target, how it wraps it, and the function, as `module:name` below this
    package.
    """

    purpose: str
    how: str
    function: str
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


_applied: dict[str, int] = {}
"""Number of hooks applied in this process, by role."""

_FENCED, _UPDATE = "managers.scheduler:fenced", "managers.scheduler:updating"
_RETIRING = "managers.scheduler:retiring"
_ONE_OF_MANY = {"settles": False, "whole": False}
HOOKS = (
    Hook("arguments.add", "after", "server_args:add_cli_args"),
    Hook("arguments.parse", "around", "server_args:from_cli_args"),
    Hook("arguments.load_format.step", "around", "server_args:around_load_format_step"),
    Hook("engine.launch", "around", "entrypoints.engine:around_launch"),
    Hook("engine.shutdown", "before", "entrypoints.engine:before_shutdown"),
    Hook("http.run", "around", "entrypoints.http_server:around_run_http_server"),
    Hook("http.ready", "around", "entrypoints.http_server:around_wait_and_warmup"),
    Hook("http.sigterm", "before", "entrypoints.http_server:before_sigterm"),
    Hook("http.sigterm.watch", "around", "entrypoints.http_server:around_sigterm_watchdog"),
    Hook("rank.ready", "around", "managers.scheduler:around_init_model_worker"),
    Hook("rank.state", "after", "server_args:after_internal_state"),
    Hook("rank.loop", "around", "managers.scheduler:around_run_event_loop"),
    Hook("load.run", "around", "model_executor.model_runner:around_load_model"),
    Hook("update.disk", "around", _UPDATE, {"why": "update_weights_from_disk"}),
    Hook("update.ipc", "around", _UPDATE, {"why": "update_weights_from_ipc"}),
    Hook("update.tensor", "around", _UPDATE, {"why": "update_weights_from_tensor", **_ONE_OF_MANY}),
    Hook("update.distributed", "around", _UPDATE, {"why": "update_weights_from_distributed", **_ONE_OF_MANY}),
    Hook("update.begin", "around", _UPDATE, {"why": "begin_weight_update", "settles": False}),
    Hook("update.end", "around", _UPDATE, {"why": "end_weight_update", "whole": False}),
    Hook("update.release", "around", "managers.scheduler:around_release"),
    Hook("update.resume", "around", "managers.scheduler:around_resume"),
    Hook("update.continue", "after", "managers.scheduler:after_continue"),
    Hook("fence.disk", "around", _FENCED, {"why": "update_weights_from_disk"}),
    Hook("fence.tensor", "around", _FENCED, {"why": "update_weights_from_tensor", **_ONE_OF_MANY}),
    Hook("fence.ipc", "around", _FENCED, {"why": "update_weights_from_ipc"}),
    Hook("fence.distributed", "around", _FENCED, {"why": "update_weights_from_distributed", **_ONE_OF_MANY}),
    Hook("fence.begin", "around", _FENCED, {"why": "begin_weight_update", "settles": False}),
    Hook("fence.end", "around", _FENCED, {"why": "end_weight_update", "whole": False}),
    Hook("fence.reset", "around", _FENCED, {"why": "weight checker reset"}),
    Hook("fence.experts", "before", _RETIRING, {"why": "experts move between ranks (EPLB)"}),
    Hook("fence.backup", "before", _RETIRING, {"why": "experts come back from their backup"}),
)
"""Everything that R-Fork changes in SGLang. A hook without a target in this release is not applied there."""


def register() -> None:
    """Entry point `sglang.srt.plugins: rfork`. Raises SystemExit where R-Fork was asked for and can't work."""
    role = process_role()
    if role == "other":
        return
    try:
        register_hooks(role)
    except Exception as error:
        if asked_for(role):
            raise SystemExit(f"rfork {rfork.__version__}: refusing to start: {error}") from error
        log.warning("rfork %s is not available here: %s", rfork.__version__, error)


def register_hooks(role: str) -> None:
    """Hand the hooks of `role` to SGLang, and have them checked once SGLang has applied them. Raises ConfigError."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if role == "scheduler" and CONTROL_ENV not in os.environ:
        return  # a server of which nobody asked R-Fork: its ranks stay stock, to the last binding
    release = installed_release()
    targets = []
    for hook in HOOKS:
        target = release.find(hook.purpose)
        if target is not None and role in target.roles:
            HookRegistry.register(target.dotted, _function(hook), HookType(hook.how))
            targets.append(target.dotted)
    if role == "main" and release.find("arguments.load_format.hook"):
        release.get("arguments.load_format.hook")("handle_load_format")(resolution_step)
    _check_after_applying(HookRegistry, release, role, targets)


def _function(hook: Hook) -> Callable[..., Any]:
    """The hook's function, imported when SGLang first calls it: modules that need torch must not slow down `--help`."""
    module, _, name = hook.function.partition(":")

    @functools.cache
    def load() -> Callable[..., Any]:
        found: Callable[..., Any] = getattr(importlib.import_module(f"{__package__}.{module}"), name)
        return found(**hook.arguments) if hook.arguments else found

    def call(*args: Any, **kwargs: Any) -> Any:
        return load()(*args, **kwargs)

    return call


def _check_after_applying(registry: Any, release: Release, role: str, targets: Sequence[str]) -> None:
    """SGLang logs a hook that it could not apply and goes on. Look once it has applied them all, and refuse to go
    on.
    """
    apply_hooks = registry.apply_hooks.__func__

    def checked(cls: Any) -> None:
        apply_hooks(cls)
        registry.apply_hooks = classmethod(apply_hooks)
        missing = [t for t in targets if t not in cls._patched]
        if not missing:
            _applied[role] = len(targets)
            return
        text = f"SGLang {release.version} does not let R-Fork hook {', '.join(missing)}; supported: {SUPPORTED}"
        if asked_for(role):
            raise SystemExit(f"rfork {rfork.__version__}: refusing to start: {text}")
        log.warning("rfork %s: %s", rfork.__version__, text)

    registry.apply_hooks = classmethod(checked)


def announce(role: str, backend: str) -> None:
    """The first line of R-Fork in a process, said once logging is set up: SGLang loads plugins before that."""
    version = installed_release().version
    log.info(
        "rfork %s on SGLang %s: %d hooks applied, transport %s, role %s",
        *(rfork.__version__, version, _applied.get(role, 0), backend, role),
    )


def process_role() -> str:
    """main, scheduler or other, from the functions on the stack; names alone would confuse uvicorn's
    with SGLang's.
    """
    frame: types.FrameType | None = sys._getframe()
    while frame is not None:
        role = _CALLERS.get((frame.f_globals.get("__name__", ""), frame.f_code.co_name))
        if role is not None:
            return role
        frame = frame.f_back
    return "main" if multiprocessing.parent_process() is None else "other"


def asked_for(role: str) -> bool:
    """Whether this process belongs to a server that the user asked R-Fork of, as far as can be told this early."""
    if CONTROL_ENV in os.environ or role != "main":
        return CONTROL_ENV in os.environ
    words = [word.replace("_", "-") for word in sys.argv[1:]]
    return any(_asks(word) for word in words) or any(n.startswith("RFORK_") and n not in NOT_KEYS for n in os.environ)


def _asks(word: str) -> bool:
    """One of the words after the program: our flags or the load format, never a path that happens to have our name."""
    return word.startswith(("--remote-instance", "--rfork")) or word.rpartition("=")[2] == "remote-instance"
