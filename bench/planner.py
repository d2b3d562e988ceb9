"""Requests per second and latency of a planner that holds many instances.

    python bench/planner.py                      heartbeat and ask, memory store, 10,000 instances
    python bench/planner.py --store redis://...  the same on a Redis server of yours

The planner runs as `rfork planner` does, in one process; the load comes from this process over keep-alive connections
to 127.0.0.1, and both share the machine's cores. `CPU us` is the planner's processor time per request.
"""

# ruff: noqa: T201

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import msgspec

from rfork.wire.planner import Ask, Heartbeat, InstanceState, Outcome, Report

READY_S = 20.0


@dataclass
class Result:
    """One phase: how many requests, how long each took, what they were answered."""

    name: str
    seconds: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    bad: int = 0
    cpu_s: float = 0.0

    def row(self) -> dict[str, Any]:
        cut = statistics.quantiles(self.latencies_ms, n=1000)
        return {
            "phase": self.name,
            "requests": len(self.latencies_ms),
            "per_s": round(len(self.latencies_ms) / self.seconds),
            "p50_ms": round(cut[499], 2),
            "p99_ms": round(cut[989], 2),
            "max_ms": round(max(self.latencies_ms), 2),
            "bad": self.bad,
            "cpu_us": round(self.cpu_s / len(self.latencies_ms) * 1e6),
        }


class Connection:
    """One keep-alive HTTP/1.1 connection; just enough of HTTP for our own planner."""

    async def open(self, port: int) -> Connection:
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", port)
        return self

    async def call(self, method: str, path: str, body: bytes) -> tuple[int, bytes]:
        head = f"{method} {path} HTTP/1.1\r\nhost: bench\r\ncontent-length: {len(body)}\r\n\r\n"
        self._writer.write(head.encode() + body)
        answer = await self._reader.readuntil(b"\r\n\r\n")
        nbytes = 0
        for line in answer.split(b"\r\n"):
            if line[:15].lower() == b"content-length:":
                nbytes = int(line[15:])
        return int(answer[9:12]), await self._reader.readexactly(nbytes)

    def close(self) -> None:
        self._writer.close()


async def drive(
    name: str, port: int, num: int, connections: int, rate: float, make: Callable[[int], list[tuple[str, str, bytes]]]
) -> Result:
    """Send `num` numbered rounds over some connections; `rate` 0 is as fast as it goes, else rounds per second.

    At a set rate a round's latency counts from when it was due, so that a stall is not hidden by waiting for it.
    """
    result = Result(name)
    numbers = iter(range(num))
    began = time.perf_counter()

    async def worker() -> None:
        connection = await Connection().open(port)
        for number in numbers:
            due = began + number / rate if rate else time.perf_counter()
            await asyncio.sleep(max(due - time.perf_counter(), 0)) if rate else None
            for position, (method, path, body) in enumerate(make(number)):
                start = due if position == 0 else time.perf_counter()
                status, answer = await connection.call(method, path, body)
                if position == 0:
                    result.latencies_ms.append((time.perf_counter() - start) * 1000)
                    if status >= 300 or (path.endswith("asks") and b'"fork"' not in answer):
                        result.bad += 1
        connection.close()

    await asyncio.gather(*(worker() for _ in range(connections)))
    result.seconds = time.perf_counter() - began
    return result


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used (Linux)."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def key_of(number: int, keys: int) -> str:
    return f"{number % keys:064x}"


def heartbeat(number: int, args: argparse.Namespace, seq: int) -> list[tuple[str, str, bytes]]:
    instance = number % args.instances
    beat = Heartbeat(
        instance_id=f"i-{instance:016x}",
        instance_key=key_of(instance, args.keys),
        state=InstanceState.SERVING,
        seq=seq,
        listener=f"http://10.{instance >> 16}.{instance >> 8 & 255}.{instance & 255}:7701",
        content="checkpoint:" + "c" * 32,
        generation=2,
        capacity=4,
        labels={"zone": f"z{instance % 4}", "fabric": f"f{instance % 32}"},
        model="bench",
        identity={f"field.{n}": n for n in range(60)} if seq == 1 and instance < args.keys else None,
    )
    return [("PUT", f"/rfork/v1/instances/{beat.instance_id}", msgspec.json.encode(beat))]


