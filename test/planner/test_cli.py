"""The verbs against a real planner."""

from __future__ import annotations

import json
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack

import pytest
import typer
from support.seed_node import Seed
from typer.testing import CliRunner

from rfork.cli import drain, leases, planner, seeds, watch
from rfork.planner.client import PlannerClient


@pytest.fixture
def run(live_planner):
    def run(verb, *args, url=live_planner.url):
        app = typer.Typer()
        app.command()(verb.command)
        return CliRunner().invoke(app, [*args, "--planner", url])

    return run


@pytest.fixture
def client(live_planner, build):
    client = PlannerClient(live_planner.url)
    client.heartbeat(build.seed("i-seed", model="[red]tiny[/red]\x1b[2J", identity={"dtype": "bfloat16"}))
    client.ask(build.ask("i-reader"))
    return client


def test_seeds_lists_instances_and_hostile_text_stays_text(run, client):
    shown = run(seeds)
    assert shown.exit_code == 0
    assert "i-seed" in shown.output
    assert "[red]tiny[/red]" in shown.output
    assert "\x1b" not in shown.output
    assert "1 instances, 1 offered" in shown.output


def test_seeds_tells_one_story(run, client):
    shown = run(seeds, "i-seed").output
    assert "chosen for i-reader" in shown
    assert "dtype = bfloat16" not in shown
    assert run(seeds, "i-seed", "--identity").output.endswith("  dtype = bfloat16\n")


def test_json_is_for_programs(run, client):
    assert json.loads(run(seeds, "--json").output)["instances"][0]["instance_id"] == "i-seed"
    assert json.loads(run(leases, "--json").output)["leases"][0]["client"] == "i-reader"


def test_leases_lists_who_reads_whom(run, client):
    shown = run(leases).output
    assert "i-reader" in shown
    assert "reserved" in shown


def test_drain_waits_for_readers_and_says_how_many_are_left(run, client, build):
    client.heartbeat(build.seed("i-seed", seq=1, state="draining"))
    refused = run(drain, "i-seed", "--wait", "0.1")
    assert refused.exit_code == 1
    assert "i-seed still has 1 readers after 0.1 s" in refused.output
    client.report(build.report("loaded", "i-reader", "i-seed"))
    assert run(drain, "i-seed", "--wait", "5").exit_code == 0


def test_drain_waits_until_the_instance_itself_says_that_it_drains(run, client, build):
    """The planner's word is not enough: until its next heartbeat the seed goes on granting to whoever knows it."""
    client.report(build.report("loaded", "i-reader", "i-seed"))
    asked = run(drain, "i-seed")
    assert (asked.exit_code, asked.output) == (0, "i-seed is asked to drain: it hears of it with its next heartbeat\n")
    refused = run(drain, "i-seed", "--wait", "0.1")
    assert refused.exit_code == 1
    assert "i-seed has not said that it drains (it is serving) after 0.1 s" in refused.output
    client.heartbeat(build.seed("i-seed", seq=1, state="draining"))
    assert run(drain, "i-seed", "--wait", "5").exit_code == 0


def test_drain_is_over_when_the_instance_is_gone(run, client, monkeypatch):
    """A planner that has just restarted knows of nobody, which proves nothing."""
    asked = PlannerClient.drain

    def drain_and_go(self, instance):
        asked(self, instance)
        self.withdraw(instance)

    monkeypatch.setattr(PlannerClient, "drain", drain_and_go)
    shown = run(drain, "i-seed", "--wait", "5")
    assert (shown.exit_code, shown.output.splitlines()[-1]) == (0, "i-seed is gone from the planner")
    assert drain._left_at_planner(client, "i-seed", time.monotonic() - 1000).startswith("may never hear of it")


def test_drain_of_nobody_says_so(run):
    shown = run(drain, "i-nobody")
    assert shown.exit_code == 1
    assert "no instance i-nobody" in shown.output


