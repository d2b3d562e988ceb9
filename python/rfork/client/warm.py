"""What the first fork or publication of a process would otherwise wait for, done while the engine starts."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from typing import Any

from rfork.client.calls import Caller

logger = logging.getLogger(__name__)


def warm_up(device: Any) -> None:
    """Load the HTTP client and the digests of `device`, a torch device. Never raises: who needs them will say more."""
    started_s = time.monotonic()
    with contextlib.suppress(Exception):
        Caller("http://127.0.0.1:9").close()
    with contextlib.suppress(Exception):
        from rfork.digest import prepare

        prepare(device)
    logger.debug("rfork: warmed up in %.2f s", time.monotonic() - started_s)


def warm_up_in_background(device: Any) -> threading.Thread:
    """`warm_up` in a daemon thread, which is returned."""
    thread = threading.Thread(target=warm_up, args=(device,), name="rfork-warm-up", daemon=True)
    thread.start()
    return thread
