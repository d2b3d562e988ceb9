"""A program: what servers with the given arguments would ask seeds for, many in one process. Used by test/identity.

python describe.py IN OUT        IN: [{"argv": [...], "env": {...}}, ...]    OUT: [Wanted, ...], in the same order
"""

import json
import os
import sys
from pathlib import Path

import msgspec

from sglang_rfork.srt.check import wanted_by


def main() -> None:
    cases = json.loads(Path(sys.argv[1]).read_text())
    found = []
    for case in cases:
        before = dict(os.environ)
        os.environ.update(case["env"])
        found.append(wanted_by(case["argv"]))
        os.environ.clear()
        os.environ.update(before)
    part = Path(sys.argv[2] + ".part")
    part.write_bytes(msgspec.json.encode(found))
    part.rename(sys.argv[2])


if __name__ == "__main__":
    main()
