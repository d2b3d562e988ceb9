"""Draw what `loader.py` and `servers.py` measured: where the time of a fork goes, beside its references.

    python -m bench.gpu.plot --loader loader.json --servers servers.json --out forks.svg     # needs matplotlib

Left, for each set the phases of a verified fork (medians, in ms, one after another as they happen), above what a plain
copy between the GPUs and Mooncake's own first read of the same bytes take. Right, "Load weight end" of whole servers,
with the part of it that R-Fork reports phase by phase.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

PHASES = ("seek", "lease", "build", "pair", "connect", "register", "read", "verify", "close", "finish")
"""In the order in which they happen. What runs beside the build is not in the sums."""

REFERENCES = {"copy between the GPUs": ("copy", "later"), "Mooncake alone, first read": ("raw-region", "first")}


def median_ms(runs: list[dict[str, Any]], phase: str) -> float:
    return 1e3 * statistics.median(run["phases_s"].get(phase, 0.0) for run in runs)


def draw_set(axes: Any, result: dict[str, Any], colours: dict[str, Any]) -> None:
    """The phases of a verified fork in a row, and below it what its bytes alone would take."""
    left = 0.0
    for phase in PHASES:
        ms = median_ms(result["runs"]["full"], phase)
        axes.barh(0, ms, left=left, color=colours[phase], label=phase)
        left += ms
    axes.text(left, 0, f" {median_ms(result['runs']['full'], 'all'):,.0f} ms", va="center")
    names = ["fork, verified"]
    for name, (kind, phase) in REFERENCES.items():
        if runs := result["runs"].get(kind):
            ms = median_ms(runs, phase)
            axes.barh(len(names), ms, color="lightgrey")
            axes.text(ms, len(names), f" {ms:,.1f} ms", va="center")
            names.append(name)
    axes.set_xlim(0, 1.25 * axes.dataLim.xmax)
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_title(f"{result['set']}, {result['seed']['nbytes'] / 1e9:.1f} GB", fontsize="medium")


def draw_loader(figure: Any, results: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    """One plot for each set that has a verified fork, each on a scale of its own."""
    shown = [result for result in results if result["runs"].get("full")]
    all_axes = figure.subplots(len(shown), 1, squeeze=False)[:, 0]
    for axes, result in zip(all_axes, shown, strict=True):
        draw_set(axes, result, colours)
    all_axes[-1].set_xlabel("ms")
    figure.legend(*all_axes[0].get_legend_handles_labels(), fontsize="small", loc="outside upper center", ncols=5)


def draw_servers(figure: Any, servers: list[dict[str, Any]], colours: dict[str, Any]) -> None:
    """One bar for each client; seeds are left out."""
    shown = [server for server in servers if not server["name"].startswith("seed-")]
    axes = figure.subplots()
    for at, server in enumerate(shown):
        left = 0.0
        for phase in PHASES:
            ms = 1e3 * ((server["weights"] or {}).get("phases_s") or {}).get(phase, 0.0)
            axes.barh(at, ms, left=left, color=colours[phase])
            left += ms
        total = 1e3 * server["load_weight_s"]
        axes.barh(at, max(0.0, total - left), left=left, color="lightgrey")
        axes.text(max(total, left), at, f" {total:,.0f} ms", va="center")
    axes.set_yticks(range(len(shown)), [server["name"].removesuffix("-0") for server in shown])
    axes.invert_yaxis()
    axes.set_xlabel("ms of SGLang's “Load weight end” (grey: not by phase)")
    axes.set_title("whole servers", fontsize="medium")
    axes.set_xlim(0, 1.25 * axes.dataLim.xmax)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loader", type=Path, help="JSON of bench.gpu.loader")
    parser.add_argument("--servers", type=Path, help="JSON of bench.gpu.servers")
    parser.add_argument("--out", type=Path, required=True, help="picture to write; its ending chooses the format")
    options = parser.parse_args(argv)
    parts = [(draw_loader, options.loader), (draw_servers, options.servers)]
    given = [(draw, json.loads(path.read_text())) for draw, path in parts if path is not None]
    if not given:
        parser.error("nothing to draw: give --loader, --servers or both")

    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = dict(zip(PHASES, pyplot.get_cmap("tab10").colors, strict=True))
    figure = pyplot.figure(figsize=(8 * len(given), 6), layout="constrained")
    for part, (draw, results) in zip(figure.subfigures(1, len(given), squeeze=False)[0], given, strict=True):
        draw(part, results, colours)
    figure.savefig(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
