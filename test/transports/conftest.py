"""Every transport that runs here, behind one handle; what a test opens is closed after it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from rfork.transports.base import Engine, Transport
from rfork.transports.memory import MemoryFabric, MemoryTransport
from rfork.transports.mooncake import MooncakeTransport


class Opener:
    """Opens engines of one transport and closes them all."""

    def __init__(self, transport: Transport) -> None:
        self.transport = transport
        self._engines: list[Engine] = []

    def __call__(self) -> Engine:
        engine = self.transport.open()
        self._engines.append(engine)
        return engine

    def close_all(self) -> None:
        for engine in self._engines:
            engine.close(10.0)


@pytest.fixture(params=["memory", "mooncake-tcp"])
def open_engine(request: pytest.FixtureRequest) -> Iterator[Opener]:
    transport: Transport = (
        MemoryTransport(MemoryFabric())
        if request.param == "memory"
        else MooncakeTransport(protocol="tcp", host="127.0.0.1", connect_timeout_s=2.0)
    )
    opener = Opener(transport)
    yield opener
    opener.close_all()


@pytest.fixture
def open_mooncake() -> Iterator[Opener]:
    opener = Opener(MooncakeTransport(protocol="tcp", host="127.0.0.1", connect_timeout_s=2.0))
    yield opener
    opener.close_all()
