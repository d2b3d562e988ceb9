"""Proof of the fleet key (I12): a ticket on every request, a proof on every answer. The key itself is never sent.

A ticket is one header, `Rfork-Ticket: ask1;<date>;<nonce>;<client>;<audience>;<mac>`. Its HMAC-SHA256 covers all of
that, the method, the target and the digest of the body, so it is good for one request to one service. An answer to a
good ticket carries `Rfork-Proof: <date>;<mac>` over the ticket, the status and the digest of the (unpacked) body.

The date is a guess at the verifier's clock, not a clock that two hosts must share: a verifier whose clock is elsewhere
answers 401 with its own reading, proven like any answer, and the asker tries again with that. So a wrong clock costs
one round trip, and within the tolerance a verifier remembers which tickets it has seen.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
import threading
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple, Protocol, TypeVar

from rfork.clock import Clock, SystemClock
from rfork.keys import KeyRing

TICKET_HEADER = "rfork-ticket"
PROOF_HEADER = "rfork-proof"
ASK, VIEW = "ask1", "view1"
PLANNER, ANY_SEED = "planner", "seed"

TOLERANCE_S = 60.0
"""How far a ticket's date may be from the verifier's clock. Tickets are remembered for twice that, so none is taken
twice.
"""
MAX_VIEW_S = 12 * 3600.0
MAX_REMEMBERED = 1_000_000
_MAX_HEADER = 1024
_FIELD = re.compile(r"[^A-Za-z0-9._:@-]")


def seed_audience(instance_id: str | None) -> str:
    """Who a request to a seed is for: one life of one instance, or whoever answers (to learn who that is)."""
    return f"{ANY_SEED}:{_FIELD.sub('_', instance_id)}" if instance_id else ANY_SEED


class Unproven(Exception):
    """The answer proves no fleet key: refused for want of a good ticket (`status` 401), or sent by a stranger. Nothing
    of it counts.
    """

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class Ticket(NamedTuple):
    """One request's proof, as it travels."""

    kind: str
    date: int
    nonce: str
    client: str
    audience: str
    mac: str

    def __str__(self) -> str:
        return ";".join(map(str, self))

    @classmethod
    def parse(cls, text: str) -> Ticket | None:
        """A well-formed ticket, not a checked one."""
        kind, *fields = text.split(";") if len(text) <= _MAX_HEADER else [""]
        if kind not in (ASK, VIEW) or len(fields) != 5 or not re.fullmatch(r"[0-9]{1,12}", fields[0]):
            return None
        return cls(kind, int(fields[0]), *fields[1:])


def _mac(key: bytes, *fields: object) -> str:
    return hmac.new(key, json.dumps(fields).encode(), hashlib.sha256).hexdigest()


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def _mint(key: bytes, kind: str, date: int, client: str, audience: str, *covered: str) -> Ticket:
    bare = Ticket(kind, date, secrets.token_hex(12), _FIELD.sub("_", client)[:128], audience, "")
    return bare._replace(mac=_mac(key, *bare[:-1], *covered))


def mint_view(keys: KeyRing, client: str, *, ttl_s: float, clock: Clock | None = None) -> str:
    """A ticket for people: to look at a planner, as often as they like, until `ttl_s` is over. It changes nothing."""
    until = int((clock or SystemClock()).unix_s() + min(ttl_s, MAX_VIEW_S))
    return str(_mint(keys.all()[0], VIEW, until, client, PLANNER))


class Answered(Protocol):
    """An answer as it arrived; `body` is unpacked, `proof` the header or an empty text."""

    @property
    def status(self) -> int: ...

    @property
    def body(self) -> bytes: ...

    @property
    def proof(self) -> str: ...


A = TypeVar("A", bound=Answered)


class Signer:
    """The asking side of one process. Thread-safe."""

    def __init__(self, keys: KeyRing, client: str = "", *, clock: Clock | None = None) -> None:
        self.keys = keys
        self._client = client
        self._clock = clock or SystemClock()
        self._ahead_s: dict[str, float] = {}

    def ask(
        self, audience: str, method: str, target: str, body: bytes, send: Callable[[Mapping[str, str]], A], to: str = ""
    ) -> A:
        """Let `send` send the request with a ticket until its answer is proven. Raises Unproven.

        A verifier that has another key in front is asked with the previous one, a verifier with another clock by its
        own; `to` names whose clock that is.
        """
        for key in self.keys.all():
            for _ in range(2):
                date = self._clock.unix_s() + self._ahead_s.get(to, 0.0)
                ticket = _mint(key, ASK, int(date), self._client, audience, method, target, _digest(body))
                answer = send({TICKET_HEADER: str(ticket)})
                theirs = proven_date(key, ticket, answer)
                if theirs is None:
                    if answer.status == 401:
                        break
                    what = f"answered (status {answer.status}) without a proof of this fleet's key"
                    raise Unproven(f"{what}: it has none, or another", answer.status)
                if answer.status != 401 or abs(theirs - date) <= TOLERANCE_S:
                    return answer
                self._ahead_s[to] = theirs - self._clock.unix_s()
        also = "" if audience == PLANNER else ", and SGLang's API key"
        raise Unproven(f"status 401: is the fleet key the same on both sides{also}?", 401)


