"""Loading Mooncake's library under the right environment, and saying in one line why it does not load.

Mooncake reads address family and port range when its library is loaded, and what to install at `initialize`: both from
the environment of the process, which belongs to the user. So variables are set around our own calls and put back.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import re
import threading
from collections.abc import Iterator, Mapping
from importlib import metadata
from typing import Any

from rfork.errors import TransportError

DEBIAN_PACKAGES = {
    "libibverbs": "libibverbs1",
    "librdmacm": "librdmacm1",
    "libnuma": "libnuma1",
    "libcurl": "libcurl4",
    "libmlx5": "ibverbs-providers",
}
NEEDED_METHODS = (
    "batch_register_memory",
    "batch_unregister_memory",
    "batch_transfer_async_read",
    "transfer_check_status",
    "get_rpc_port",
)
TESTED = "0.3.13 and 0.3.14"
EXTRA = "pip install 'sglang-rfork[cpu]' (or [cuda12], [cuda13])"


_ENVIRONMENT_LOCK = threading.Lock()


@contextlib.contextmanager
def environment(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set (or, with None, remove) process variables, and put back what was there. One body at a time."""
    with _ENVIRONMENT_LOCK:
        before = {name: os.environ.get(name) for name in values}
        _assign(values)
        try:
            yield
        finally:
            _assign(before)


def _assign(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def load_time_variables(host: str, port_range: tuple[int, int] | None) -> dict[str, str | None]:
    """Variables that count only while the library is loaded; what is not asked for is left as the user has it."""
    wanted: dict[str, str | None] = {"MC_USE_IPV6": "1"} if ":" in host else {}
    if port_range is not None:
        wanted["MC_MIN_RPC_PORT"], wanted["MC_MAX_RPC_PORT"] = map(str, port_range)
    return wanted


def installed_wheels() -> dict[str, str]:
    """Mooncake distributions in this environment: name → version. More than one overwrite each other's files."""
    found = {}
    for dist in metadata.distributions():
        name = (dist.metadata["Name"] or "").lower().replace("_", "-")
        if name.startswith("mooncake-transfer-engine"):
            found[name] = dist.version
    return found


def load_mooncake() -> Any:
    """The module `mooncake.engine`. Raises TransportError naming the missing package, wheel or method.

    The first call of a process loads the library: make it inside `environment(load_time_variables(…))`.
    """
    try:
        module = importlib.import_module("mooncake.engine")
    except (ImportError, OSError) as error:
        raise TransportError(explain_import_error(str(error), installed_wheels())) from error
    missing = [m for m in NEEDED_METHODS if not hasattr(module.TransferEngine, m)]
    if missing:
        wheels = ", ".join(f"{n} {v}" for n, v in installed_wheels().items()) or "of unknown version"
        raise TransportError(
            f"this Mooncake ({wheels}) is too old: it has no {', '.join(missing)}. Tested with {TESTED}; {EXTRA}"
        )
    return module


def explain_import_error(text: str, wheels: dict[str, str]) -> str:
    """What to do about an import error of `mooncake.engine` whose message is `text`."""
    if len(wheels) > 1:
        both = " and ".join(f"{n} {v}" for n, v in sorted(wheels.items()))
        return f"two Mooncake wheels overwrite each other ({both}): uninstall both, then {EXTRA} ({text})"
    library = re.search(r"(lib[\w+.-]+?)(?:-[\w.]+)?\.so[.\d]*: cannot open shared object", text)
    if library:
        stem = library.group(1)
        package = DEBIAN_PACKAGES.get(stem)
        if package:
            return f"Mooncake needs {stem}, which is missing: apt-get install {package} ({text})"
        if stem.startswith("libcuda"):
            return f"this Mooncake wheel is for CUDA, which is missing here: {EXTRA} with the right extra ({text})"
        return f"Mooncake needs {stem}, which is missing ({text})"
    if not wheels:
        return f"Mooncake is not installed: {EXTRA} ({text})"
    return f"Mooncake ({', '.join(f'{n} {v}' for n, v in wheels.items())}) does not load: {text}"
