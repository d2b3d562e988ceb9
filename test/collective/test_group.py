"""One group of two over gloo, by itself: what its end leaves."""

import socket
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from rfork.transports.collective import CLIENT, SEED, Group, Meeting


def make_pair() -> list[Group]:
    listening = socket.create_server(("127.0.0.1", 0))
    meeting = Meeting("127.0.0.1", listening.getsockname()[1], "pair", "127.0.0.1")

    def make(member: int) -> Group:
        given = {"listening": listening} if member == SEED else {}
        return Group(meeting, member, torch.device("cpu"), join_timeout_s=10.0, operation_timeout_s=10.0, **given)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(make, (SEED, CLIENT)))


@pytest.mark.parametrize("together", [False, True])
def test_when_it_is_closed_nothing_of_torchs_is_left_to_free(together: bool) -> None:
    """torch frees a group without the interpreter's lock: a thread that did so
    while the process exits would take the lock again, and end in an abort.
    """
    seed, client = make_pair()
    sent, received = [torch.full((1000,), n) for n in (1, 2, 3)], [torch.zeros(1000, dtype=torch.int64) for _ in "123"]
    for tensor in received:
        client.broadcast(tensor)
    for tensor in [] if together else sent:
        seed.broadcast(tensor)
    if together:
        seed.broadcast_together(sent)
    for group in (seed, client):
        while group.num_flying:
            group.finish(10.0, lambda: None)
    assert [int(tensor[0]) for tensor in received] == [1, 2, 3]
    for group in (client, seed):
        ref, left = weakref.ref(group._group), []

        class Ended(threading.Event):
            def set(self, ref: weakref.ref = ref, left: list[bool] = left) -> None:
                left.append(ref() is not None)
                super().set()

        group._ended = Ended()
        group.close(10.0)
        assert left == [False]
        group.close(0.0)
