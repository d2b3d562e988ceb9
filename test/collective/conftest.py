"""Ports on this host, free and taken; and that no thread of a group is left."""

import socket
import threading
from collections.abc import Iterator

import pytest
from support.ports import lend
from support.seed_node import until


@pytest.fixture(autouse=True, scope="module")
def no_group_outlives_its_module() -> Iterator[None]:
    """A thread that waits inside torch while Python ends aborts the process: all tests passed, and the run failed."""
    yield
    until(lambda: not any(thread.name.startswith("rfork-group-") for thread in threading.enumerate()))


@pytest.fixture
def free_port() -> Iterator[int]:
    """It stays free until the test uses it, also for the kernel, which hands out others."""
    block = lend()
    yield block.port
    block.release()


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield int(holder.getsockname()[1])
