"""SGLang: is it here, is it a release that the plugin has a table for, and is each name in that table as expected?

The table belongs to the plugin, which this package never imports by itself; here it is looked up by name, in a child
process, because checking a name imports the module that has it.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import os
from typing import Any

from rfork.config import Config
from rfork.doctor.finding import Finding, fail, ok
from rfork.doctor.probes.gpu import has_gpu_device

SUBJECT = "SGLang"
TABLE = "sglang_rfork.srt.compat"
_SHOWN = 6


def probe(config: Config) -> list[Finding]:
    compat: Any = importlib.import_module(TABLE)
    supported = f"sglang>=0.5.{compat.FIRST},<0.5.{compat.LAST + 1}"
    try:
        version = importlib.metadata.version("sglang")
    except importlib.metadata.PackageNotFoundError:
        return [
            fail(SUBJECT, "it is not installed here", f"pip install '{supported}' (or an extra: cpu, cuda12, cuda13)")
        ]
    try:
        release = compat.installed_release()
    except compat.UnsupportedSGLang as error:
        return [fail(SUBJECT, str(error), f"pip install '{supported}'")]
    findings = [ok(SUBJECT, f"{version}, supported (0.5.{compat.FIRST} to 0.5.{compat.LAST})")]
    if not os.environ.get("SGLANG_PLATFORM") and not has_gpu_device() and importlib.util.find_spec("sglang_host_cpu"):
        os.environ["SGLANG_PLATFORM"] = "host_cpu"  # else its modules look for kernels of a GPU build
    names = {target.path for role in compat.Role for target in release.for_role(role)}
    problems = list(dict.fromkeys(p for role in compat.Role for p in release.problems(role)))
    if not problems:
        return [*findings, ok("hooks", f"all {len(names)} names that the plugin touches are as expected")]
    remedy = f"this SGLang is not as released: reinstall it (pip install --force-reinstall --no-deps sglang=={version})"
    more = [f"and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
    text = f"{len(problems)} of {len(names)} names are not as expected: " + "; ".join([*problems[:_SHOWN], *more])
    return [*findings, fail("hooks", text, remedy)]
