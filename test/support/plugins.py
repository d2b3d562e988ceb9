"""A test's own SGLang plugin, found by SGLang as any installed one is: a module and an entry point.

Servers of a fleet run in its folder, which is first on their path and on that of all processes they spawn.
"""

from __future__ import annotations

import textwrap
from pathlib import Path

PROBE = "TEST_PROBE"
"""Variable with the file into which a probe writes, or for which it waits."""


def install_plugin(folder: Path, name: str, register: str) -> None:
    """Make a plugin whose `register()` has this body. It loads in every process where SGLang loads plugins."""
    body = textwrap.indent(textwrap.dedent(register).strip(), "    ")
    (folder / f"{name}.py").write_text(f"def register():\n{body}\n")
    install_metadata(folder, name, "0", f"[sglang.srt.plugins]\n{name} = {name}:register\n")


def install_metadata(folder: Path, name: str, version: str, entry_points: str = "") -> None:
    """A distribution of that name and version, as far as importlib.metadata can see."""
    info = folder / f"{name}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (info / "entry_points.txt").write_text(entry_points)


LIVE_TENSORS = f"""
    import collections, gc, json, os
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def count(result, self):
        import torch
        gc.collect()
        alive = collections.Counter(
            f"{{t.dtype}} {{list(t.shape)}}" for t in gc.get_objects() if issubclass(type(t), torch.Tensor)
        )
        with open(os.environ["{PROBE}"], "w") as file:
            json.dump(alive, file)

    HookRegistry.register("sglang.srt.managers.scheduler.Scheduler.init_model_worker", count, HookType.AFTER)
"""
"""Writes, once a rank's models are loaded and published, how many tensors of each type and shape are alive in it."""

HELD_START = f"""
    import os, time
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def hold(original, *args, **kwargs):
        while not os.path.exists(os.environ["{PROBE}"]):
            time.sleep(0.05)
        return original(*args, **kwargs)

    HookRegistry.register("sglang.srt.entrypoints.http_server._wait_and_warmup", hold, HookType.AROUND)
"""
"""Keeps a server that listens already from becoming healthy until the file is there."""
