"""Whatever goes wrong on the way to a seed's weights, it serves the right ones, and says why it read the disk."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
from collections import Counter
from collections.abc import Iterator

import msgspec
import pytest
from support.forking import ENV, fork_from, last_line, rfork_lines, start_fork, start_seed, weights
from support.middleman import Middleman
from support.models import Models
from support.outside import flipped_byte, image_of
from support.plugins import LIVE_TENSORS, PROBE, install_plugin
from support.ports import lend
from support.server import HOST, Fleet, Generation, Server

from rfork.manifest import Manifest

pytestmark = pytest.mark.server

LARGER = {"num_hidden_layers": 8}
"""9 MB: at 1 MB/s there is time to do something in the middle of it."""
SLOWLY = {"RFORK_READ_GBPS_LIMIT": "0.001"}


@pytest.fixture(scope="module")
def probed_fleet(module_fleet: Fleet) -> Fleet:
    install_plugin(module_fleet.folder, "live_tensors", LIVE_TENSORS)
    return module_fleet


@pytest.fixture(scope="module")
def seed(probed_fleet: Fleet, models: Models) -> Server:
    return start_seed(probed_fleet, models.path("llama"), env=probe(probed_fleet, "seed"))


@pytest.fixture(scope="module")
def right(seed: Server) -> Generation:
    return seed.generate()


@pytest.fixture
def middleman(seed: Server) -> Iterator[Middleman]:
    with Middleman(seed) as middleman:
        yield middleman


@pytest.fixture
def fleet(probed_fleet: Fleet) -> Iterator[Fleet]:
    """The module's fleet, with the servers of each test gone after it."""
    with probed_fleet.visited():
        yield probed_fleet


def probe(fleet: Fleet, name: str) -> dict[str, str]:
    return {PROBE: str(fleet.folder / f"{name}.json")}


def alive(fleet: Fleet, name: str) -> Counter[str]:
    """Tensors alive in a rank of that server when it was about to serve, by type and shape."""
    return Counter(json.loads((fleet.folder / f"{name}.json").read_text()))


def assert_fell_back(server: Server, reason: str, right: Generation) -> None:
    report, line = weights(server), last_line(server)
    assert (report["source"], report["fallback_reason"]) == ("checkpoint", reason), report
    assert report["seed"] is None
    assert report["fallback_detail"]
    assert line is not None
    assert line["reason"] == reason
    assert rfork_lines(server)[-1].startswith("rfork: weights from checkpoint (reason "), rfork_lines(server)[-3:]
    assert any("falling back to load format auto" in text for text in rfork_lines(server))
    assert server.generate() == right


@contextlib.contextmanager
def unused_port() -> Iterator[int]:
    """A port at which nobody listens, and nobody will meanwhile."""
    block = lend()
    try:
        yield block.port
    finally:
        block.release()


@contextlib.contextmanager
def black_hole() -> Iterator[int]:
    """A port that takes connections and never says a word."""
    with socket.create_server((HOST, 0), backlog=8) as hole:
        yield hole.getsockname()[1]


def test_nobody_at_the_address(fleet: Fleet, models: Models, right: Generation) -> None:
    with unused_port() as port:
        client = start_fork(fleet, models.path("llama"), port, env=probe(fleet, "client"))
    assert_fell_back(client, "unreachable", right)


def test_an_address_that_never_answers(fleet: Fleet, models: Models, right: Generation) -> None:
    with black_hole() as port:
        env = {**probe(fleet, "client"), "RFORK_SEEK_TIMEOUT_S": "1"}
        client = start_fork(fleet, models.path("llama"), port, env=env)
    assert_fell_back(client, "unreachable", right)


def test_a_transfer_engine_that_does_not_answer(fleet: Fleet, models: Models, seed: Server, right: Generation) -> None:
    """The seed's main process grants leases while the rank that holds the weights is frozen."""
    seed.signal(signal.SIGSTOP, "scheduler")
    try:
        env = {**probe(fleet, "client"), "RFORK_CONNECT_TIMEOUT_S": "1"}
        client = start_fork(fleet, models.path("llama"), seed.port, env=env)
    finally:
        seed.signal(signal.SIGCONT, "scheduler")
    assert_fell_back(client, "unreachable", right)
    assert alive(fleet, "client") == alive(fleet, "seed")


def test_a_seed_of_other_weights(fleet: Fleet, models: Models, seed: Server) -> None:
    """Same architecture, same config, other bytes: names and sizes could not tell them apart."""
    other = models.path("llama", seed=1)
    from_disk = start_seed(fleet, other, env=probe(fleet, "other"))
    client = start_fork(fleet, other, seed.port, env=probe(fleet, "client"))
    assert_fell_back(client, "key_mismatch", from_disk.generate())
    assert "content" in weights(client)["fallback_detail"] or "other weights" in weights(client)["fallback_detail"]


