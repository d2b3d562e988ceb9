"""Servers with a probe in each rank, and the comparison of what two instances hold. What it looks at is in probe.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support import forking, probe
from support.server import Fleet, Server

DISTRIBUTION = {
    "METADATA": "Metadata-Version: 2.1\nName: sglang-probe\nVersion: 1.0\n",
    "entry_points.txt": "[sglang.srt.plugins]\nprobe = sglang_probe:register\n",
    "RECORD": "",
}


@dataclass(frozen=True)
class Probed:
    """A server, and the folder into which its ranks write what they hold."""

    server: Server
    folder: Path

    @property
    def status(self) -> dict[str, Any]:
        return forking.status(self.server)

    @property
    def reports(self) -> list[dict[str, Any]]:
        """One for each shard of each rank of this node."""
        return list(self.status["ranks"])

    @property
    def sources(self) -> dict[str, str]:
        """Shard → `seed`, or why not. Replicas of a shard count as one, and as the worse of them."""
        found: dict[str, str] = {}
        for report in self.reports:
            weights = report["weights"]
            why = f"{weights['source']}: {weights['fallback_reason']} {weights['fallback_detail']}"
            if weights["source"] != "seed" or report["shard"] not in found:
                found[report["shard"]] = "seed" if weights["source"] == "seed" else why
        return found

    @property
    def holdings(self) -> dict[str, dict[str, Any]]:
        """`role.coordinates` → what that rank's model holds."""
        return {path.stem: json.loads(path.read_text()) for path in sorted(self.folder.glob("*.json"))}


def start_probed(fleet: Fleet, model: Any, *flags: str, env: Mapping[str, str] | None = None, **how: Any) -> Probed:
    """Start a server of `flags` whose ranks tell what they hold."""
    folder = fleet.folder / f"held-{len(fleet.servers)}"
    folder.mkdir()
    install_probe(fleet.folder)
    environ = {**forking.ENV, probe.FOLDER_ENV: str(folder), **(env or {})}
    return Probed(fleet.start(model, *flags, env=environ, **how), folder)


def start_seed(fleet: Fleet, model: Any, *flags: str, **how: Any) -> Probed:
    """The same from disk, once it serves its weights."""
    seed = start_probed(fleet, model, forking.SEED, *flags, **how)
    forking.serving(seed.server)
    return seed


def start_fork(
    fleet: Fleet, model: Any, seed: Server, *flags: str, backend: str = "transfer_engine", **how: Any
) -> Probed:
    """The same asking `seed`, once its start has ended, however it ended."""
    fork = start_probed(fleet, model, *forking.fork_from(seed.port, backend=backend), *flags, **how)
    forking.settled(fork.server)
    return fork


def install_probe(folder: Path) -> None:
    """Make the probe a plugin of every server that runs in `folder`, which comes first on their sys.path."""
    metadata = folder / "sglang_probe-1.0.dist-info"
    if metadata.exists():
        return
    shutil.copyfile(probe.__file__, folder / "sglang_probe.py")
    metadata.mkdir()
    for name, text in DISTRIBUTION.items():
        (metadata / name).write_text(text)


def differences(mine: Probed, theirs: Probed) -> list[str]:
    """Every tensor and value that two instances of one layout do not hold alike, by rank and name."""
    here, there = mine.holdings, theirs.holdings
    assert there, f"{theirs.server!r} has told nothing: is its probe installed?"
    found = [f"{rank}: only one of the two has it" for rank in sorted(here.keys() ^ there.keys())]
    for rank in sorted(here.keys() & there.keys()):
        for kind in ("tensors", "values"):
            a, b = here[rank][kind], there[rank][kind]
            found += [f"{rank} {n}: {a.get(n)} {b.get(n)}" for n in sorted(a.keys() | b.keys()) if a.get(n) != b.get(n)]
    return found
