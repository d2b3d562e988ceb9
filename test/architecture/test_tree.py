"""What holds for the files of this repository."""

import re
from pathlib import Path

import pytest
import tree
from tree import ROOT, relative

import rfork
from rfork import cli

MAX_LINES = 500


def python_files() -> list[Path]:
    return [path for path in tree.files() if path.suffix == ".py"]


def test_modules_are_short() -> None:
    long = {relative(path): len(path.read_text().splitlines()) for path in python_files()}
    assert {name: lines for name, lines in long.items() if lines > MAX_LINES} == {}


def test_each_module_says_what_it_is_for() -> None:
    for package in tree.PACKAGES:
        for module in tree.modules(package):
            source = module.path.read_text().lstrip()
            assert not source or source.startswith(('"""', "'''", "#")), f"{relative(module.path)} has no docstring"


def test_nothing_names_a_machine() -> None:
    """No home folder and no registry's host: what is written here must hold on every machine."""
    hosts = ("pypi" + r"\.org", "python" + r"hosted\.org", "registry" + r"\.npmjs", "deb" + r"\.debian\.org")
    machine = re.compile(
        "|".join((r"(?<![\w./-])/" + r"work/\w", "/" + r"root/", r"/home/(?!\$|<|\{|you\b|user\b)\w+", *hosts))
    )
    guilty = [
        f"{relative(path)}:{number}: {line.strip()[:100]}"
        for path in tree.files()
        for number, line in enumerate((tree.text(path) or "").splitlines(), 1)
        if machine.search(line)
    ]
    assert guilty == []


def test_the_version_is_one() -> None:
    assert f'version = "{rfork.__version__}"' in (ROOT / "pyproject.toml").read_text()


def test_each_verb_is_a_file_and_each_file_a_verb() -> None:
    stems = {path.stem for path in (ROOT / "python/rfork/cli").glob("*.py") if not path.stem.startswith("_")}
    assert stems == set(cli.VERBS)


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_each_verb_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([verb, "--help"])
    assert exit.value.code == 0
    assert "Exit status: " in capsys.readouterr().out


def test_supported_releases_are_said_once_per_extra() -> None:
    """The extras, the platform and the locks name the same range of SGLang."""
    declared = [(ROOT / name).read_text() for name in ("pyproject.toml", "platforms/host_cpu/pyproject.toml")]
    assert set(re.findall(r'"sglang([<>=][^"]*)"', "".join(declared))) == {">=0.5.16,<0.5.24"}
    for lock in (ROOT / "requirements").glob("sglang-*.txt"):
        assert f"\nsglang=={lock.stem.removeprefix('sglang-')}\n" in lock.read_text()