def test_a_seed_of_another_dtype(fleet: Fleet, models: Models, seed: Server) -> None:
    client = start_fork(fleet, models.path("llama"), seed.port, "--dtype", "float32", env=probe(fleet, "client"))
    assert weights(client)["fallback_reason"] == "key_mismatch"
    assert "model.dtype" in weights(client)["fallback_detail"]
    assert len(set(client.generate().tokens)) > 1


def test_a_manifest_that_is_none(
    fleet: Fleet, models: Models, middleman: Middleman, seed: Server, right: Generation
) -> None:
    middleman.edits["/manifest"] = lambda body: body[: len(body) // 2]
    client = start_fork(fleet, models.path("llama"), middleman.port, env=probe(fleet, "client"))
    assert_fell_back(client, "unreachable", right)
    assert alive(fleet, "client") == alive(fleet, "seed")


def test_a_manifest_that_does_not_pair(
    fleet: Fleet, models: Models, middleman: Middleman, seed: Server, right: Generation
) -> None:
    """One tensor of 19 has another type there; not one byte is read, and what was built is gone."""

    def change(manifest: Manifest) -> Manifest:
        first, *others = manifest.tensors
        return msgspec.structs.replace(manifest, tensors=(msgspec.structs.replace(first, dtype="float16"), *others))

    middleman.lie_about_the_manifest(change)
    client = start_fork(fleet, models.path("llama"), middleman.port, env=probe(fleet, "client"))
    assert_fell_back(client, "manifest_mismatch", right)
    assert "bfloat16" in weights(client)["fallback_detail"]
    assert alive(fleet, "client") == alive(fleet, "seed")


def test_a_byte_that_is_wrong_in_the_seeds_memory(
    fleet: Fleet, models: Models, seed: Server, right: Generation
) -> None:
    """All bytes arrive, the fence has not moved, and the digests of the publication name the tensor."""
    with flipped_byte(seed) as name:
        client = start_fork(fleet, models.path("llama"), seed.port, env=probe(fleet, "client"))
        assert_fell_back(client, "digest_mismatch", right)
        assert name in weights(client)["fallback_detail"]
        assert alive(fleet, "client") == alive(fleet, "seed")
    repaired = start_fork(fleet, models.path("llama"), seed.port, env=probe(fleet, "client"))
    assert weights(repaired)["source"] == "seed", weights(repaired)


def wait_for_half(client: Server) -> None:
    """Return while the client reads, with a third or more of the bytes there."""

    def percent() -> int:
        return max((int(n) for n in re.findall(r"rfork target:\s+(\d+)%", client.log())), default=0)

    client.wait_for("to have read a third", lambda: percent() >= 33, 60)
    assert percent() < 100, "it was too fast for this test"


@pytest.mark.parametrize("end", ["killed", "frozen"])
def test_a_seed_that_ends_halfway(end: str, fleet: Fleet, models: Models) -> None:
    path = models.path("llama", **LARGER)
    seed = start_seed(fleet, path, env=probe(fleet, "large"))
    right = seed.generate()
    env = {**probe(fleet, "client"), **ENV, **SLOWLY, "RFORK_READ_TIMEOUT_S": "2"}
    client = start_fork(fleet, path, seed.port, env=env, wait=False)
    wait_for_half(client)
    with contextlib.ExitStack() as stack:
        if end == "killed":
            seed.kill()
        else:
            stack.enter_context(seed.frozen())
        client.wait_for("to end its start", lambda: last_line(client) is not None, 60)
    assert_fell_back(client, "seed_lost", right)
    assert alive(fleet, "client") == alive(fleet, "large")


def test_a_fallback_is_a_seed_like_any_other(fleet: Fleet, models: Models, seed: Server) -> None:
    with unused_port() as port:
        fallen = start_fork(fleet, models.path("llama"), port, env=probe(fleet, "fallen"))
    client = start_fork(fleet, models.path("llama"), fallen.port, env=probe(fleet, "client"))
    assert weights(client)["source"] == "seed", weights(client)
    assert image_of(client).differences(image_of(seed)) == []


def test_fallback_never_ends_the_process_with_the_reason(fleet: Fleet, models: Models) -> None:
    env = {**ENV, **probe(fleet, "client"), "RFORK_FALLBACK": "never"}
    with unused_port() as port:
        client = fleet.start(models.path("llama"), *fork_from(port), env=env, wait=False)
        assert client.wait_until_ended(60) != 0
    assert "no weights from a seed (unreachable) and `fallback` is never" in client.log()
