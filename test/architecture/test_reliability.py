"""The page of faults names tests that exist, and rests on no fault that nobody shows."""

import re

import tree

PAGE = tree.ROOT / "docs" / "reliability.md"
NAMED = re.compile(r"`([\w/]+\.py)::(\w+)`")


def test_every_test_that_the_page_names_exists() -> None:
    missing = []
    for path, name in sorted(set(NAMED.findall(PAGE.read_text()))):
        file = tree.ROOT / "test" / path
        if not file.is_file() or not re.search(rf"^(async )?def {name}\(", file.read_text(), re.MULTILINE):
            missing.append(f"{path}::{name}")
    assert missing == []


def test_every_field_fault_has_its_own_row() -> None:
    numbers = re.findall(r"^\| (P\d\d) \|", PAGE.read_text(), re.MULTILINE)
    assert len(numbers) == len(set(numbers))
    assert len(numbers) > 60


def test_every_test_of_faults_is_on_the_page() -> None:
    """What is injected and not written down is not known to anybody."""
    named = {name for _, name in NAMED.findall(PAGE.read_text())}
    for file in sorted((tree.ROOT / "test" / "faults").glob("test_*.py")):
        if file.name != "test_tally.py":
            tests = set(re.findall(r"^def (test_\w+)\(", file.read_text(), re.MULTILINE))
            assert tests - named <= {"test_a_case_is_its_number"}, file.name