def test_watch_prints_what_is_remembered(run, client):
    shown = run(watch, "--once").output
    assert "registered" in shown
    assert "i-reader <- i-seed" in shown


def test_no_planner_is_one_line_and_exit_1(run, build):
    shown = run(seeds, url=f"http://127.0.0.1:{build.free_port()}")
    assert shown.exit_code == 1
    assert shown.output.startswith("rfork: no planner answers: ")


def test_a_wrong_url_is_one_line_and_exit_2(run):
    assert run(seeds, url="planner:7700").exit_code == 2


@pytest.mark.parametrize("policy", ["[]", "{", '{"interval": 3}', '{"ttl_s": "x"}', '{"disk_claims": 0}'])
def test_a_wrong_policy_is_one_line_and_exit_2(policy):
    app = typer.Typer()
    app.command()(planner.command)
    shown = CliRunner().invoke(app, ["--policy", policy])
    assert shown.exit_code == 2
    assert shown.output.startswith("rfork: --policy: ")
    assert len(shown.output.splitlines()) == 1


def test_what_must_outlast_heartbeats_grows_with_their_interval():
    app = typer.Typer()
    app.command()(planner.command)

    def shown(*options):
        return json.loads(CliRunner().invoke(app, ["--show-policy", *options]).output)

    usual, rare = shown(), shown("--interval-s", "90", "--policy", '{"settle_s": 7}')
    changed = {name: rare[name] / usual[name] for name in usual if rare[name] != usual[name]}
    assert changed == {"interval_s": 9, "ttl_s": 9, "claim_ttl_s": 9, "assignment_ttl_s": 9, "settle_s": 7 / 12}
    assert shown("--policy", '{"interval_s": 90}') == shown("--interval-s", "90")
    often = shown("--interval-s", "1")
    assert {name for name in usual if often[name] < usual[name]} == {"interval_s", "ttl_s", "settle_s"}


def test_the_planner_runs_as_a_process_without_torch_or_sglang(build):
    port = build.free_port()
    code = (
        "import sys, threading, time; from rfork.cli.planner import command; import typer\n"
        "bad = [m for m in ('torch', 'sglang') if m in sys.modules]\n"
        "assert not bad, bad\n"
        "app = typer.Typer(); app.command()(command); app()"
    )
    process = subprocess.Popen([sys.executable, "-c", code, "--port", str(port), "--log-level", "warning"])
    try:
        deadline = time.monotonic() + 20
        while True:
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=1) as reply:
                    assert json.load(reply)["ready"] is True
                break
            except OSError:
                assert time.monotonic() < deadline, "the planner did not start within 20 s"
                assert process.poll() is None
                time.sleep(0.1)
    finally:
        process.terminate()
    assert process.wait(15) in (0, -15)


@pytest.fixture
def seed():
    with ExitStack() as stack:
        yield Seed(stack).serve()


def drain_local(seed, *args):
    """As a preStop hook does: with nothing but the server's address."""
    app = typer.Typer()
    app.command()(drain.command)
    return CliRunner().invoke(app, ["--local", str(seed.node.listener_url), *args], env={"RFORK_PLANNER_URL": ""})


def test_a_local_drain_needs_no_planner_and_waits_for_readers(seed):
    lease = seed.lease().json()["lease"]
    shown = drain_local(seed, "--wait", "0.1")
    assert (shown.exit_code, seed.node.state.value) == (1, "draining")
    assert f"{seed.node.instance_id} still has 1 readers after 0.1 s" in shown.output
    seed.http.delete(f"/rfork/v1/leases/{lease}")
    assert drain_local(seed, "--wait", "5").exit_code == 0


def test_a_local_drain_of_nobody_says_so(build):
    app = typer.Typer()
    app.command()(drain.command)
    shown = CliRunner().invoke(app, ["--local", f"http://127.0.0.1:{build.free_port()}"])
    assert shown.exit_code == 1
    assert "rfork: no R-Fork instance answers at http://127.0.0.1:" in shown.output
