"""The harness itself: real servers start, answer, and leave nothing behind. If it lied, every test would."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from support import ports
from support.models import DRAFTS, NO_FORWARD, RECIPES, Models
from support.nursery import session_pids
from support.server import STOCK, Fleet, Nursery, Server, ServerFailed

pytestmark = pytest.mark.server


@pytest.fixture
def fleet(tmp_path: Path, nursery: Nursery) -> Iterator[Fleet]:
    with Fleet(tmp_path, nursery, env=STOCK) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def module_fleet(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Fleet]:
    with Fleet(tmp_path_factory.mktemp("fleet"), nursery, env=STOCK) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def server(module_fleet: Fleet, models: Models) -> Server:
    return module_fleet.start(models.path("llama"))


@pytest.mark.spawn
def test_a_warm_server_generates_what_a_cold_one_does(fleet: Fleet, models: Models, server: Server) -> None:
    cold = fleet.start(models.path("llama"), cold=True)
    assert cold.generate() == server.generate()


MORE = ("qwen2", "llama-fp8", "llama-compressed-int8", "llama-compressed-fp8", "mimo", "deepseek-v3")
"""Like others, or used by long tests alone."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.long if name in MORE else ())
        for name in RECIPES
        if name not in DRAFTS + NO_FORWARD
    ],
)
def test_each_model_generates_varied_tokens(name: str, fleet: Fleet, models: Models) -> None:
    tokens = fleet.start(models.path(name)).generate(num_tokens=16).tokens
    assert len(tokens) == 16
    assert len(set(tokens)) >= 8, f"an oracle of equality must not repeat itself: {tokens}"


@pytest.mark.parametrize(
    ("name", "flags"),
    [
        ("llama", "--tp 2"),
        ("llama", "--pp-size 2"),
        ("llama", "--dp 2"),
        ("deepseek-v2", "--tp 2"),
        ("qwen3-moe", "--tp 2 --ep 2"),
        ("qwen3-moe", "--tp 2 --dp 2 --enable-dp-attention"),
        ("llama", "--tokenizer-worker-num 2"),
    ],
)
def test_parallel_servers_generate_what_one_rank_does(name: str, flags: str, fleet: Fleet, models: Models) -> None:
    alone = fleet.start(models.path(name)).generate()
    assert fleet.start(models.path(name), *flags.split()).generate() == alone


def test_a_draft_model_loads(fleet: Fleet, models: Models) -> None:
    flags = ["--speculative-num-steps", "1", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "2"]
    draft = ("--speculative-algorithm", "EAGLE", "--speculative-draft-model-path", str(models.path("llama-eagle")))
    assert fleet.start(models.path("llama"), *draft, *flags).is_ready()


