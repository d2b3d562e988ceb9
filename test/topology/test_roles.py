"""Prefill and decode on different servers: roles decide nothing about weights, and caches travel by Mooncake too."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from support.holding import Probed, differences, start_fork, start_seed
from support.models import Models
from support.ports import lend
from support.server import HOST, Fleet

pytestmark = pytest.mark.server

_rooms = itertools.count(1)


def role(mode: str, bootstrap_port: int) -> tuple[str, ...]:
    """The cache goes over Mooncake's TCP: a transfer engine of SGLang's own in each rank, beside those of R-Fork."""
    return (
        *("--disaggregation-mode", mode, "--disaggregation-transfer-backend", "mooncake_tcp"),
        *("--disaggregation-bootstrap-port", str(bootstrap_port)),
    )


def tokens(prefill: Probed, decode: Probed, bootstrap_port: int) -> list[int]:
    """What a router does with one request: both servers get it, and meet at the prefill server's bootstrap port."""
    ask = {
        "text": "hello world",
        "sampling_params": {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True},
        "bootstrap_host": HOST,
        "bootstrap_port": bootstrap_port,
        "bootstrap_room": next(_rooms),
    }
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda probed: probed.server.post("/generate", ask), (prefill, decode)))
    assert [answer.status_code for answer in answers] == [200, 200], [answer.text for answer in answers]
    return list(answers[1].json()["output_ids"])


@contextmanager
def asking(prefill: Probed, decode: Probed, bootstrap_port: int) -> Iterator[list[list[int]]]:
    """Requests one after the other, as long as the block runs; what they gave is there after it."""
    found: list[list[int]] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.2):
            found.append(tokens(prefill, decode, bootstrap_port))

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        try:
            yield found
        finally:
            stop.set()
            asked.result()


def test_roles_fork_from_each_other_while_the_cache_travels_beside(models: Models, fleet: Fleet) -> None:
    """Decode from prefill, prefill from prefill, decode from decode; caches travel before, meanwhile and afterwards,
    from memory that Mooncake has registered for SGLang in the very processes that serve and read weights.
    """
    model, ports = models.path("qwen3"), [lend(), lend()]
    first, second = (block.port for block in ports)
    try:
        prefill = start_seed(fleet, model, *role("prefill", first), name="prefill")
        decode = start_fork(fleet, model, prefill.server, *role("decode", first), name="decode")
        expected = tokens(prefill, decode, first)
        with asking(prefill, decode, first) as found:
            other_prefill = start_fork(fleet, model, prefill.server, *role("prefill", second), name="other-prefill")
            other_decode = start_fork(fleet, model, decode.server, *role("decode", second), name="other-decode")
        assert found
        assert all(one == expected for one in found), found
        for fork in (decode, other_prefill, other_decode):
            assert set(fork.sources.values()) == {"seed"}, fork.sources
            assert differences(fork, prefill) == []
        prefill.server.kill()
        decode.server.kill()
        assert tokens(other_prefill, other_decode, second) == expected
    finally:
        for block in ports:
            block.release()
