"""What a fork does besides moving bytes, at 1,000, 10,000 and 100,000 tensors: does it scale with their number?

    python bench/control.py

Each step runs on layouts of equal shape and growing size, as the product runs it on either side of a fork: manifest
coding, pairing, the lease's binding, coalescing into reads, digest tables, and the cut of arriving bytes into portions.
Seconds are CPU time of this process, the best of `--repeat`; garbage collection is paused, as it is in a fork.
`exponent` is the slope of log(seconds) over log(tensors) between the last two sizes: 1 is linear. Exits 1 if a step of
more than `--floor-ms` at the last size grows faster than `--at-most`.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec

from rfork.binding import Binding, Region, bind
from rfork.client.arrivals import Arrivals
from rfork.client.pause import collector_paused
from rfork.client.verify import check_table, differing_chunks
from rfork.identity import RankIdentity
from rfork.manifest import Manifest, StateEntry, TensorEntry, decode_manifest, encode_manifest, pair
from rfork.wire.seed import DigestTable

SIZES = (65_536, 2_048)
SEGMENT_NBYTES = 2 << 20
CHUNK_NBYTES = 64 << 20


def manifest_of(count: int) -> Manifest:
    """`count` tensors of two sizes, with a plain value for every tenth."""
    nbytes = tuple(SIZES[i % 2] for i in range(count))
    tensors = tuple(
        TensorEntry(f"model.layers.{i // 12}.block.{i % 12}.weight", "bfloat16", (n // 2,), (1,), i, 0, "parameter")
        for i, n in enumerate(nbytes)
    )
    states = tuple(StateEntry(f"model.layers.{i}.scale_float", 0.5, True) for i in range(count // 10))
    return Manifest(RankIdentity(), tensors, nbytes, states)


def binding_of(manifest: Manifest, first: int) -> Binding:
    """Tensors one after another in segments of 2 MiB, as an allocator lays out small ones."""
    addresses: list[int] = []
    regions: list[Region] = []
    base, at = first, first
    for nbytes in manifest.group_nbytes:
        if at + nbytes > base + SEGMENT_NBYTES:
            regions.append(Region(base, at - base))
            base = at = base + 2 * SEGMENT_NBYTES
        addresses.append(at)
        at += nbytes
    fence = base + 2 * SEGMENT_NBYTES
    return Binding(
        manifest_digest=manifest.digest,
        generation=2,
        regions=(*regions, Region(base, at - base), Region(fence, 4096)),
        addresses=tuple(addresses),
        group_nbytes=manifest.group_nbytes,
        fence_address=fence,
        fence_nbytes=4096,
    )


class Nobody:
    """Digests that cost nothing."""

    def __init__(self, table: DigestTable) -> None:
        self._table = table

    def feed(self, groups: Any) -> None: ...

    def table(self) -> DigestTable:
        return self._table


def steps(count: int) -> dict[str, Callable[[], object]]:
    """Name → one run of the step."""
    manifest = manifest_of(count)
    ours, theirs = binding_of(manifest, 1 << 40), binding_of(manifest, 1 << 41)
    document, lease = encode_manifest(manifest), msgspec.json.encode(theirs)
    table = DigestTable("xxh3-64", CHUNK_NBYTES, tuple((i,) for i in range(count)))
    packed = msgspec.msgpack.encode(table)
    plan = pair(decode_manifest(document), manifest)
    groups = list(range(count))
    slices = bind(plan, ours, theirs, max_slice_nbytes=256 << 20)

    def arrive() -> None:
        arrivals = Arrivals(Nobody(table), theirs, groups)
        for landed in range(1, len(slices) + 1):
            arrivals.landed(slices, landed)

    return {
        "manifest: encode": lambda: encode_manifest(manifest),
        "manifest: decode": lambda: decode_manifest(document),
        "manifest: digest": lambda: msgspec.structs.replace(manifest).digest,
        "pair": lambda: pair(decode_manifest(document), manifest),
        "binding: check": lambda: msgspec.structs.replace(theirs),
        "binding: decode": lambda: msgspec.json.decode(lease, type=Binding),
        "coalesce into reads": lambda: bind(plan, ours, theirs, max_slice_nbytes=256 << 20),
        "digests: decode": lambda: msgspec.msgpack.decode(packed, type=DigestTable),
        "digests: check": lambda: check_table(table, manifest, "the seed"),
        "digests: compare": lambda: differing_chunks(table, table, manifest, groups),
        "arrivals": arrive,
    }


def best_s(step: Callable[[], object], repeat: int) -> float:
    """CPU seconds of the fastest of `repeat` runs."""
    times = []
    for _ in range(repeat):
        started_s = time.process_time()
        step()
        times.append(time.process_time() - started_s)
    return min(times)


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", type=int, nargs="+", default=[1_000, 10_000, 100_000])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--at-most", type=float, default=1.25, help="exponent above which the exit status is 1")
    parser.add_argument("--floor-ms", type=float, default=5.0, help="steps faster than this may grow as they like")
    parser.add_argument("--json", help="file for the figures")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    options = parse(argv)
    rows: dict[str, list[float]] = {}
    with collector_paused():
        for count in options.counts:
            for name, step in steps(count).items():
                rows.setdefault(name, []).append(best_s(step, options.repeat))
    head = "".join(f"{count:>12,}" for count in options.counts)
    lines = [f"{'ms, by number of tensors':26}{head}  exponent"]
    steep = []
    for name, seconds in rows.items():
        span = math.log(options.counts[-1] / options.counts[-2])
        exponent = math.log(max(seconds[-1], 1e-9) / max(seconds[-2], 1e-9)) / span
        lines.append(f"{name:26}" + "".join(f"{1e3 * s:12.2f}" for s in seconds) + f"{exponent:10.2f}")
        if exponent > options.at_most and 1e3 * seconds[-1] > options.floor_ms:
            steep.append(name)
    lines.append(f"not linear: {', '.join(steep)}" if steep else "all of it linear")
    sys.stdout.write("\n".join(lines) + "\n")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"counts": options.counts, "seconds": rows}, file, indent=1)
    return 1 if steep else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
