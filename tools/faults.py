"""Play random faults and keep a tally: `make faults`.

    tools/faults.py in-process --count 10000 --workers 2     thousands of starts in one process, without SGLang
    tools/faults.py process --count 20                       real servers that are killed, frozen and cut off
    tools/faults.py tally                                    what all runs of this checkout add up to

Each case is a number. Every run appends a line to .faults/log.jsonl with its numbers, how the starts ended, and the
commit; a case that ended wrong stands there with its message, and `--first N --count 1` plays it again.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LOG = ROOT / ".faults" / "log.jsonl"
sys.path.insert(0, str(ROOT / "test"))


def in_process(first: int, count: int) -> dict[str, Any]:
    """Cases first … first + count - 1, on one table that is laid anew after each wrong one."""
    from support.dice import Table

    logging.disable(logging.WARNING)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115  progress bars of thousands of forks
    endings: Counter[str] = Counter()
    wrong, faults, number = [], 0, first
    while number < first + count:
        with ExitStack() as stack:
            table = Table(stack)
            try:
                while number < first + count:
                    number += 1
                    table.play(number - 1)
            except AssertionError as error:
                wrong.append(str(error)[:2000])
            endings += table.tally
            faults += table.num_faults
    return {"endings": endings, "faults": faults, "wrong": wrong}


def process(first: int, count: int) -> dict[str, Any]:
    """Cases with real servers; each takes about half a minute."""
    from support.drills import play_all

    with tempfile.TemporaryDirectory(prefix="rfork-faults-") as folder:
        return play_all(Path(folder), first, count, say=print)


def run(kind: str, play: Callable[[int, int], dict[str, Any]], first: int, count: int, workers: int) -> int:
    started_s = time.monotonic()
    share = -(-count // workers)
    parts = [(n, min(share, first + count - n)) for n in range(first, first + count, share)]
    if workers > 1:
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            results = pool.starmap(play, parts)
    else:
        results = [play(*part) for part in parts]
    endings = sum((Counter(r["endings"]) for r in results), Counter())
    wrong = [text for r in results for text in r["wrong"]]
    line = {
        "kind": kind,
        "first": first,
        "count": count,
        "faults": sum(r["faults"] for r in results),
        "endings": dict(endings.most_common()),
        "wrong": wrong,
        "seconds": round(time.monotonic() - started_s),
        "commit": commit(),
    }
    LOG.parent.mkdir(exist_ok=True)
    with LOG.open("a") as log:
        log.write(json.dumps(line) + "\n")
    print(json.dumps(line, indent=2))
    return 1 if wrong else 0


def commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip()


def next_case(kind: str) -> int:
    """After the last case of that kind that was ever played here."""
    lines = [json.loads(text) for text in LOG.read_text().splitlines()] if LOG.exists() else []
    return max((x["first"] + x["count"] for x in lines if x["kind"] == kind), default=0)


def tally() -> int:
    lines = [json.loads(text) for text in LOG.read_text().splitlines()] if LOG.exists() else []
    for kind in sorted({x["kind"] for x in lines}):
        mine = [x for x in lines if x["kind"] == kind]
        cases, faults = sum(x["count"] for x in mine), sum(x["faults"] for x in mine)
        wrong = sum(len(x["wrong"]) for x in mine)
        print(f"{kind}: {cases} starts with {faults} faults in {len(mine)} runs, {wrong} ended wrong")
        endings = sum((Counter(x["endings"]) for x in mine), Counter())
        for ending, number in endings.most_common():
            print(f"  {number:7} {ending}")
    return 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=["in-process", "process", "tally"])
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, help="number of the first case (default: after the last one played here)")
    parser.add_argument("--workers", type=int, default=1)
    options = parser.parse_args()
    if options.what == "tally":
        return tally()
    first = next_case(options.what) if options.first is None else options.first
    play = {"in-process": in_process, "process": process}[options.what]
    return run(options.what, play, first, options.count, options.workers if options.what == "in-process" else 1)


if __name__ == "__main__":
    sys.exit(main())
