"""Where seeds come from. Only rank 0 asks a source; the other ranks are told what it answered.

A source is asked for the next seed until it has none, and hears how each one went.
"""

from __future__ import annotations

import logging
import socket
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol

import msgspec

from rfork.auth import Signer
from rfork.client.calls import Headers
from rfork.client.resolve import Candidate, resolve
from rfork.clock import Clock
from rfork.config import Config
from rfork.errors import SeedError, SeedRefused
from rfork.keys import keyring
from rfork.tls import Tls
from rfork.wire.seed import WeightsReport

logger = logging.getLogger(__name__)

DNS_PREFIX = "dns+"
PAUSE_S = 1.0
"""Before a seed that said it would be of use soon is asked again, where it named no time."""


class Offer(msgspec.Struct, frozen=True):
    """The next seed to try, or None with the reason why there is none. `elected`: this instance is the one that reads
    the disk.
    """

    candidate: Candidate | None = None
    reason: str = "no_seed"
    why: str = ""
    elected: bool = False


class SeedSource(Protocol):
    """Used by one thread of rank 0, for one load."""

    @property
    def bound_s(self) -> float:
        """The longest that `next` may take; every rank computes the same from its settings."""

    def next(self) -> Offer: ...

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        """That seed was no use."""

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None: ...


class Addresses:
    """Seeds at known addresses, in order. One that is not ready or busy is asked again until `seek_timeout_s` is over.

    `typed` addresses may be sent SGLang's API keys through `headers`; those of a list may not.
    """

    def __init__(
        self,
        typed: Iterable[str],
        listed: Iterable[str],
        settings: Config,
        clock: Clock,
        *,
        own_instance_ids: Collection[str] = (),
        headers: Headers | None = None,
    ) -> None:
        self._typed = tuple(typed)
        self._todo = deque([*self._typed, *(a for entry in listed for a in expand(entry))])
        self._settings, self._clock, self._headers = settings, clock, headers
        self._own = tuple(own_instance_ids)
        self._later: list[tuple[float, str]] = []
        self._deadline_s = clock.now() + settings.seek_timeout_s
        self._problems: list[str] = []
        self._reason = "no_seed"
        self._at: dict[str, str] = {}

    @property
    def bound_s(self) -> float:
        return 2 * self._settings.seek_timeout_s

    def next(self) -> Offer:
        while address := self._next_address():
            try:
                candidate = self._resolve(address)
            except SeedError as error:
                self._note(address, error)
                continue
            self._at[candidate.instance_id] = address
            return Offer(candidate)
        why = "; ".join(dict.fromkeys(self._problems)) or (
            "nobody to ask: give --remote-instance-weight-loader-seed-instance-ip and -service-port, "
            "`planner_url` or `seeds`"
        )
        return Offer(reason=self._reason, why=why)

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        self._note(self._at[candidate.instance_id], error)

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None:
        """Nobody has to be told."""

    def _resolve(self, address: str) -> Candidate:
        return resolve(
            address,
            timeout_s=self._settings.seek_timeout_s,
            own_instance_ids=self._own,
            tls=tls_of(self._settings),
            headers=self._headers if address in self._typed else None,
            signer=signer_of(self._settings, "".join(self._own[:1])),
        )

    def _next_address(self) -> str | None:
        if self._todo:
            return self._todo.popleft()
        if not self._later:
            return None
        self._later.sort()
        due_s, address = self._later.pop(0)
        self._clock.sleep(max(0.0, due_s - self._clock.now()))
        return address

    def _note(self, address: str, error: SeedError) -> None:
        self._problems.append(f"{address}: {error}")
        self._reason = error.reason
        if isinstance(error, SeedRefused) and error.retry_after_s is not None:
            due_s = self._clock.now() + max(0.1, min(PAUSE_S, error.retry_after_s))
            if due_s < self._deadline_s:
                self._later.append((due_s, address))


class InTurn:
    """One source after the other; what each of them said stands in the end."""

    def __init__(self, sources: Sequence[SeedSource]) -> None:
        self._sources = deque(sources)
        self._whys: list[str] = []
        self.bound_s = sum(s.bound_s for s in sources)

    def next(self) -> Offer:
        while True:
            offer = self._sources[0].next()
            if offer.candidate is not None:
                return offer
            self._whys.append(offer.why)
            if offer.elected or len(self._sources) == 1:
                return Offer(reason=offer.reason, why="; ".join(self._whys), elected=offer.elected)
            self._sources.popleft()

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        self._sources[0].failed(candidate, error)

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None:
        self._sources[0].succeeded(candidate, report)


class Known:
    """One seed and no other: the one that this instance's target came from, for its drafts."""

    bound_s = 0.0

    def __init__(self, candidate: Candidate | None, why: str = "") -> None:
        self._candidate, self._why, self._reason = candidate, why, "no_seed"

    def next(self) -> Offer:
        candidate, self._candidate = self._candidate, None
        return Offer(candidate) if candidate else Offer(reason=self._reason, why=self._why)

    def failed(self, candidate: Candidate, error: SeedError) -> None:
        self._reason, self._why = error.reason, f"{candidate.instance_id} at {candidate.listener}: {error}"

    def succeeded(self, candidate: Candidate, report: WeightsReport) -> None:
        """Nobody has to be told."""


def expand(entry: str, look_up: Callable[[str, int], Sequence[str]] | None = None) -> list[str]:
    """`host:port` as it is; `dns+host:port` as every address that the name has now (a headless Service lists its
    pods); `dns+https://host:port` likewise, each with the scheme.
    """
    if not entry.startswith(DNS_PREFIX):
        return [entry]
    scheme, slashes, address = entry.removeprefix(DNS_PREFIX).rpartition("://")
    host, _, port = address.rpartition(":")
    try:
        return [f"{scheme}{slashes}{found}" for found in (look_up or _addresses_of)(host, int(port))]
    except OSError as error:
        logger.warning("rfork: %s has no addresses now: %s", entry, error)
        return []


def _addresses_of(host: str, port: int) -> list[str]:
    found = dict.fromkeys(info[4][0] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
    return [f"[{a}]:{port}" if ":" in str(a) else f"{a}:{port}" for a in found]


def tls_of(settings: Config) -> Tls:
    return Tls(settings.ca_file, settings.tls_server_name)


def signer_of(settings: Config, client: str = "") -> Signer | None:
    """What proves the fleet key for this process; None where the fleet has none. Raises ConfigError."""
    keys = keyring(settings.key, settings.key_file)
    return Signer(keys, client) if keys is not None else None
