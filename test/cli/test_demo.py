"""`rfork demo` as a user runs it, once for real; how it ends when it can't go on; and that its checks can fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import msgspec
import psutil
import pytest
from cli.environments import python_without, run_rfork

from rfork.cli import EXIT_USAGE
from rfork.demo import model
from rfork.demo.facts import InstanceFacts, check_all
from rfork.demo.processes import session_members
from rfork.wire.seed import SeedRef, WeightsReport

NBYTES = 100_000_000


def demo(*args: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "rfork.cli", "demo", "--device", "cpu", *args],
        env={**os.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_until(condition: Callable[[], object], deadline_s: float) -> None:
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_server(process: psutil.Process) -> bool:
    try:
        return "sglang.launch_server" in process.cmdline()
    except psutil.NoSuchProcess:
        return False


@pytest.mark.server
@pytest.mark.spawn
@pytest.mark.timeout(1200)
def test_the_whole_demo(tmp_path: Path) -> None:
    """A from disk, B from A, A killed, C from B, D from a dead address: all equal, and the file says the same."""
    done = run_rfork(
        *("demo", "--device", "cpu", "--json", str(tmp_path / "facts.json"), "--keep-logs", str(tmp_path / "logs")),
        env={"TMPDIR": str(tmp_path)},
        timeout_s=1100,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "All 4 hold the same weights" in done.stdout
    facts = json.loads((tmp_path / "facts.json").read_text())
    assert facts["ok"] is True
    assert [check for check in facts["checks"] if not check["ok"]] == []
    assert facts["model_nbytes"] >= NBYTES
    a, b, c, d = facts["instances"]
    assert [i["weights"]["source"] for i in (a, b, c, d)] == ["checkpoint", "seed", "seed", "checkpoint"]
    assert (b["weights"]["seed"]["instance_id"], c["weights"]["seed"]["instance_id"]) == (
        a["instance_id"],
        b["instance_id"],
    )
    assert (a["weights"]["fallback_reason"], a["asked_for"], b["asked_for"]) == ("elected", "planner", "planner")
    assert d["weights"]["fallback_reason"] not in (None, "elected")
    assert len(a["checksums"]) > 30
    assert a["checksums"] == b["checksums"] == c["checksums"] == d["checksums"]
    assert a["tokens"] == b["tokens"] == c["tokens"] == d["tokens"]
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        *("A.log", "B.log", "C.log", "D.log", "planner.log")
    ]
    assert list(tmp_path.glob("rfork-demo-*")) == []


@pytest.mark.server
@pytest.mark.spawn
def test_a_server_that_cannot_start_is_named_with_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text('{"model_type": "no_such_model", "architectures": ["NoSuch"]}')
    done = run_rfork(
        "demo", "--device", "cpu", "--model", str(tmp_path / "model"), "--keep-logs", str(tmp_path / "logs")
    )
    assert done.returncode == 1
    assert "✗ A ended with status" in done.stdout
    assert f"last lines of {tmp_path}/logs/A.log" in done.stdout
    assert "no_such_model" in done.stdout


@pytest.mark.server
@pytest.mark.spawn
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_nothing_is_left_however_it_ends(number: signal.Signals, tmp_path: Path) -> None:
    """Not even where nobody is left to clean up: a server is tied to the demo's life by the kernel."""
    logs = tmp_path / "logs"
    run = demo("--size-mb", "16", "--keep-logs", str(logs), folder=tmp_path)
    children: list[psutil.Process] = []

    def both_are_there() -> bool:
        children[:] = psutil.Process(run.pid).children()
        return (logs / "A.log").exists() and len(children) == 2

    try:
        wait_until(both_are_there, 60)
        wait_until(lambda: any(map(is_server, children)), 30)
        time.sleep(1)  # any moment of its start-up will do
        run.send_signal(number)
        said, _ = run.communicate(timeout=60)
    finally:
        run.kill()
        run.wait()
    wait_until(lambda: not any(session_members(child.pid) for child in children), 20)
    if number != signal.SIGKILL:
        assert run.returncode == 128 + number
        assert f"Stopped ({number.name}); every server is gone." in said
        assert list(tmp_path.glob("rfork-demo-*")) == []


def test_without_sglang_it_says_what_to_install(tmp_path: Path) -> None:
    done = run_rfork("demo", python=python_without(tmp_path / "venv"))
    assert done.returncode == EXIT_USAGE
    assert "SGLang is not installed here" in done.stdout
    for extra in ("cpu", "cuda12", "cuda13"):
        assert f"pip install 'sglang-rfork[{extra}]'" in done.stdout


def test_without_mooncake_it_does_not_start_anything(tmp_path: Path) -> None:
    done = run_rfork("demo", python=python_without(tmp_path / "venv", ["mooncake*"]))
    assert done.returncode == EXIT_USAGE
    assert "Mooncake, which moves the bytes, is not installed here" in done.stdout


def test_a_file_that_cannot_be_written_is_no_reason_to_lose_two_minutes(tmp_path: Path) -> None:
    done = run_rfork("demo", "--json", str(tmp_path / "no-such-folder" / "facts.json"))
    assert done.returncode == EXIT_USAGE
    assert "no-such-folder/facts.json: No such file or directory" in done.stdout


def test_a_full_disk_leaves_nothing_behind(tmp_path: Path) -> None:
    """No file may grow past 1 MB here, so the model can't be written."""
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20)); "
        "from rfork.cli import main; main(['demo', '--device', 'cpu'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    assert "making a model of at least 128 MB" in done.stdout
    assert "can't write a model of 128 MB" in done.stdout
    assert list(tmp_path.glob("rfork-demo-*")) == []