def test_released_memory_can_be_resumed(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"), "--enable-memory-saver")
    before = server.generate()
    assert server.post("/release_memory_occupation").status_code == 200
    assert server.post("/resume_memory_occupation").status_code == 200
    assert server.generate() == before


def test_a_killed_server_leaves_no_process(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"))
    processes = server.processes()
    assert len(processes) >= 3  # main, scheduler, detokenizer
    server.kill()
    assert server.returncode == -signal.SIGKILL
    assert not [process for process in processes if is_alive(process)]


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_a_terminated_server_ends_by_itself(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"))
    server.generate()
    server.terminate()
    assert session_pids(server.pid) == []


def test_roles_can_be_signalled(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"), "--tp", "2")
    assert len(server.processes("scheduler")) == 2
    server.signal(signal.SIGKILL, "scheduler")
    server.wait_until_ended()
    assert server.returncode != 0


def test_a_frozen_server_goes_on_where_it_stopped(fleet: Fleet, models: Models) -> None:
    server = fleet.start(models.path("llama"))
    before = server.generate()
    with server.frozen():
        assert {process.status() for process in server.processes()} == {psutil.STATUS_STOPPED}
    assert server.generate() == before


def test_a_server_that_cannot_start_says_why(fleet: Fleet, tmp_path: Path) -> None:
    with pytest.raises(ServerFailed, match="ended with status") as failure:
        fleet.start(tmp_path / "no-such-model")
    assert "no-such-model" in str(failure.value)


def test_environment_reaches_spawned_processes(fleet: Fleet) -> None:
    script = fleet.folder / "mark.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing, os, subprocess
        if __name__ == "__main__":
            os.environ["SECOND"] = "set after the blanks were made"
            context = multiprocessing.get_context("spawn")
            with context.Pool(1) as pool:
                print("child:", pool.apply(os.getenv, ("FIRST",)), "and", pool.apply(os.getenv, ("SECOND",)))
        """)
    )
    program = fleet.start_script(script, env={"FIRST": "given to start()"})
    assert program.wait_until_ended() == 0, program.log()
    assert "child: given to start() and set after the blanks were made" in program.log()


def test_an_offline_engine_runs_under_the_harness(fleet: Fleet, models: Models) -> None:
    script = fleet.folder / "offline.py"
    script.write_text(
        textwrap.dedent(f"""
        import sglang
        if __name__ == "__main__":
            engine = sglang.Engine(model_path={str(models.path("llama"))!r}, max_total_tokens=2048, random_seed=1)
            print("answer", engine.generate("hello world", {{"temperature": 0, "max_new_tokens": 4}})["output_ids"])
            engine.shutdown()
        """)
    )
    program = fleet.start_script(script)
    assert program.wait_until_ended(60) == 0, program.log()
    assert "answer [" in program.log()


def test_a_spawned_child_of_a_warm_server_finds_nothing_patched(fleet: Fleet) -> None:
    """Blanks are made before plugins load, so each process of SGLang's loads them itself, as if it were spawned."""
    (fleet.folder / "child.py").write_text(
        textwrap.dedent("""
        def look():
            from sglang.srt import plugins
            from sglang.srt.plugins.hook_registry import HookRegistry
            print("in the child:", plugins._plugins_loaded, sorted(HookRegistry._patched), flush=True)
        """)
    )
    script = fleet.folder / "parent.py"
    script.write_text(
        textwrap.dedent("""
        import multiprocessing
        if __name__ == "__main__":
            import child
            from sglang.srt.plugins import load_plugins
            from sglang.srt.plugins.hook_registry import HookRegistry
            load_plugins()
            print("in the parent:", bool(HookRegistry._patched), flush=True)
            process = multiprocessing.get_context("spawn").Process(target=child.look)
            process.start()
            process.join()
            raise SystemExit(process.exitcode)
        """)
    )
    program = fleet.start_script(script)
    assert program.wait_until_ended() == 0, program.log()
    assert "in the parent: True" in program.log()
    assert "in the child: False []" in program.log()


def test_servers_of_a_dead_test_run_are_killed(tmp_path: Path, models: Models) -> None:
    """pytest itself may be killed; then nobody is left to run a fixture's end."""
    program = textwrap.dedent(f"""
        import sys, time
        from pathlib import Path
        sys.path.insert(0, {str(Path(__file__).parents[1])!r})
        from support.server import Fleet
        server = Fleet(Path({str(tmp_path)!r})).start({str(models.path("llama"))!r}, cold=True, wait=False)
        print(server.pid, flush=True)
        time.sleep(600)
    """)
    run = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    session = int(run.stdout.readline())
    assert session_pids(session)
    run.kill()
    run.wait()
    run.stdout.close()
    deadline = time.monotonic() + 10
    while session_pids(session):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_test_runs_never_share_ports() -> None:
    here = [ports.lend() for _ in range(3)]
    program = f"import sys; sys.path.insert(0, {str(Path(__file__).parents[1])!r}); from support import ports; "
    program += "print(*(ports.lend().port for _ in range(400)))"
    theirs = subprocess.run(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, check=False
    ).stdout.split()
    assert not {block.port for block in here} & {int(port) for port in theirs}
    for block in here:
        block.release()


def test_a_nursery_ends_with_its_socket(tmp_path: Path) -> None:
    nursery = Nursery(tmp_path)
    pid = nursery._process.pid
    nursery.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