def ask(number: int, args: argparse.Namespace, report_to: str) -> list[tuple[str, str, bytes]]:
    client = f"c-{number % (args.instances // 2):016x}"  # a client that asks again gives back what it held
    key = key_of(number, args.keys)
    question = Ask(client=client, instance_key=key, labels={"zone": f"z{number % 4}", "fabric": f"f{number % 32}"})
    calls = [("POST", "/rfork/v1/asks", msgspec.json.encode(question))]
    if report_to:
        done = Report(client=client, instance_key=key, outcome=Outcome.FELL_BACK, reason="cancelled")
        calls.append(("POST", "/rfork/v1/reports", msgspec.json.encode(done)))
    return calls


def start_planner(store: str) -> tuple[subprocess.Popen[bytes], int]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    code = "import typer; from rfork.cli.planner import command; a = typer.Typer(); a.command()(command); a()"
    policy = '{"settle_s": 0, "ttl_s": 3600}'  # nobody is registered twice here, however slow the machine is
    options = ["--port", str(port), "--store", store, "--log-level", "warning", "--policy", policy]
    process = subprocess.Popen([sys.executable, "-c", code, *options])
    deadline = time.monotonic() + READY_S
    while time.monotonic() < deadline:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return process, port
        except OSError:
            time.sleep(0.05)
    process.kill()
    raise TimeoutError(f"the planner did not listen within {READY_S:g} s")


async def bench(pid: int, port: int, args: argparse.Namespace) -> list[dict[str, Any]]:
    num, conns = args.requests, args.connections
    phases: list[tuple[str, int, int, float, Callable[[int], list[tuple[str, str, bytes]]]]] = [
        ("register", args.instances, conns, 0, lambda n: heartbeat(n, args, 1)),
        ("heartbeat", num, conns, 0, lambda n: heartbeat(n, args, 2 + n // args.instances)),
        ("ask", num, conns, 0, lambda n: ask(n, args, "")),
        ("ask+report", num // 2, conns, 0, lambda n: ask(n, args, "x")),
    ]
    if args.rate:
        phases.append((f"ask at {args.rate:g}/s", int(args.rate * args.seconds), 4 * conns, args.rate, phases[2][4]))
    rows = []
    for name, total, connections, rate, make in phases:
        before = cpu_s(pid)
        result = await drive(name, port, total, connections, rate, make)
        result.cpu_s = cpu_s(pid) - before
        rows.append(result.row())
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--store", default="memory")
    parser.add_argument("--instances", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=10, help="instance keys that they spread over")
    parser.add_argument("--requests", type=int, default=10_000, help="per phase")
    parser.add_argument("--connections", type=int, default=8)
    parser.add_argument("--rate", type=float, default=2000, help="asks per second of the paced phase; 0 leaves it out")
    parser.add_argument("--seconds", type=float, default=5, help="length of the paced phase")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    process, port = start_planner(args.store)
    try:
        rows = asyncio.run(bench(process.pid, port, args))
    finally:
        process.terminate()
        process.wait(10)
    if args.json:
        print(json.dumps({"store": args.store, "instances": args.instances, "rows": rows}))
        return
    print(f"store {args.store}, {args.instances} instances, {args.keys} keys, {args.connections} connections")
    print(f"{'phase':<14}{'requests':>9}{'per s':>8}{'p50 ms':>9}{'p99 ms':>9}{'max ms':>9}{'CPU us':>8}{'bad':>6}")
    for row in rows:
        print("{phase:<14}{requests:>9}{per_s:>8}{p50_ms:>9}{p99_ms:>9}{max_ms:>9}{cpu_us:>8}{bad:>6}".format(**row))


if __name__ == "__main__":
    main()
