"""Running calls in one GPU's context, whichever thread makes them, without torch.

Mooncake registers memory and opens a peer's handles in the calling thread's current context. A thread that never
chose a device is on GPU 0: there registering another GPU's memory fails, and a needless context takes half a
gigabyte.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from types import TracebackType
from typing import Any

from rfork.errors import TransportError


class CudaContext:
    """The primary context of one device, the one that torch uses too: current inside, on any thread, and nestable."""

    def __init__(self, device_index: int) -> None:
        self._driver = _driver()
        self._context = ctypes.c_void_p()
        device = ctypes.c_int()
        self._call("cuInit", 0)
        self._call("cuDeviceGet", ctypes.byref(device), device_index)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def __enter__(self) -> CudaContext:
        self._call("cuCtxPushCurrent_v2", self._context)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._driver, name)(*arguments)
        if status != 0:
            raise TransportError(f"CUDA driver: {name} failed with {status}")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise TransportError(f"no CUDA driver here: {error}") from error


@functools.cache
def _context_of(device_index: int) -> CudaContext:
    """One for each device and process: retained once, and never given back while the process lives."""
    return CudaContext(device_index)


def device_context(device_index: int | None) -> contextlib.AbstractContextManager[object]:
    """The context of a CUDA device, or one that does nothing for host memory (None). Can be entered again and again."""
    return contextlib.nullcontext() if device_index is None else _context_of(device_index)
