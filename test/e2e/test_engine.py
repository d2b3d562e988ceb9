"""An offline `Engine` has no port: it seeds all the same, and offers as an attribute what the end-point answers."""

from __future__ import annotations

import json
from pathlib import Path

import httpx
import pytest
from support.forking import ENV, LAST_LINE
from support.models import Models
from support.server import Fleet

pytestmark = pytest.mark.server

PROGRAM = """
import json, sys, pathlib, time
import sglang

if __name__ == "__main__":
    model, out, *more = sys.argv[1:]
    engine = sglang.Engine(
        model_path=model,
        max_total_tokens=2048,
        max_running_requests=8,
        random_seed=1,
        log_level="info",
        **json.loads(more[0]),
    )
    greedily = {"temperature": 0, "max_new_tokens": 12, "ignore_eos": True}
    facts = {
        "tokens": engine.generate(input_ids=[5, 17, 300, 42], sampling_params=greedily)["output_ids"],
        "info": getattr(engine, "remote_instance_transfer_engine_info", "absent"),
    }
    pathlib.Path(out + ".new").write_text(json.dumps(facts))
    pathlib.Path(out + ".new").rename(out)
    while not pathlib.Path(out + ".end").exists():
        time.sleep(0.05)
    engine.shutdown()
"""
SEED = {"remote_instance_weight_loader_start_seed_via_transfer_engine": True}


class Facts:
    """One run of the program; `end()` lets it shut its engine down."""

    def __init__(self, fleet: Fleet, model: Path, name: str, settings: dict[str, object], env: dict[str, str]) -> None:
        script, self._out = fleet.folder / f"{name}.py", fleet.folder / f"{name}.json"
        script.write_text(PROGRAM)
        self.server = fleet.start_script(script, str(model), str(self._out), json.dumps(settings), env={**ENV, **env})
        self.server.wait_for("to generate", self._out.exists, 120)
        found = json.loads(self._out.read_text())
        self.tokens, self.info = found["tokens"], found["info"]

    def end(self) -> int:
        Path(f"{self._out}.end").touch()
        return self.server.wait_until_ended(60)


def test_an_engine_offers_every_rank_as_an_attribute(fleet: Fleet, models: Models) -> None:
    """{rank: [session id, {name: [address, elements, element size]}]}, the end-point's value for each rank."""
    seed = Facts(fleet, models.path("llama"), "seed", {**SEED, "tp_size": 2}, {})
    assert list(seed.info) == ["0", "1"]
    sessions, tables = zip(*seed.info.values(), strict=True)
    assert len(set(sessions)) == 2
    assert tables[0].keys() == tables[1].keys()
    assert tables[0]["model.norm.weight"][1:] == [256, 2]
    assert (
        LAST_LINE.search(seed.server.log().strip().splitlines()[-1])
        or "rfork: weights from checkpoint" in seed.server.log()
    )
    assert seed.end() == 0


def test_an_engine_forks_from_an_engine(fleet: Fleet, models: Models) -> None:
    """An engine has environment variables instead of flags, and its seed a listener instead of a port."""
    seed = Facts(fleet, models.path("llama"), "seed", SEED, {})
    listener = next(w for w in seed.server.log().split() if w.startswith("http://") and w.rsplit(":", 1)[-1].isdigit())
    assert httpx.get(f"{listener}/rfork/v1/status", trust_env=False).json()["state"] == "serving"
    env = {"RFORK_SEEDS": listener.removeprefix("http://"), "RFORK_BACKEND": "transfer_engine"}
    fork = Facts(fleet, models.path("llama"), "fork", {"load_format": "remote_instance"}, env)
    assert "rfork: weights from seed i-" in fork.server.log()
    assert fork.tokens == seed.tokens
    assert fork.info["0"][1].keys() == seed.info["0"][1].keys()
    assert fork.info["0"][0] != seed.info["0"][0]
    assert (fork.end(), seed.end()) == (0, 0)


def test_an_engine_of_which_nobody_asked_it_has_no_such_attribute(fleet: Fleet, models: Models) -> None:
    plain = Facts(fleet, models.path("llama"), "plain", {}, {})
    assert plain.info == "absent"
    assert plain.end() == 0
