"""An SGLang platform plugin for machines without a GPU: real SGLang, torch-native kernels, nothing to compile.

It is active only under `SGLANG_PLATFORM=host_cpu`. Installed beside SGLang on a GPU machine it changes nothing there.
"""

import os

NAME = "host_cpu"


def selected() -> bool:
    """Whether the user asked for this platform. It never chooses itself, not even where there is no GPU."""
    return os.environ.get("SGLANG_PLATFORM") == NAME


def activate() -> str | None:
    """Entry point of `sglang.srt.platforms`: the platform's class, by name, or None to stand aside."""
    return "sglang_host_cpu.platform.HostCpuPlatform" if selected() else None


def register() -> None:
    """Entry point of `sglang.srt.plugins`, called in each SGLang process: add what torch-native lacks on a CPU."""
    if selected():
        from sglang_host_cpu import additions

        additions.register()
