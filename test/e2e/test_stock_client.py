"""SGLang as released, R-Fork's plugin switched off, forks from our seed through the end-points that it knows."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from support.forking import fork_from, start_seed
from support.models import Models
from support.server import STOCK, Fleet, Server

pytestmark = pytest.mark.server

STOCK_TCP = {**STOCK, "MOONCAKE_PROTOCOL": "tcp", "MC_FORCE_TCP": "true"}


@pytest.fixture(scope="module")
def seed(module_fleet: Fleet, models: Models) -> Server:
    return start_seed(module_fleet, models.path("llama"))


def test_a_stock_client_forks_from_our_seed(seed: Server, fleet: Fleet, models: Models, tmp_path: Path) -> None:
    client = fleet.start(without_weights(models.path("llama"), tmp_path), *fork_from(seed.port), env=STOCK_TCP)
    assert client.get("/rfork/v1/status").status_code == 404
    assert client.generate() == seed.generate()
    assert checksums(client) == checksums(seed)


def without_weights(model: Path, folder: Path) -> Path:
    """A copy that has no weights: what a server serves from it did not come from disk."""
    return Path(shutil.copytree(model, folder / "no-weights", ignore=shutil.ignore_patterns("*.safetensors")))


def checksums(server: Server) -> dict[str, str]:
    answer = server.post("/weights_checker", {"action": "checksum"}).json()
    return {name: digest for rank in answer["ranks"] for name, digest in rank["checksums"].items()}
