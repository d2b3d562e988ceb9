"""The client's end of a lease: take it, fetch what it opens, renew it while reading, give it back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from rfork import wire
from rfork.auth import Signer, seed_audience
from rfork.client.calls import Caller, Headers, parse_json, parse_msgpack, refusal_of
from rfork.client.resolve import reachable_listener
from rfork.clock import Clock, SystemClock
from rfork.errors import RForkError, SeedError, SeedRefused, SeedUnreachable
from rfork.manifest import Manifest
from rfork.tls import Tls
from rfork.wire.seed import LEASES_PATH, DigestTable, LeaseReply, LeaseRequest

logger = logging.getLogger(__name__)

MAX_REPLY_NBYTES = 128 << 20
"""A lease carries the addresses of every tensor: 30 bytes of JSON each."""

RELEASE_TIMEOUT_S = 3.0
_SMALL_NBYTES = 1 << 20
_RENEWALS_PER_TTL = 3

T = TypeVar("T")


def take_lease(
    listener: str,
    request: LeaseRequest,
    *,
    timeout_s: float,
    tls: Tls | None = None,
    headers: Headers | None = None,
    signer: Signer | None = None,
    clock: Clock | None = None,
) -> Lease:
    """Ask a seed's listener for the right to read one shard. `timeout_s` bounds this and every later request.

    A shard on another node of the same instance is asked for there, once. Raises SeedRefused with the seed's reason,
    SeedUnreachable, or SeedUnproven where the fleet's key is `signer`'s.
    """

    def ask(where: str, headers: Headers | None) -> Lease:
        def make_caller() -> Caller:
            return Caller(where, tls=tls, headers=headers, signer=signer, audience=seed_audience(request.seed))

        return _take_here(make_caller, request, timeout_s, clock)

    try:
        return ask(listener, headers)
    except SeedRefused as refusal:
        if refusal.listener is None:
            raise
        there = reachable_listener(refusal.listener, listener)
    return ask(there, None)


def _take_here(
    make_caller: Callable[[], Caller], request: LeaseRequest, timeout_s: float, clock: Clock | None
) -> Lease:
    caller = make_caller()
    try:
        where = f"lease from {caller.base_url}"
        answer = caller.call(
            "POST", LEASES_PATH, timeout_s=timeout_s, limit=MAX_REPLY_NBYTES, body=wire.encode(request)
        )
        if answer.status != 201:
            raise refusal_of(answer, where)
        reply = parse_json(answer, LeaseReply, where, limit=MAX_REPLY_NBYTES)
        problem = _contradiction(reply, request)
        if problem is not None:
            raise SeedUnreachable(f"{where}: {problem}")
    except BaseException:
        caller.close()
        raise
    return Lease(caller, reply, timeout_s, make_caller(), clock or SystemClock())


def _contradiction(reply: LeaseReply, request: LeaseRequest) -> str | None:
    """Why a reply can't be true, or None."""
    if reply.ttl_s <= 0:
        return f"a lease of {reply.ttl_s} s is none"
    if request.seed is not None and reply.instance_id != request.seed:
        return f"{request.seed} was asked, {reply.instance_id} answered"
    if request.content != reply.content and request.weights == "checkpoint":
        return f"{request.content} was asked for, {reply.content} was granted"
    if reply.binding.generation != reply.generation or reply.generation % 2:
        return f"generation {reply.generation} with a binding at {reply.binding.generation}"
    if reply.binding.manifest_digest != reply.manifest_digest:
        return "the lease and its binding name different manifests"
    if not all(p.startswith("/") for p in (reply.manifest_path, reply.digests_path)):
        return "paths must be on the same listener"
    return None


class Lease:
    """A granted lease. From `keep()` on it is renewed, until `release()`; as a context it is kept inside and released
    at the end, whatever happens.
    """

    def __init__(self, caller: Caller, reply: LeaseReply, timeout_s: float, renewer: Caller, clock: Clock) -> None:
        self.reply = reply
        self._caller = caller
        self._timeout_s = timeout_s
        self._renewer = renewer
        self._clock = clock
        self._stop = threading.Event()
        self._lost: SeedError | None = None
        self._thread = threading.Thread(target=self._keep, name="rfork-lease", daemon=True)

    @property
    def address(self) -> str:
        """The listener that granted it."""
        return self._caller.base_url

    def manifest(self) -> Manifest:
        """What the seed holds. Raises SeedRefused or SeedUnreachable."""
        return self._fetch(self.reply.manifest_path, Manifest)

    def digests(self) -> DigestTable:
        """Digests of its bytes. A seed may have to take them first. Raises SeedRefused or SeedUnreachable."""
        return self._fetch(self.reply.digests_path, DigestTable)

    def check(self) -> None:
        """Raise what ended the lease early, if anything did."""
        if self._lost is not None:
            raise self._lost

    def keep(self) -> None:
        """Renew it from now on, in a thread of its own. Whoever waits for something with a lease in hand keeps it."""
        if self._thread.ident is None and not self._stop.is_set():
            self._thread.start()

    def release(self) -> None:
        """Stop renewing and give the place back, once. Never raises: an unreleased lease expires."""
        if self._stop.is_set():
            return
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(RELEASE_TIMEOUT_S)
        path = f"{LEASES_PATH}/{self.reply.lease}"
        try:
            self._caller.call("DELETE", path, timeout_s=RELEASE_TIMEOUT_S, limit=_SMALL_NBYTES)
        except RForkError as error:
            logger.info("rfork: lease %s was not released, it expires by itself: %s", self.reply.lease, error)
        self._caller.close()
        self._renewer.close()

    def __enter__(self) -> Lease:
        self.keep()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _fetch(self, path: str, kind: type[T]) -> T:
        where = f"{self.address}{path}"
        answer = self._caller.call("GET", path, timeout_s=self._timeout_s, limit=wire.MAX_BLOB_NBYTES)
        if answer.status != 200:
            raise refusal_of(answer, where)
        return parse_msgpack(answer, kind, where)

    def _keep(self) -> None:
        """Renew three times in a TTL. A refusal ends the lease; silence does once the TTL has passed."""
        period_s = self.reply.ttl_s / _RENEWALS_PER_TTL
        path = f"{LEASES_PATH}/{self.reply.lease}/renew"
        renewed_s = self._clock.now()
        while not self._clock.wait(self._stop, period_s):
            try:
                answer = self._renewer.call("POST", path, timeout_s=period_s, limit=_SMALL_NBYTES)
                if 200 <= answer.status < 300:
                    renewed_s = self._clock.now()
                else:
                    error = refusal_of(answer, f"renewal of lease {self.reply.lease}")
                    if isinstance(error, SeedRefused):
                        self._lost = error
                        return
            except RForkError as failure:
                logger.debug("rfork: renewal of lease %s failed: %s", self.reply.lease, failure)
            if self._clock.now() - renewed_s > self.reply.ttl_s:
                self._lost = SeedUnreachable(
                    f"lease {self.reply.lease} at {self.address} expired: "
                    f"no renewal got through in {self.reply.ttl_s:g} s"
                )
                return

    def __repr__(self) -> str:
        state = "lost" if self._lost else "released" if self._stop.is_set() else "held"
        return f"<Lease {self.reply.lease} {state} of {self.reply.instance_id} generation {self.reply.generation}>"
