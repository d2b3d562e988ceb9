"""Ports on this host, free and taken."""

import socket
from collections.abc import Iterator

import pytest
from support.ports import lend


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
