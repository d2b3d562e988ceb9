"""The plugin: is its entry point here, and will SGLang load it with these variables? Nothing of SGLang is imported."""

from __future__ import annotations

import importlib.metadata
import os

import rfork
from rfork.config import Config
from rfork.doctor.finding import Finding, fail, ok

SUBJECT = "plugin"
PLUGINS_GROUP = "sglang.srt.plugins"
PLATFORMS_GROUP = "sglang.srt.platforms"
NAME = "rfork"
PACKAGE = "sglang_rfork"


def probe(config: Config) -> list[Finding]:
    entries = [e for e in importlib.metadata.entry_points(group=PLUGINS_GROUP) if e.module.split(".")[0] == PACKAGE]
    if not entries:
        return [
            fail(
                SUBJECT,
                f"no entry point of R-Fork in the group {PLUGINS_GROUP}: SGLang starts without it",
                "install the distribution into the environment that runs SGLang: pip install sglang-rfork",
            )
        ]
    entry = entries[0]
    chosen = {name.strip() for name in os.environ.get("SGLANG_PLUGINS", "").split(",") if name.strip()}
    if chosen and entry.name not in chosen:
        return [
            fail(
                SUBJECT,
                f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} leaves {entry.name!r} out: SGLang starts without it",
                f"add {entry.name} to SGLANG_PLUGINS, or unset it",
            )
        ]
    return [_loads(entry), _platform(entry)]


def _platform(entry: importlib.metadata.EntryPoint) -> Finding:
    selected = os.environ.get("SGLANG_PLATFORM", "")
    platforms = importlib.metadata.entry_points(group=PLATFORMS_GROUP)
    if selected and selected not in platforms.names:
        known = ", ".join(sorted(platforms.names)) or "none"
        return fail(
            "platform",
            f"SGLANG_PLATFORM={selected} names no platform plugin that is installed (installed: {known})",
            "install the distribution that has it (host_cpu: pip install sglang-host-cpu), or unset SGLANG_PLATFORM",
        )
    owners = {p.dist.name for p in platforms if p.dist and p.name != selected}
    if selected and entry.dist and entry.dist.name in owners:
        return fail(
            "platform",
            f"SGLANG_PLATFORM={selected} makes SGLang drop {entry.dist.name}, which has another platform",
            "unset SGLANG_PLATFORM, or install R-Fork as a distribution of its own",
        )
    return ok("platform", f"SGLANG_PLATFORM={selected}" if selected else "chosen by SGLang (SGLANG_PLATFORM is unset)")


def _loads(entry: importlib.metadata.EntryPoint) -> Finding:
    try:
        entry.load()
    except Exception as error:
        return fail(
            SUBJECT,
            f"{entry.value} does not load: {type(error).__name__}: {error}",
            "reinstall: pip install --force-reinstall --no-deps sglang-rfork",
        )
    return ok(SUBJECT, f"rfork {rfork.__version__}, loaded by SGLang as {entry.value}")
