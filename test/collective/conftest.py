"""Ports on this host, free and taken."""

import socket
from collections.abc import Iterator

import pytest


@pytest.fixture
def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def taken_port() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        yield int(holder.getsockname()[1])
