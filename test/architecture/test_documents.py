"""Documents that can be checked by a machine are."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import tree
from tree import ROOT, relative

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)(?:\s+\"[^\"]*\")?\)|!\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)
INLINE_CODE = re.compile(r"`[^`\n]*`")
ELSEWHERE = ("http://", "https://", "mailto:")


def documents() -> list[Path]:
    return [path for path in tree.files() if path.suffix == ".md"]


def anchors(document: Path) -> set[str]:
    """Return the anchors that GitHub gives to a document's headings."""
    found: dict[str, int] = {}
    result = set(re.findall(r"<a (?:id|name)=\"([^\"]+)\"", document.read_text()))
    for heading in re.findall(r"^#{1,6}\s+(.+?)\s*#*$", FENCE.sub("", document.read_text()), re.MULTILINE):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[^\w\- ]", "", plain.strip().lower()).replace(" ", "-")
        result.add(f"{slug}-{found[slug]}" if slug in found else slug)
        found[slug] = found.get(slug, 0) + 1
    return result


@pytest.mark.parametrize("document", documents(), ids=relative)
def test_links_lead_somewhere(document: Path) -> None:
    broken = []
    for pair in LINK.findall(INLINE_CODE.sub("", FENCE.sub("", document.read_text()))):
        target = pair[0] or pair[1]
        if target.startswith(ELSEWHERE):
            continue
        path, _, anchor = target.partition("#")
        file = (ROOT / path.lstrip("/") if path.startswith("/") else document.parent / path) if path else document
        if not file.exists() or (anchor and file.suffix == ".md" and anchor not in anchors(file)):
            broken.append(target)
    assert broken == []


def test_make_targets_that_documents_name_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in documents():
        named = set(re.findall(r"`make ([a-z-]+)`|^\$ make ([a-z-]+)", document.read_text(), re.MULTILINE))
        assert {name for pair in named for name in pair if name} <= targets, relative(document)


def test_each_make_target_is_explained_or_internal() -> None:
    makefile = (ROOT / "Makefile").read_text()
    phony = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())
    assert phony == set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))


def test_the_changelog_has_a_place_for_what_is_new() -> None:
    assert "## [Unreleased]" in (ROOT / "CHANGELOG.md").read_text()


def test_what_documents_take_from_the_code_is_fresh() -> None:
    run = subprocess.run(
        [sys.executable, "tools/docs.py", "--check"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stdout + run.stderr
