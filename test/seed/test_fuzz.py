"""Hostile bodies: every one gets a refusal in JSON, and the node serves on (P67)."""

import json
from urllib.parse import quote

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.seed_node import lease_body

from rfork.seed.app import MAX_LEASE_NBYTES, accepts_gzip
from rfork.wire.seed import Refusal

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)
FIELDS = [*lease_body(), "seed", "generation", "requires", "weights"]
BROKEN = st.dictionaries(st.sampled_from(FIELDS), JSON, min_size=1)
relaxed = settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


def check(response):
    if response.status_code == 201:
        return
    assert 400 <= response.status_code < 500, response.text
    assert msgspec.json.decode(response.content, type=Refusal).message
    assert b"Traceback" not in response.content


@relaxed
@given(body=st.binary(max_size=200))
def test_arbitrary_bytes(serving, body):
    check(serving.http.post("/rfork/v1/leases", content=body))


@relaxed
@given(changes=BROKEN)
def test_arbitrary_values_in_the_fields_of_a_lease_request(serving, changes):
    check(serving.http.post("/rfork/v1/leases", content=json.dumps({**lease_body(), **changes})))


@relaxed
@given(lease=st.text(min_size=1, max_size=30).filter(lambda t: "/" not in t and t not in (".", "..")))
def test_arbitrary_lease_ids(serving, lease):
    check(serving.http.post(f"/rfork/v1/leases/{quote(lease, safe='')}/renew"))


@pytest.mark.parametrize("depth", [100, 10_000, 60_000])
def test_deep_nesting(serving, depth):
    check(serving.http.post("/rfork/v1/leases", content=b'{"identity":' + b"[" * depth))


def test_body_that_is_too_large_is_refused_whether_it_says_so_or_not(serving):
    large = b"x" * (MAX_LEASE_NBYTES + 1)
    assert serving.http.post("/rfork/v1/leases", content=large).status_code == 413
    chunked = serving.http.post("/rfork/v1/leases", content=iter([large[: 1 << 17]] * 4))
    assert (chunked.status_code, chunked.json()["reason"]) == (413, "too_large")
    assert serving.lease().status_code == 201


def test_names_are_shown_cut_short(serving):
    response = serving.lease(client="c" * 100_000)
    assert (response.status_code, len(response.content) < 1000) == (400, True)


def test_numbers_beyond_64_bits(serving):
    for number in ("1" + "0" * 400, "1e999", "-1e999", "NaN"):
        for field in ("generation", "identity"):
            value = "%s" if field == "generation" else '{"a": %s}'
            body = json.dumps({**lease_body(), field: "@"}).replace('"@"', value % number)
            check(serving.http.post("/rfork/v1/leases", content=body))


@pytest.mark.parametrize(
    ("header", "accepted"),
    [
        (None, False),
        ("", False),
        ("gzip", True),
        ("br, GZIP;q=0.5", True),
        ("gzip;q=0", False),
        ("gzip; q=0.0", False),
        ("*", True),
        ("identity", False),
    ],
)
def test_accept_encoding(header, accepted):
    assert accepts_gzip(header) is accepted
