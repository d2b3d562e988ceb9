"""A fleet with a key: seeds with listeners, a planner behind a socket, and certificates of an authority of ours."""

from __future__ import annotations

import shutil
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from support.seed_node import Seed

from rfork import patience
from rfork.auth import PLANNER, Guard
from rfork.clock import SystemClock
from rfork.keys import KeyRing
from rfork.planner.app import create_app
from rfork.planner.legacy import LegacyBook
from rfork.planner.policy import Policy
from rfork.planner.service import PlannerService
from rfork.tls import Certificate

from . import KEY


@pytest.fixture
def make_seed() -> Iterator[Callable[..., Seed]]:
    """A seed that serves one shard. `key=None` is one of a fleet without a key."""
    with ExitStack() as stack:

        def make(**config: Any) -> Seed:
            given = {"key": KEY, **config}
            return Seed(stack, **{name: value for name, value in given.items() if value is not None}).serve()

        yield make


@pytest.fixture
def seed(make_seed: Callable[..., Seed]) -> Seed:
    return make_seed()


class Planner:
    """A real planner behind a real socket, in a thread of this process."""

    def __init__(self, key: str | None = KEY, *, legacy: bool = False, certificate: Certificate | None = None) -> None:
        self.service = PlannerService(Policy(settle_s=0.0), SystemClock())
        guard = Guard(KeyRing(key), lambda: (PLANNER,)) if key else None
        app = create_app(self.service, guard=guard, legacy=LegacyBook() if legacy else None)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http{'s' if certificate else ''}://127.0.0.1:{self._socket.getsockname()[1]}"
        files = {"ssl_certfile": certificate.cert_file, "ssl_keyfile": certificate.key_file} if certificate else {}
        config = uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=60, **files)
        self._server = patience.Server(config, patience.PLANNER, self.service.let_go)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), daemon=True)

    def start(self) -> Planner:
        self._thread.start()
        deadline = time.monotonic() + 10
        while not self._server.started:
            assert time.monotonic() < deadline, "the planner did not start within 10 s"
            time.sleep(0.01)
        return self

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive(), "a planner that is told to end waits for nobody who is idle"
        self._socket.close()


@pytest.fixture
def make_planner() -> Iterator[Callable[..., Planner]]:
    with ExitStack() as stack:

        def make(*args: Any, **fields: Any) -> Planner:
            planner = Planner(*args, **fields).start()
            stack.callback(planner.stop)
            return planner

        yield make


@pytest.fixture
def planner(make_planner: Callable[..., Planner]) -> Planner:
    return make_planner()


class Authority:
    """A private certificate authority, and what it issues."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.ca_file = str(folder / "ca.pem")
        self._openssl("req", "-x509", *self._new_key("ca"), "-out", self.ca_file, "-days", "2", "-subj", "/CN=ours")

    def issue(self, name: str, alternatives: str) -> Certificate:
        """A certificate for `alternatives`, such as `DNS:seed.fleet` or `IP:127.0.0.1`."""
        request, cert_file = self._folder / f"{name}.csr", self._folder / f"{name}.pem"
        self._openssl("req", *self._new_key(name), "-out", str(request), "-subj", f"/CN={name}")
        extensions = self._folder / f"{name}.ext"
        extensions.write_text(f"subjectAltName={alternatives}\n")
        self._openssl(
            *("x509", "-req", "-in", str(request), "-CA", self.ca_file, "-CAkey", str(self._folder / "ca.key")),
            *("-CAcreateserial", "-days", "2", "-extfile", str(extensions), "-out", str(cert_file)),
        )
        return Certificate(str(cert_file), str(self._folder / f"{name}.key"))

    def _new_key(self, name: str) -> list[str]:
        kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        return [*kind, "-keyout", f"{self._folder}/{name}.key"]

    def _openssl(self, *args: str) -> None:
        subprocess.run(["openssl", *args], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    return Authority(tmp_path_factory.mktemp("authority"))
