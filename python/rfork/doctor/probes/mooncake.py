"""Mooncake: does its library load, and if not, which package is missing?"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import re
from typing import Any

from rfork.config import Config
from rfork.doctor.finding import Finding, fail, ok, warn
from rfork.errors import TransportError
from rfork.transports.mooncake_import import DEBIAN_PACKAGES, EXTRA, installed_wheels, load_mooncake

SUBJECT = "Mooncake"
LIBRARIES = ("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1", "libcurl.so.4")
"""What its wheels take from the system."""


def probe(config: Config) -> list[Finding]:
    wheels = installed_wheels()
    shown = " and ".join(f"{name} {version}" for name, version in sorted(wheels.items()))
    if len(wheels) > 1:
        remedy = f"pip uninstall {' '.join(sorted(wheels))}, then {EXTRA}"
        return [fail(SUBJECT, f"{len(wheels)} wheels overwrite each other's files: {shown}", remedy)]
    try:
        module = load_mooncake()
    except TransportError as error:
        return [_explained(str(error), wheels)]
    return [ok(SUBJECT, f"{shown or 'not from a wheel'} loads"), *_cuda_build(module, wheels)]


def _explained(problem: str, wheels: dict[str, str]) -> Finding:
    packages = missing_packages()
    if wheels and packages and "cannot open shared object" in problem:
        return fail(SUBJECT, f"it does not load: {problem}", f"as root: apt-get install {' '.join(packages)}")
    return fail(SUBJECT, problem, EXTRA if not wheels else "")


def missing_packages() -> list[str]:
    """Debian packages of every system library that is missing: an import error names only the first."""
    return [DEBIAN_PACKAGES[library.partition(".")[0]] for library in LIBRARIES if not _loads(library)]


def _loads(library: str) -> bool:
    try:
        ctypes.CDLL(library)
    except OSError:
        return False
    return True


def _cuda_build(module: Any, wheels: dict[str, str]) -> list[Finding]:
    """A wheel for another CUDA than torch's loads, and then moves bytes over TCP."""
    if importlib.util.find_spec("torch") is None:
        return []
    import torch

    if not torch.cuda.is_available() or torch.version.cuda is None:
        return []
    major = torch.version.cuda.split(".")[0]
    if getattr(module, "SUPPORT_INTRA_NVLINK", False):
        named = {re.sub(r".*cuda(\d+)$", r"\1", name) for name in wheels if re.search(r"cuda\d+$", name)} or {"12"}
        if wheels and major not in named:
            return [
                warn(
                    SUBJECT,
                    f"its wheel is for CUDA {named.pop()}, torch for CUDA {major}",
                    f"use the extra cuda{major}",
                )
            ]
        return []
    remedy = f"pip uninstall {' '.join(wheels)}, then pip install 'sglang-rfork[cuda{major}]'"
    return [warn(SUBJECT, "this wheel has no NVLink: forks inside one host go over TCP, at 1 to 2 GB/s", remedy)]
