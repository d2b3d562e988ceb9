"""What a fork does beside the build of its model, in threads of its own, so that only bytes are left to wait for.

The manifest and digests are fetched; an engine is opened, reads the seed's fence, and maps the seed's memory.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Generic, Protocol, TypeVar

from rfork.binding import Region
from rfork.client.connect import Connector, Link, Page
from rfork.client.contract import HeldLease
from rfork.errors import SeedLost
from rfork.manifest import Manifest
from rfork.wire.seed import DigestTable, LeaseReply

logger = logging.getLogger(__name__)

T = TypeVar("T")


class OwnPage(Page, Protocol):
    """A page that exists before the model does."""

    @property
    def regions(self) -> tuple[Region, ...]:
        """What to register for it."""


class _Later(Generic[T]):
    """One call in a daemon thread, begun at once. `result()` waits, and raises what the call raised."""

    def __init__(self, name: str, call: Callable[[], T]) -> None:
        self._call = call
        self._value: list[T] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value.append(self._call())
        except BaseException as error:  # told to whoever asks for the result
            self._error = error

    def wait(self) -> None:
        self._thread.join()

    def result(self) -> T:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._value[0]


class PrefetchedLease:
    """A lease whose manifest and digests are on their way. As a context it ends after the last request has.

    `table` is the digest table, once somebody has asked for it.
    """

    def __init__(self, lease: HeldLease, *, with_digests: bool) -> None:
        self._lease = lease
        self.table: DigestTable | None = None
        self._manifest = _Later("rfork-manifest", lease.manifest)
        self._digests = _Later("rfork-digests", self._fetch_digests) if with_digests else None

    @property
    def reply(self) -> LeaseReply:
        return self._lease.reply

    @property
    def address(self) -> str:
        return self._lease.address

    def manifest(self) -> Manifest:
        return self._manifest.result()

    def digests(self) -> DigestTable:
        self.table = self._digests.result() if self._digests else self._fetch_digests()
        return self.table

    def check(self) -> None:
        self._lease.check()

    def _fetch_digests(self) -> DigestTable:
        self._manifest.wait()  # one connection, one request at a time
        return self._lease.digests()

    def __enter__(self) -> PrefetchedLease:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._manifest.wait()
        if self._digests is not None:
            self._digests.wait()


class Approach:
    """An engine that connects while the model is built. As a context it destroys what nobody has taken.

    The thread that connects stays until the end: a transport may keep what it needs with the thread that first read.
    """

    def __init__(self, connector: Connector, page: OwnPage, close_timeout_s: float) -> None:
        self.connector = connector
        self._page = page
        self._close_timeout_s = close_timeout_s
        self._taken = False
        self._over = threading.Event()
        self._done = threading.Event()
        self._link: Link | None = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rfork-connect", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._link = self._connect(self._page.regions)
        except BaseException as error:  # told to whoever takes the link
            self._error = error
        self._done.set()
        self._over.wait()

    def _connect(self, regions: Sequence[Region]) -> Link:
        link = self.connector.connect(self._page, regions, _unmeasured)
        try:
            with contextlib.suppress(SeedLost):  # the read itself will say what is wrong, with its own deadline
                self.connector.touch(link, self._page)
        except BaseException:
            link.engine.close(self._close_timeout_s)
            raise
        return link

    def take(self) -> Link:
        """Wait for the link; its engine is the caller's from here on. Raises what `Connector.connect` raises."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._link is not None
        self._taken = True
        return self._link

    def __enter__(self) -> Approach:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._done.wait()
        try:
            if self._link is not None and not self._taken:
                self._link.engine.close(self._close_timeout_s)
        finally:
            self._over.set()
            self._thread.join()


@contextlib.contextmanager
def _unmeasured(name: str) -> Iterator[None]:
    """These seconds pass beside others."""
    yield
