"""A ticket is good for one request, once; an answer proves the key for one ticket."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rfork import auth
from rfork.auth import PLANNER, TICKET_HEADER, TOLERANCE_S, Guard, Signer, Ticket, Unproven, mint_view, seed_audience
from rfork.clock import ManualClock
from rfork.keys import KeyRing

from . import KEY, OTHER_KEY

REQUEST = (seed_audience("i-seed"), "POST", "/rfork/v1/leases", b'{"client":"i-client"}')


@dataclasses.dataclass
class Answer:
    status: int
    body: bytes
    proof: str


class Service:
    """A verifier on the other end of a wire that tests may bend. `heard` has the tickets that arrived."""

    def __init__(self, keys: KeyRing, clock: ManualClock | None = None) -> None:
        self.clock = clock or ManualClock()
        self.guard = Guard(keys, lambda: (seed_audience("i-seed"),), clock=self.clock)
        self.heard: list[str] = []
        self.bend: Callable[[Answer], Answer] = lambda answer: answer

    def wire(self, method: str, target: str, body: bytes) -> Callable[[Mapping[str, str]], Answer]:
        def send(headers: Mapping[str, str]) -> Answer:
            self.heard.append(headers[TICKET_HEADER])
            verdict = self.guard.admit(headers[TICKET_HEADER], method, target, body)
            status, said = (401, verdict.why.encode()) if verdict.why else (200, b"granted")
            proof = self.guard.proof(verdict, status, hashlib.sha256(said).hexdigest())
            return self.bend(Answer(status, said, proof or ""))

        return send

    def ask(self, signer: Signer, *, sent: tuple[str, str, bytes] | None = None) -> Answer:
        """`sent` is what arrives, where the wire changes it."""
        audience, *request = REQUEST
        return signer.ask(audience, *request, self.wire(*(sent or request)), "there")  # type: ignore[arg-type]


def signer(key: str = KEY, clock: ManualClock | None = None) -> Signer:
    return Signer(KeyRing(key), "i-client", clock=clock or ManualClock())


@pytest.fixture
def service() -> Service:
    return Service(KeyRing(KEY))


def test_a_ticket_lets_its_own_request_in(service: Service) -> None:
    assert service.ask(signer()).body == b"granted"


@pytest.mark.parametrize(
    "sent",
    [
        ("DELETE", "/rfork/v1/leases", REQUEST[3]),
        ("POST", "/rfork/v1/drain", REQUEST[3]),
        ("POST", "/rfork/v1/leases?more", REQUEST[3]),
        ("POST", "/rfork/v1/leases", b'{"client":"i-thief!"}'),
        ("POST", "/rfork/v1/leases", b""),
    ],
)
def test_a_ticket_is_of_no_use_for_another_request(service: Service, sent: tuple[str, str, bytes]) -> None:
    with pytest.raises(Unproven, match="401"):
        service.ask(signer(), sent=sent)


def test_a_ticket_is_taken_once(service: Service) -> None:
    service.ask(signer())
    again = service.guard.admit(service.heard[0], *REQUEST[1:])
    assert again.why == "the ticket was used before"


def test_a_ticket_is_forgotten_only_when_it_is_too_old_to_be_taken(service: Service) -> None:
    service.ask(signer())
    for _ in range(20):
        service.clock.advance(TOLERANCE_S / 2)
        service.ask(signer(clock=service.clock))
        assert service.guard.admit(service.heard[0], *REQUEST[1:]).why
    assert len(service.guard._seen) + len(service.guard._seen_before) < 15


def test_a_ticket_for_another_instance_is_named_as_such_and_the_refusal_is_proven(service: Service) -> None:
    audience, *request = seed_audience("i-former"), *REQUEST[1:]
    answer = signer().ask(audience, *request, service.wire(*request))  # type: ignore[arg-type]
    assert answer.body == b"the ticket is for seed:i-former, which is not here"


@pytest.mark.parametrize("ahead_s", [-86_400.0, -61.0, 3_600.0, 1e8])
def test_a_wrong_clock_costs_one_more_round_trip_and_only_the_first_time(service: Service, ahead_s: float) -> None:
    late = ManualClock(unix_start=1_700_000_000.0 + ahead_s)
    asker = signer(clock=late)
    assert service.ask(asker).status == 200
    assert len(service.heard) == 2
    assert service.ask(asker).status == 200
    assert len(service.heard) == 3


def test_a_verifiers_clock_that_is_set_back_revives_no_ticket() -> None:
    class Jumping(ManualClock):
        back_s = 0.0

        def unix_s(self) -> float:
            return super().unix_s() - self.back_s

    clock = Jumping()
    service = Service(KeyRing(KEY), clock)
    service.ask(signer())
    clock.advance(10 * TOLERANCE_S)
    clock.back_s = 10 * TOLERANCE_S
    assert service.guard.admit(service.heard[0], *REQUEST[1:]).why.startswith("the ticket's date is -600 s")


def test_another_key_is_refused_and_its_answer_proves_nothing(service: Service) -> None:
    with pytest.raises(Unproven, match="is the fleet key the same") as caught:
        service.ask(signer(OTHER_KEY))
    assert caught.value.status == 401


@pytest.mark.parametrize(
    "bend",
    [
        lambda a: dataclasses.replace(a, body=b"granted to all"),
        lambda a: dataclasses.replace(a, status=201),
        lambda a: dataclasses.replace(a, proof=""),
        lambda a: dataclasses.replace(a, proof="1;" + a.proof.partition(";")[2]),
        lambda a: dataclasses.replace(a, proof=a.proof[:-1] + "g"),
        lambda a: dataclasses.replace(a, proof=";;;"),
        lambda a: dataclasses.replace(a, proof="9" * 5000),
        lambda a: dataclasses.replace(a, proof="1;é"),
    ],
)
def test_an_answer_that_was_changed_on_the_way_counts_for_nothing(
    service: Service, bend: Callable[[Answer], Answer]
) -> None:
    service.bend = bend
    with pytest.raises(Unproven):
        service.ask(signer())


def test_a_recorded_answer_fits_no_other_request(service: Service) -> None:
    recorded = service.ask(signer())
    service.bend = lambda answer: recorded
    with pytest.raises(Unproven):
        service.ask(signer())


@pytest.mark.parametrize(
    ("asker", "verifier"),
    [
        (f"{KEY}", f"{OTHER_KEY}\n{KEY}"),  # the verifier has the new key already
        (f"{OTHER_KEY}\n{KEY}", f"{KEY}"),  # the asker has it
        (f"{OTHER_KEY}\n{KEY}", f"{KEY}\n{OTHER_KEY}"),  # they differ in which is current
        (f"{OTHER_KEY}", f"{OTHER_KEY}\n{KEY}"),
    ],
)
def test_keys_rotate_in_either_order(tmp_path: Path, asker: str, verifier: str) -> None:
    for name, text in (("asker", asker), ("verifier", verifier)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o600)
    service = Service(KeyRing(path=str(tmp_path / "verifier")))
    assert service.ask(Signer(KeyRing(path=str(tmp_path / "asker")), clock=ManualClock())).status == 200


def test_a_ticket_to_look_is_good_for_every_get_until_it_ends_and_changes_nothing() -> None:
    clock = ManualClock()
    guard = Guard(KeyRing(KEY), lambda: (PLANNER,), clock=clock)
    ticket = mint_view(KeyRing(KEY), "operator", ttl_s=600, clock=clock)
    assert [guard.admit(ticket, "GET", path, b"").why for path in ("/a", "/a", "/b")] == ["", "", ""]
    assert guard.admit(ticket, "DELETE", "/a", b"").why
    clock.advance(601)
    assert guard.admit(ticket, "GET", "/a", b"").why
    forged = Ticket.parse(ticket)
    assert forged is not None
    assert guard.admit(str(forged._replace(date=forged.date + 9999)), "GET", "/a", b"").why


def test_a_ticket_to_look_is_not_good_for_a_seed(service: Service) -> None:
    assert service.guard.admit(mint_view(KeyRing(KEY), "operator", ttl_s=600, clock=service.clock), *REQUEST[1:]).why


def test_what_is_covered_is_pinned() -> None:
    """Changing it is a new kind of ticket: N must work with N-1."""
    bare = ("ask1", 1_700_000_000, "0123456789abcdef01234567", "i-client", "seed:i-seed")
    covered = ("POST", "/rfork/v1/leases", hashlib.sha256(b"{}").hexdigest())
    assert auth._mac(KEY.encode(), *bare, *covered)[:16] == "dcf5db183d931835"


@pytest.mark.parametrize("hidden", [KEY, KEY.encode().hex()])
def test_neither_ticket_nor_repr_shows_the_key(service: Service, hidden: str) -> None:
    service.ask(signer())
    assert hidden not in "".join([*service.heard, repr(service.guard.keys), repr(signer())])


@settings(max_examples=300)
@given(
    text=st.text(max_size=60)
    | st.lists(st.text(max_size=8), min_size=5, max_size=7).map(lambda parts: ";".join(["ask1", *parts]))
)
def test_no_text_is_a_ticket_but_a_ticket(text: str) -> None:
    verdict = Guard(KeyRing(KEY), lambda: (PLANNER,)).admit(text, "GET", "/", b"")
    assert verdict.why
    assert verdict.key is None
