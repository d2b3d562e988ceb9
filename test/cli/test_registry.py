"""The table of verbs: quick help, lazy imports, and a way forward where an extra is missing."""

import subprocess
import sys

import pytest

import rfork
from rfork import cli


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)


def test_help_lists_each_verb_and_imports_none() -> None:
    run = python(
        "import sys; from rfork.cli import main\n"
        "try: main(['--help'])\n"
        "finally: print(sorted(name for name in sys.modules if name.startswith('rfork.')))"
    )
    for verb in cli.VERBS:
        assert verb in run.stdout
    assert run.stdout.splitlines()[-1] == "['rfork.cli']"


def test_without_a_verb_it_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main([])
    assert exit.value.code == 0
    assert "Usage" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["--version"])
    assert exit.value.code == 0
    assert capsys.readouterr().out.strip() == rfork.__version__


def test_an_unknown_verb_is_a_usage_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        cli.main(["frok"])
    assert exit.value.code == cli.EXIT_USAGE
    assert "frok" in capsys.readouterr().err


def test_a_verb_without_its_extra_says_what_to_install() -> None:
    run = python("import sys; sys.modules['fastapi'] = None; from rfork.cli import main; main(['planner'])")
    assert run.returncode == cli.EXIT_USAGE
    assert "pip install 'sglang-rfork[planner]'" in run.stderr
    assert "Traceback" not in run.stderr


def test_a_bug_in_a_verb_is_not_taken_for_a_missing_extra() -> None:
    run = python("import sys; sys.modules['rfork.planner'] = None; from rfork.cli import main; main(['planner'])")
    assert run.returncode == 1
    assert "pip install" not in run.stderr