def test_without_a_gpu_cuda_is_refused() -> None:
    if any(Path("/dev").glob("nvidia[0-9]*")):
        pytest.skip("this host has a GPU")
    done = run_rfork("demo", "--device", "cuda")
    assert done.returncode == EXIT_USAGE
    assert "torch sees no GPU here" in done.stdout


class TestModel:
    def test_it_is_a_checkpoint_of_the_size_asked_for(self, tmp_path: Path) -> None:
        from safetensors import safe_open

        nbytes = model.make(tmp_path, 20_000_000)
        assert 20_000_000 <= nbytes < 60_000_000
        assert 0 <= model.weights_nbytes(tmp_path) - nbytes < 100_000
        with safe_open(tmp_path / "model.safetensors", "np") as file:
            names = set(file.keys())
        assert {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.down_proj.weight"} <= names

    def test_it_is_the_same_each_time(self, tmp_path: Path) -> None:
        for name in ("one", "two"):
            model.make(tmp_path / name, 16_000_000)
        one, two = ((tmp_path / name / "model.safetensors").read_bytes() for name in ("one", "two"))
        assert one == two

    def test_large_ones_are_cut_into_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        specs = model._specs(model._config(16_000_000))
        parts = list(model._files(specs, 8_000_000))
        assert [spec for part in parts for spec in part] == specs
        assert len(parts) > 2
        assert all(len(part) == 1 or sum(spec.nbytes for spec in part) <= 8_000_000 for part in parts)


def facts(name: str, weights: WeightsReport, **changes: object) -> InstanceFacts:
    tokens = (tuple(range(10)), tuple(range(10, 20)))
    one = InstanceFacts(
        name=name,
        instance_id=f"i-{name}",
        asked_for="",
        gpu=None,
        ready_s=1.0,
        generation=2,
        weights=weights,
        tokens=tokens,
        checksums={"a": "1", "b": "2"},
    )
    return msgspec.structs.replace(one, **changes)


def fork(seed: str, **changes: object) -> WeightsReport:
    seed_ref = SeedRef(f"i-{seed}", "127.0.0.1:1", 2)
    report = WeightsReport(
        source="seed", seed=seed_ref, verify="full", protocol="tcp", nbytes=NBYTES, seconds=0.1, gbps=1.0
    )
    return msgspec.structs.replace(report, **changes)


DISK = WeightsReport(source="checkpoint", seconds=1.0)
FELL_BACK = WeightsReport(source="checkpoint", fallback_reason="unreachable")


def wrong(**replaced: InstanceFacts) -> dict[str, str]:
    """Checks that fail, by name, where some instances of a good run are replaced."""
    good = {"A": facts("A", DISK), "B": facts("B", fork("A")), "C": facts("C", fork("B")), "D": facts("D", FELL_BACK)}
    return {check.name: check.text for check in check_all([*{**good, **replaced}.values()], NBYTES) if not check.ok}


class TestChecks:
    """Each check fails where it should, and says what was found instead."""

    def test_a_good_run_passes(self) -> None:
        assert wrong() == {}

    def test_a_fork_that_read_the_disk(self) -> None:
        fell_back = WeightsReport(source="checkpoint", fallback_reason="refused", fallback_detail="the seed is busy")
        assert wrong(B=facts("B", fell_back)) == {
            "B.source": "B did not fork from A, but read the disk (the seed is busy)"
        }

    def test_a_fork_from_another_seed(self) -> None:
        assert "not from B" in wrong(C=facts("C", fork("A")))["C.source"]

    @pytest.mark.parametrize("change", [{"verify": "off"}, {"verify": "sample"}, {"origin_verified": False}])
    def test_a_fork_that_was_not_verified(self, change: dict[str, object]) -> None:
        assert "without full verification" in wrong(B=facts("B", fork("A", **change)))["B.source"]

    @pytest.mark.parametrize("change", [{"nbytes": NBYTES // 2}, {"seconds": 0.0}, {"gbps": 0.0}])
    def test_a_fork_that_moved_too_little(self, change: dict[str, object]) -> None:
        assert "for a model of 100000000 bytes" in wrong(B=facts("B", fork("A", **change)))["B.source"]

    def test_a_fallback_that_gives_no_reason(self) -> None:
        assert "gives no reason" in wrong(D=facts("D", DISK))["D.source"]

    def test_the_first_is_not_taken_for_a_fallback_nor_a_fallback_for_the_first(self) -> None:
        elected = WeightsReport(source="checkpoint", fallback_reason="elected")
        assert wrong(A=facts("A", elected)) == {}
        assert "gives no reason" in wrong(D=facts("D", elected))["D.source"]

    def test_a_seed_that_did_not_read_the_disk(self) -> None:
        assert wrong(A=facts("A", fork("X"))) == {"A.source": "A has weights from seed"}

    def test_one_token(self) -> None:
        tokens = ((*range(9), 99), tuple(range(10, 20)))
        assert wrong(C=facts("C", fork("B"), tokens=tokens)) == {
            "C.tokens": "C answers prompt 1 otherwise than A, from token 10 on"
        }

    @pytest.mark.parametrize("checksums", [{"a": "1", "b": "3"}, {"a": "1"}, {"a": "1", "b": "2", "c": "4"}, {}])
    def test_one_tensor(self, checksums: dict[str, str]) -> None:
        assert "tensors of D differ from A's" in wrong(D=facts("D", FELL_BACK, checksums=checksums))["D.weights"]

    def test_no_digests_at_all(self) -> None:
        assert "gave no digest" in wrong(A=facts("A", DISK, checksums={}))["B.weights"]

    def test_answers_that_prove_nothing(self) -> None:
        assert "too alike" in wrong(A=facts("A", DISK, tokens=((1, 1), (1, 1))))["varied"]
