"""Write what the documents take from the code: the table of settings in the guide, and the drawings of the lifecycles.

`python tools/docs.py` rewrites; `python tools/docs.py --check` says what is stale and exits 1.
"""

import argparse
import re
import sys
from pathlib import Path

from rfork.client import lifecycle as pull
from rfork.config import describe_keys
from rfork.machine import draw
from rfork.seed import leases, lifecycle

ROOT = Path(__file__).resolve().parent.parent
GUIDE = ROOT / "docs" / "advanced_features" / "rfork.md"
LIFECYCLES = ROOT / "docs" / "lifecycles.md"


def settings_table() -> str:
    """Every key of `--rfork-config` as a Markdown table."""
    rows = ["| key | type | default | meaning |", "|---|---|---|---|"]
    rows += [f"| `{name}` | {kind} | {default} | {meaning} |" for name, kind, default, meaning in describe_keys()]
    return "\n".join(rows)


def between(text: str, name: str, body: str) -> str:
    """`text` with what stands between the two markers called `name` replaced."""
    pattern = rf"(<!-- {name}: made by tools/docs.py -->\n).*?(\n<!-- end of {name} -->)"
    made, count = re.subn(pattern, lambda m: m[1] + body + m[2], text, flags=re.DOTALL)
    if count != 1:
        raise SystemExit(f"expected one pair of markers called {name!r}, found {count}")
    return made


def lifecycles_page() -> str:
    """Every transition table as a drawing."""
    parts = ["# Lifecycles", "", "Drawn from the transition tables by `tools/docs.py`."]
    for title, module, table in (
        ("Seed", lifecycle, lifecycle.SEED),
        ("Pull", pull, pull.PULL),
        ("Lease", leases, leases.LEASE),
    ):
        source = module.__name__.replace(".", "/")
        parts += ["", f"## {title}", "", f"`python/{source}.py`", "", "```mermaid", draw(table), "```"]
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing, exit 1 if something is stale")
    check = parser.parse_args().check
    made = {GUIDE: between(GUIDE.read_text(), "settings", settings_table()), LIFECYCLES: lifecycles_page()}
    stale = [path for path, text in made.items() if not path.exists() or path.read_text() != text]
    for path in stale:
        print(
            f"{path.relative_to(ROOT)} is stale: run `python tools/docs.py`"
            if check
            else f"wrote {path.relative_to(ROOT)}"
        )
        if not check:
            path.write_text(made[path])
    sys.exit(bool(check and stale))


if __name__ == "__main__":
    main()
