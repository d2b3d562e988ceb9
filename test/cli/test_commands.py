"""The command line as a whole: every verb explains itself, and wrong usage is told apart from failure."""

import importlib
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from rfork.cli import EXIT_USAGE, VERBS, build


def rfork(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "rfork.cli", *args], capture_output=True, text=True, timeout=60, check=False
    )


def test_help_names_every_verb() -> None:
    shown = CliRunner().invoke(build(), ["--help"], terminal_width=200)
    assert shown.exit_code == 0
    for name, verb in VERBS.items():
        assert name in shown.output
        assert verb.help[:40] in shown.output


@pytest.mark.parametrize("name", VERBS)
def test_each_verb_explains_itself(name: str) -> None:
    """With all that its docstring promises; programs rely on the exit statuses."""
    shown = CliRunner().invoke(build({name}), [name, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    assert "--help" in shown.output
    promised = importlib.import_module(f"rfork.cli.{name}").command.__doc__
    assert "Exit status: " in promised
    assert "".join(promised.split()) in "".join(shown.output.split())


def test_help_imports_no_verb() -> None:
    code = "import sys, rfork.cli; rfork.cli.build(()); print(*(m for m in sys.modules if m.startswith('rfork.')))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert not {f"rfork.cli.{name}" for name in VERBS} & set(done.stdout.split())


def test_the_options_of_the_demo() -> None:
    shown = CliRunner().invoke(build({"demo"}), ["demo", "--help"], terminal_width=200).output
    for option in ("--device", "--model", "--size-mb", "--json", "--keep-logs"):
        assert option in shown


@pytest.mark.parametrize(
    "args",
    [
        ("no-such-verb",),
        ("demo", "--device", "tpu"),
        ("demo", "--model", "/no/such/folder"),
        ("doctor", "--no-such-option"),
    ],
)
def test_wrong_usage_is_exit_status_2(args: tuple[str, ...]) -> None:
    done = rfork(*args)
    assert done.returncode == EXIT_USAGE
    assert done.stderr.strip()


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("planner", "--log-level", "foo"), "Invalid value for '--log-level': "),
        (("planner", "--store", "redis://127.0.0.1:notaport/0"), "rfork: --store must be redis://host:port/db: "),
        (("planner", "--store", "etcd://127.0.0.1:1"), "rfork: --store must be memory or redis://host:port/db, got"),
        (("planner", "--store", "redis://:pw@127.0.0.1:1/0"), "rfork: --store carries a secret, which every user"),
        (("seeds", "--planner", "http://me:pw@127.0.0.1:1"), "rfork: --planner carries a secret, which every user"),
        (("drain", "i-1", "--planner", "http://me:pw@127.0.0.1:1"), "expected it in RFORK_PLANNER_URL"),
        (("doctor", "--rfork-config", "{}", "--rfork-config", "{}"), "rfork: --rfork-config is given twice"),
        (("check", "foo", "--", "--model-path", "m"), "can't tell: an instance needs a port from 1 to 65535"),
        (("audit", "foo"), "rfork: an instance needs a port from 1 to 65535, got 'foo'"),
    ],
)
def test_a_wrong_value_is_named_with_its_option(args: tuple[str, ...], says: str) -> None:
    shown = CliRunner().invoke(build({args[0]}), args, terminal_width=200)
    assert shown.exit_code == EXIT_USAGE
    assert says in shown.output
    assert "Traceback" not in shown.output


def test_a_password_in_the_environment_is_taken_and_not_shown() -> None:
    for args, environ in (
        (("seeds",), {"RFORK_PLANNER_URL": "http://me:hush@127.0.0.1:1"}),
        (("planner",), {"RFORK_STORE": "redis://:hush@127.0.0.1:notaport/0"}),
        (("planner",), {"RFORK_STORE": "redis://:hush/hush@127.0.0.1:1/0"}),
    ):
        shown = CliRunner().invoke(build({args[0]}), args, env=environ, terminal_width=200)
        assert shown.exit_code in (1, EXIT_USAGE)
        assert shown.output.startswith("rfork: ")
        assert "carries a secret" not in shown.output
        assert "hush" not in shown.output


@pytest.mark.parametrize("module", ["rfork.cli.demo", "rfork.cli.doctor", "rfork.doctor.bounded"])
def test_neither_imports_sglang_or_torch(module: str) -> None:
    """They look at SGLang from outside: by starting it, or in child processes."""
    code = (
        f"import sys, {module}; print(*(name for name in ('sglang', 'sglang_rfork', 'torch') if name in sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == ""
