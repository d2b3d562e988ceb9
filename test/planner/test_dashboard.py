"""The dashboard in a real headless Chromium: it shows the fleet and runs nothing that a registration says."""

from __future__ import annotations

import html
import os
import re
import shutil
import signal
import subprocess
import tempfile

import httpx
import pytest

from rfork.planner.client import PlannerClient

CHROMIUM = next(
    (path for name in ("chromium", "google-chrome", "chromium-browser") if (path := shutil.which(name))), None
)
EVIL = "<img src=x onerror=\"document.title='pwned'\"><script>document.title='pwned'</script>"

pytestmark = [pytest.mark.timeout(120)]
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here (apt-get install chromium)")


def render(url: str) -> str:
    """The page's DOM after it has run for a while."""
    profile = tempfile.mkdtemp(prefix="rfork-chromium-")
    command = [
        CHROMIUM,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--no-first-run",
        f"--user-data-dir={profile}",
        "--virtual-time-budget=1500",
        "--dump-dom",
        url,
    ]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        dom, _ = process.communicate(timeout=60)
        return dom.decode()
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(10)
        shutil.rmtree(profile, ignore_errors=True)


def text(dom: str) -> str:
    return html.unescape(re.sub(r"<[^>]+>", " ", dom))


@pytest.fixture
def fleet(live_planner, build):
    client = PlannerClient(live_planner.url)
    client.heartbeat(build.seed("i-root", parent="disk", generation=2, capacity=4, model="tiny-model"))
    client.heartbeat(build.seed("i-child", parent="i-root", model=EVIL, content=EVIL, labels={"zone": EVIL}))
    client.ask(build.ask("i-reader"))
    client.report(build.report("failed", "i-sad", "i-root", reason="seed_lost", detail=EVIL))
    return live_planner


@needs_browser
def test_the_page_shows_the_fleet_and_treats_registrations_as_text(fleet):
    dom = render(fleet.url)
    shown = text(dom)
    for word in ("i-root", "i-child", "tiny-model", "i-reader", "reserved", "seed_lost", "i-sad", fleet.service.name):
        assert word in shown
    assert re.search(r"<li>i-root gen 2[^<]*<ul><li>i-child gen 0", dom), "the fork tree nests children"
    assert "pwned" in shown
    assert "<title>R-Fork planner</title>" in dom
    assert "<img" not in dom
    assert dom.count("<script") == 1


@needs_browser
def test_an_empty_planner_says_that_it_is_empty(live_planner):
    shown = text(render(live_planner.url))
    assert "no instance is registered" in shown
    assert "nobody waits" in shown


def test_the_page_is_a_static_shell_under_a_strict_policy(live_planner):
    for path in ("/", "/dashboard.js", "/dashboard.css"):
        reply = httpx.get(live_planner.url + path)
        policy = reply.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "frame-ancestors 'none'" in policy
        assert reply.headers["x-content-type-options"] == "nosniff"
        assert not re.search(r"https?://", reply.text), "works offline: nothing is fetched from elsewhere"
    script = httpx.get(live_planner.url + "/dashboard.js").text
    for sink in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "Function("):
        assert sink not in script
    page = httpx.get(live_planner.url + "/").text
    assert not re.search(r"\son\w+=", page)
    assert "style=" not in page
