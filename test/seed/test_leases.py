"""The book of leases: capacity counts readers, time gives places back, changes revoke, memory is bounded."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from rfork.clock import ManualClock
from rfork.machine import draw
from rfork.seed import leases
from rfork.seed.leases import Busy, Ended, Grant, Granted, LeaseBook, LeaseState, Release, Renew, Revoke, ShardRef, Tick

ONE = ShardRef("target.tp0of2", 0)
TWO = ShardRef("target.tp1of2", 0)


@pytest.fixture
def book():
    book = LeaseBook(capacity=2, ttl_s=30)
    yield book
    book.check()


def grant(book, client, shard=ONE, now=0.0, generation=2):
    return book.apply(Grant(client, shard, generation), now)[-1]


def test_all_ranks_of_one_client_are_one_reader(book):
    for shard in (ONE, TWO, ONE):
        assert isinstance(grant(book, "a", shard), Granted)
    assert (book.num_readers, len(book.live)) == (1, 3)


def test_a_client_beyond_capacity_is_told_when_to_come_again(book):
    grant(book, "a", now=0)
    grant(book, "b", now=10)
    assert grant(book, "c", now=12) == Busy(readers=2, retry_after_s=18.0)
    assert isinstance(grant(book, "a", TWO, now=12), Granted)


def test_expired_lease_frees_the_slot(book):
    first = grant(book, "a", now=0).lease
    grant(book, "b", now=10)
    effects = book.apply(Grant("c", ONE, 2), 30)
    assert effects[0] == Ended(first, LeaseState.EXPIRED, "not renewed within 30 s")
    assert isinstance(effects[1], Granted)


def test_renewal_keeps_a_long_read_alive(book):
    lease = grant(book, "a", now=0).lease
    for now in range(20, 400, 20):
        assert book.apply(Renew(lease.id), now)[-1].lease.expires_at == now + 30
    late = book.apply(Renew(lease.id), 411)[-1]
    assert late == leases.Unknown(lease.id, LeaseState.EXPIRED, "not renewed within 30 s")


def test_released_lease_frees_the_slot_and_is_released_once(book):
    lease = grant(book, "a").lease
    assert book.apply(Release(lease.id), 1) == [Ended(lease, LeaseState.RELEASED, "released by its client")]
    assert book.num_readers == 0
    assert book.apply(Release(lease.id), 2)[-1].state is LeaseState.RELEASED


def test_change_revokes_the_shards_that_it_touches(book):
    one, two = grant(book, "a", ONE).lease, grant(book, "a", TWO).lease
    assert book.apply(Revoke(frozenset({ONE}), "update"), 1) == [Ended(one, LeaseState.REVOKED, "update")]
    assert book.live == (two,)
    assert book.apply(Revoke(None, "stop"), 1) == [Ended(two, LeaseState.REVOKED, "stop")]


def test_one_client_can_not_fill_the_memory(book):
    first = grant(book, "a").lease
    for _ in range(1000):
        grant(book, "a")
    assert len(book.live) == leases.MAX_LEASES_EACH
    assert first not in book.live


def test_ended_leases_are_forgotten_after_a_while(book):
    for i in range(2 * leases.MAX_REMEMBERED):
        book.apply(Release(grant(book, f"c{i}").lease.id), 0)
    assert len(book._ended) == leases.MAX_REMEMBERED


def test_lease_ids_can_not_be_guessed(book):
    assert len(grant(book, "a").lease.id) >= 32
    assert grant(book, "a").lease.id != grant(book, "a").lease.id


def test_drawing_comes_from_the_table():
    assert "GRANTED --> EXPIRED: expire" in draw(leases.LEASE)


class Leases(RuleBasedStateMachine):
    """Any order of events over any times leaves the book consistent, and nobody reads past his time."""

    def __init__(self):
        super().__init__()
        self.clock = ManualClock()
        self.book = LeaseBook(capacity=3, ttl_s=10)
        self.ids = ["l-none"]

    def apply(self, event):
        effects = self.book.apply(event, self.clock.now())
        self.ids += [e.lease.id for e in effects if isinstance(e, Granted)]
        return effects

    @rule(client=st.sampled_from("abcdef"), shard=st.sampled_from([ONE, TWO]))
    def grant(self, client, shard):
        was_reading = any(x.client == client for x in self.book.live if x.expires_at > self.clock.now())
        last = self.apply(Grant(client, shard, 2))[-1]
        assert isinstance(last, Granted) or not was_reading
        assert isinstance(last, Granted) or 0 < last.retry_after_s <= 10

    @rule(data=st.data())
    def renew(self, data):
        self.apply(Renew(data.draw(st.sampled_from(self.ids))))

    @rule(data=st.data())
    def release(self, data):
        lease_id = data.draw(st.sampled_from(self.ids))
        self.apply(Release(lease_id))
        assert all(x.id != lease_id for x in self.book.live)

    @rule(shards=st.sampled_from([None, frozenset({ONE}), frozenset()]))
    def revoke(self, shards):
        self.apply(Revoke(shards, "update"))
        assert not [x for x in self.book.live if shards is None or x.shard in shards]

    @rule(duration_s=st.floats(0, 12))
    def wait(self, duration_s):
        self.clock.advance(duration_s)
        self.apply(Tick())
        assert all(x.expires_at > self.clock.now() for x in self.book.live)

    @invariant()
    def is_consistent(self):
        self.book.check()


Leases.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
TestLeases = Leases.TestCase
