"""Seed, fork and chain on the oldest SGLang that is supported, as users start it: in its own environment, cold.

`make test-compat` runs this; everything else here is tested on the newest.
"""

from __future__ import annotations

import importlib.metadata

import pytest
from support.forking import LAST_LINE, SEED, fork_from, last_line, rfork_lines, start_fork, start_seed, status, weights
from support.models import Models
from support.outside import image_of
from support.server import STOCK, Fleet, Server

from sglang_rfork.srt.compat import FIRST

SGLANG = importlib.metadata.version("sglang")

pytestmark = [
    pytest.mark.server,
    pytest.mark.spawn,
    pytest.mark.skipif(not SGLANG.startswith(f"0.5.{FIRST}"), reason=f"SGLang {SGLANG} is not the oldest supported"),
    pytest.mark.timeout(600),
]

COLD_S = 300.0


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    return start_seed(module_fleet, models.path("llama"), cold=True, deadline_s=COLD_S)


def test_a_fork_equals_its_seed_and_seeds_the_next(seed: Server, fleet: Fleet, models: Models) -> None:
    path = models.path("llama")
    fork = start_fork(fleet, path, seed.port, cold=True, deadline_s=COLD_S)
    lines = rfork_lines(fork)
    assert weights(fork)["source"] == "seed", weights(fork)
    assert weights(fork)["seed"]["instance_id"] == status(seed)["instance_id"]
    assert image_of(fork).differences(image_of(seed)) == []
    assert fork.generate() == seed.generate()
    assert f"on SGLang {SGLANG}: " in lines[0]
    assert LAST_LINE.match(lines[-1])
    third = start_fork(fleet, path, fork.port, cold=True, deadline_s=COLD_S)
    assert weights(third)["seed"]["instance_id"] == status(fork)["instance_id"]
    assert third.generate() == seed.generate()


@pytest.mark.parametrize(
    ("algorithm", "draft", "num_lent"), [("EAGLE", "llama-eagle", 2), ("EAGLE3", "llama-eagle3", 1)]
)
def test_a_draft_is_forked_beside_its_target(
    algorithm: str, draft: str, num_lent: int, fleet: Fleet, models: Models
) -> None:
    """What the target lends it, of 512 x 256 numbers of two bytes each, crosses the link once."""
    flags = ("--speculative-algorithm", algorithm, "--speculative-draft-model-path", str(models.path(draft)))
    steps = ("--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2")
    seed = start_seed(fleet, models.path("llama"), *flags, *steps)
    fork = start_fork(fleet, models.path("llama"), seed.port, *flags, *steps)
    found = {r["role"]: (r["weights"]["source"], r["weights"]["lent_nbytes"]) for r in status(fork)["ranks"]}
    assert found == {"target": ("seed", 0), "draft-0": ("seed", num_lent * 512 * 256 * 2)}


def test_a_dead_address_ends_in_the_fallback(seed: Server, fleet: Fleet, models: Models) -> None:
    fallen = start_fork(fleet, models.path("llama"), 1, cold=True, deadline_s=COLD_S)
    line = last_line(fallen)
    assert line is not None
    assert line["reason"] == weights(fallen)["fallback_reason"] == "unreachable"
    assert fallen.generate() == seed.generate()


def test_its_end_points_are_those_of_the_newest(seed: Server) -> None:
    answer = seed.get("/get_remote_instance_transfer_engine_info", params={"rank": 0})
    assert answer.status_code == 200
    session_id, table = answer.json()["remote_instance_transfer_engine_info"]
    assert ":" in session_id
    assert table["model.norm.weight"][1:] == [256, 2]
    assert seed.get("/get_remote_instance_transfer_engine_info").status_code == 400
    assert "rfork" not in seed.get("/server_info").text


def test_what_cannot_work_is_refused_in_one_line(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"), *fork_from(1), "--use-ray", cold=True, wait=False)
    assert server.wait_until_ended(COLD_S) != 0
    assert "rfork: refusing to start: R-Fork can't work with --use-ray" in server.log()
    assert "Traceback" not in server.log()


def test_where_nobody_asks_for_it_sglang_is_as_released(fleet: Fleet, models: Models) -> None:
    installed = fleet.start(models.path("llama"), cold=True, deadline_s=COLD_S)
    stock = fleet.start(models.path("llama"), cold=True, env=STOCK, deadline_s=COLD_S)
    for path in ("/rfork/v1/status", "/get_remote_instance_transfer_engine_info?rank=0"):
        assert installed.get(path).status_code == stock.get(path).status_code
    assert installed.generate() == stock.generate()


def test_sigterm_ends_it(seed: Server, fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"), SEED, cold=True, deadline_s=COLD_S)
    server.generate()
    server.terminate(60)
    assert "is draining" in server.log()