def proven_date(key: bytes, ticket: Ticket, answer: Answered) -> int | None:
    """The verifier's clock, if the answer is from somebody with the key who took `ticket` for good; else None."""
    date, _, mac = answer.proof.partition(";")
    if not re.fullmatch(r"[0-9]{1,12}", date):
        return None
    expected = _mac(key, "answer", ticket.mac, answer.status, _digest(answer.body), int(date))
    return int(date) if hmac.compare_digest(expected.encode(), mac.encode()) else None


class Verdict(NamedTuple):
    """What a guard says of a request. `why` is empty where it is let in; `key` is set where the ticket is genuine, so
    that even a refusal can be proven.
    """

    why: str
    ticket: Ticket | None = None
    key: bytes | None = None
    is_for_another: bool = False


class Guard:
    """The verifying side of one service: whom it answers for, and which tickets it has seen. Thread-safe."""

    def __init__(self, keys: KeyRing, audiences: Callable[[], Collection[str]], *, clock: Clock | None = None) -> None:
        self.keys = keys
        self._audiences = audiences
        self._clock = clock or SystemClock()
        self._started_s = self._clock.unix_s() - self._clock.now()  # a clock that is set back must not revive tickets
        self._lock = threading.Lock()
        self._seen: set[bytes] = set()
        self._seen_before: set[bytes] = set()
        self._turn_s = self._clock.now()

    def date(self) -> int:
        return int(self._started_s + self._clock.now())

    def admit(self, header: str, method: str, target: str, body: bytes) -> Verdict:
        """Whether the ticket in `header` lets this request in. One that is let in is used up."""
        if not header:
            return Verdict("this fleet has a key, and the request carries no ticket")
        ticket = Ticket.parse(header)
        if ticket is None:
            return Verdict("what the request carries is no ticket")
        covered = (method, target, _digest(body)) if ticket.kind == ASK else ()
        key = next((k for k in self.keys.all() if _is_of(k, ticket, *covered)), None)
        if key is None:
            return Verdict("the ticket is not of this fleet's key, or of another request")
        if ticket.audience not in self._audiences():
            return Verdict(f"the ticket is for {ticket.audience}, which is not here", ticket, key, True)
        return Verdict(self._refuse(ticket, method), ticket, key)

    def _refuse(self, ticket: Ticket, method: str) -> str:
        now = self.date()
        if ticket.kind == VIEW:
            is_valid = method == "GET" and now < ticket.date <= now + MAX_VIEW_S + TOLERANCE_S
            return "" if is_valid else "a ticket to look changes nothing, and ends"
        if abs(ticket.date - now) > TOLERANCE_S:
            return f"the ticket's date is {ticket.date - now:+d} s from this clock: ask with the date of this answer"
        return "" if self._is_new(bytes.fromhex(ticket.mac)[:16]) else "the ticket was used before"

    def _is_new(self, mark: bytes) -> bool:
        with self._lock:
            if self._clock.now() - self._turn_s > 2 * TOLERANCE_S or len(self._seen) >= MAX_REMEMBERED:
                self._seen_before, self._seen, self._turn_s = self._seen, set(), self._clock.now()
            if mark in self._seen or mark in self._seen_before:
                return False
            self._seen.add(mark)
            return True

    def proof(self, verdict: Verdict, status: int, content_digest: str) -> str | None:
        """The header for an answer whose unpacked body has this SHA-256; None where the ticket was not genuine."""
        if verdict.key is None or verdict.ticket is None:
            return None
        date = self.date()
        return f"{date};{_mac(verdict.key, 'answer', verdict.ticket.mac, status, content_digest, date)}"


def _is_of(key: bytes, ticket: Ticket, *covered: str) -> bool:
    return hmac.compare_digest(_mac(key, *ticket[:-1], *covered).encode(), ticket.mac.encode())


def vouch(keys: KeyRing, instance_id: str, listeners: Collection[str]) -> str:
    """What an instance says of its own listeners, so that a planner can only pass on what a key holder has said."""
    return _mac(keys.all()[0], "listener", instance_id, *listeners)


def is_vouched(keys: KeyRing, instance_id: str, listeners: Collection[str], said: str) -> bool:
    return any(
        hmac.compare_digest(_mac(key, "listener", instance_id, *listeners).encode(), said.encode())
        for key in keys.all()
    )
