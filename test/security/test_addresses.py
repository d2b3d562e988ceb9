"""Two hosts, as network namespaces of this test: what is advertised is what the other can reach (P43, P45, P46)."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mooncake.engine")

TEST = Path(__file__).parents[1]
HERE, THERE = ("192.0.2.1", "2001:db8::1"), ("192.0.2.2", "2001:db8::2")
"""Set apart for documentation, and known in these namespaces alone."""


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


class Host:
    """A network namespace with one interface."""

    def __init__(self, stack: ExitStack, name: str) -> None:
        self.name = name
        self._stack = stack
        self._prefix: list[str] = []
        ip("netns", "add", name)
        stack.callback(ip, "netns", "del", name)
        self.ip("link", "set", "lo", "up")

    def ip(self, *arguments: str) -> None:
        ip("-n", self.name, *arguments)

    def see_hosts_file(self, path: Path) -> None:
        """Programs find this file as /etc/hosts."""
        self._prefix = ["unshare", "-m", "sh", "-c", f'mount --bind {path} /etc/hosts && exec "$@"', "sh"]

    def start(self, role: str, where: str, **config: Any) -> subprocess.Popen[str]:
        paths = [str(TEST), os.environ.get("PYTHONPATH", ""), str(TEST.parent / "python")]
        program = [sys.executable, "-m", "security.host", role, where, json.dumps(config)]
        process = subprocess.Popen(
            ["nsenter", f"--net=/run/netns/{self.name}", *self._prefix, *program],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=TEST,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )  # fmt: skip
        self._stack.callback(self._end, process)
        return process

    def _end(self, process: subprocess.Popen[str]) -> None:
        process.kill()
        process.communicate()


def serving(process: subprocess.Popen[str]) -> dict[str, Any]:
    """What a seed says once it serves."""
    found = said(process)
    assert (found["state"], found["why"]) == ("serving", "")
    return found


def said(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The one line of JSON that a program prints, among what libraries print."""
    assert process.stdout is not None
    for line in process.stdout:
        if line.startswith("{"):
            found: dict[str, Any] = json.loads(line)
            return found
    raise AssertionError(f"it ended with {process.wait()} and said nothing")


@pytest.fixture
def hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts on one link, with IPv4 and IPv6."""
    yield from joined([HERE, THERE])


@pytest.fixture
def ipv6_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts that have no IPv4 but loopback."""
    yield from joined([HERE[1:], THERE[1:]])


def joined(addresses: list[tuple[str, ...]]) -> Iterator[tuple[Host, Host]]:
    if not all(map(shutil.which, ("ip", "nsenter", "unshare"))):
        pytest.skip("iproute2 and util-linux are not installed")
    with ExitStack() as stack:
        names = [f"rfork-{os.getpid()}-{side}" for side in "ab"]
        try:
            pair = Host(stack, names[0]), Host(stack, names[1])
            ip("link", "add", f"rf{os.getpid()}a", "netns", names[0], "type", "veth", "peer", "eth0", "netns", names[1])
            pair[0].ip("link", "set", f"rf{os.getpid()}a", "name", "eth0")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces are not permitted here: {error.stderr.strip()}")
        for host, own in zip(pair, addresses, strict=True):
            for address in own:
                more = ("/64", "nodad") if ":" in address else ("/24",)
                host.ip("addr", "add", address + more[0], "dev", "eth0", *more[1:])
            host.ip("link", "set", "eth0", "up")
        yield pair


FORKED = {"reason": "", "equal": True, "protocol": "tcp"}


def test_two_instances_of_one_host_with_default_settings_are_both_forked_from(
    hosts: tuple[Host, Host], tmp_path: Path
) -> None:
    """The second host needs nothing but what it was told. A hosts file that calls this host 127.0.1.1, as Debian writes
    it, misleads nobody.
    """
    here, there = hosts
    (tmp_path / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {os.uname().nodename}\n")
    here.see_hosts_file(tmp_path / "hosts")
    first, second = map(serving, [here.start("seed", "0.0.0.0"), here.start("seed", "0.0.0.0")])
    for seed in (first, second):
        assert seed["listener"].startswith("http://192.0.2.1:")
        assert [s.rpartition(":")[0] for s in seed["sessions"]] == ["192.0.2.1"]
    assert first["listener"] != second["listener"]
    assert first["sessions"] != second["sessions"]
    clients = [there.start("client", f"192.0.2.1:{seed['port']}") for seed in (first, second)]
    assert list(map(said, clients)) == [FORKED, FORKED]


def test_ipv6_where_both_sides_ask_for_it(hosts: tuple[Host, Host]) -> None:
    """Mooncake speaks one family in a process. A client with both that was told nothing says what to set."""
    here, there = hosts
    seed = serving(here.start("seed", "::", advertise_host="2001:db8::1"))
    assert seed["listener"].startswith("http://[2001:db8::1]:")
    assert seed["sessions"][0].startswith("[2001:db8::1]:")
    address = f"[2001:db8::1]:{seed['port']}"
    told, untold = there.start("client", address, advertise_host="2001:db8::2"), there.start("client", address)
    assert said(told) == FORKED
    refused = said(untold)
    assert refused["reason"] == "unreachable"
    assert "set MC_USE_IPV6=1 in the server's environment, or advertise an IPv4 address" in refused["message"]


def test_hosts_without_ipv4_need_no_setting(ipv6_hosts: tuple[Host, Host]) -> None:
    here, there = ipv6_hosts
    seed = serving(here.start("seed", "::"))
    assert seed["listener"].startswith("http://[2001:db8::1]:")
    assert said(there.start("client", f"[2001:db8::1]:{seed['port']}")) == FORKED


def test_a_listener_on_loopback_is_refused_elsewhere_with_the_fix_and_works_at_home(hosts: tuple[Host, Host]) -> None:
    here, there = hosts
    seed = serving(here.start("seed", "0.0.0.0", listen="127.0.0.1:0"))
    assert seed["listener"].startswith("http://127.0.0.1:")
    address = f"192.0.2.1:{seed['port']}"
    abroad, at_home = there.start("client", address), here.start("client", address)
    assert said(at_home) == FORKED
    refused = said(abroad)
    assert refused["reason"] == "loopback"
    assert "start it with `listen` or SGLang's --host" in refused["message"]


def test_ipv6_loopback_within_one_host(ipv6_hosts: tuple[Host, Host]) -> None:
    here, _ = ipv6_hosts
    seed = serving(here.start("seed", "::1", advertise_host="::1"))
    assert seed["sessions"][0].startswith("[::1]:")
    assert said(here.start("client", f"[::1]:{seed['port']}")) == FORKED
