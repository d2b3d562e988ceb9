"""R-Fork's end-points on SGLang's own port: what is wrong with a request is told before anybody looks into it."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from fastapi import FastAPI
from support.groups import GroupSeed
from support.leaks import open_sockets
from support.seed_node import until

from rfork.seed import bodies
from rfork.wire.collective import INIT_PATH, SEND_PATH
from sglang_rfork.srt.compat import installed_release
from sglang_rfork.srt.entrypoints import collective, several_workers
from sglang_rfork.srt.entrypoints.http_server import STOCK_PATHS, install_routes

LONG = b"x" * (collective.MAX_BODY_NBYTES + 1)
SOON_S = 20.0
Part = MutableMapping[str, Any]


@pytest.fixture(params=["seed", "seed with a key", "worker"])
def app(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[FastAPI]:
    """SGLang's application with our end-points, or what one of several HTTP workers makes of it: its main process must
    not be bothered with such requests.
    """
    app = FastAPI()
    with ExitStack() as stack:
        if request.param == "worker":
            make_worker(app, monkeypatch)
        else:
            key = {"key": "k" * 32} if "key" in request.param else {}
            install_routes(app, GroupSeed(stack, **key).start().node)
        yield app


def make_worker(app: FastAPI, monkeypatch: pytest.MonkeyPatch, socket_path: str = "/nowhere/http") -> None:
    monkeypatch.setenv(several_workers.SOCKET_ENV, socket_path)
    monkeypatch.setitem(sys.modules, "sglang.srt.entrypoints.http_server", SimpleNamespace(app=FastAPI()))
    importlib.import_module("sglang_rfork.srt.entrypoints.http_worker").hand_on(app, socket_path)


def ask(app: FastAPI, path: str, *parts: Part, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """Status and reason of the answer to a POST whose body comes in `parts`; after those, nothing comes."""
    waiting, answer = list(parts), []

    async def receive() -> Part:
        if not waiting:
            await asyncio.Event().wait()
        return waiting.pop(0)

    async def send(message: Part) -> None:
        answer.append(message)

    named = [(name.encode(), value.encode()) for name, value in (headers or {}).items()]
    scope = {"type": "http", "method": "POST", "path": path, "query_string": b"", "headers": named}
    asyncio.run(asyncio.wait_for(app(scope, receive, send), SOON_S))
    return answer[0]["status"], json.loads(answer[1]["body"])["reason"]


def part(body: bytes, more: bool = True) -> Part:
    return {"type": "http.request", "body": body, "more_body": more}


@pytest.mark.parametrize("path", [INIT_PATH, SEND_PATH])
def test_a_body_that_is_too_long_is_a_413_whether_it_says_so_or_not(app: FastAPI, path: str) -> None:
    assert ask(app, path, headers={"content-length": str(len(LONG))}) == (413, "too_large")
    assert ask(app, path, part(LONG[:1000]), part(LONG)) == (413, "too_large")


def test_a_body_that_does_not_come_is_a_400(app: FastAPI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_DEADLINE_S", 0.05)
    assert ask(app, INIT_PATH, part(b"{")) == (400, "bad_request")


def test_a_body_that_breaks_off_is_no_crash(app: FastAPI) -> None:
    assert ask(app, INIT_PATH, part(b"{"), {"type": "http.disconnect"}) == (400, "bad_request")


@pytest.mark.parametrize("way", ["seed", "worker"])
@pytest.mark.parametrize(
    ("headers", "named"),
    [
        ({}, "this call came from 203.0.113.7"),
        ({"Rfork-Caller": "192.0.2.9"}, "this call came from 203.0.113.7"),
        ({"X-Forwarded-For": "192.0.2.9"}, "who called is not known"),
    ],
)
async def test_who_asks_for_a_group_is_whoever_called_sglangs_port(
    way: str, headers: dict[str, str], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through several HTTP workers too; what a header says of it is not believed."""
    app = FastAPI()
    with ExitStack() as stack:
        seed = GroupSeed(stack, stock_nccl_clients="on").serve()
        if way == "worker":
            stack.enter_context(several_workers.handed_on(installed_release(), seed.node, install_routes))
            make_worker(app, monkeypatch, os.environ[several_workers.SOCKET_ENV])
        else:
            install_routes(app, seed.node)
        transport = httpx.ASGITransport(app, client=("203.0.113.7", 4711))
        async with httpx.AsyncClient(transport=transport, base_url="http://seed", headers=headers) as http:
            body = {"master_address": "", "ports": "29500", "group_rank": 0, "world_size": 2, "backend": "nccl"}
            answer = await http.post(INIT_PATH, json=body)
    assert (answer.status_code, answer.json()["reason"]) == (403, "not_for_this_address")
    assert named in answer.json()["message"]


@pytest.mark.parametrize(("header", "encoding"), [("gzip", b"gzip"), ("gzip;q=0", None), ("identity", None)])
def test_a_table_is_packed_for_those_only_who_unpack_it(header: str, encoding: bytes | None) -> None:
    with ExitStack() as stack:
        seed = GroupSeed(stack, stock_nccl_clients="on").serve(stock_table=lambda: {"a": (4096, 64, 1)})
        app = FastAPI()
        install_routes(app, seed.node)
        until(lambda: seed.node.shard_of_rank(0))
        assert encoding_of(app, header) == encoding


def encoding_of(app: FastAPI, accepted: str) -> bytes | None:
    answer: list[Part] = []

    async def send(message: Part) -> None:
        answer.append(message)

    headers = [(b"accept-encoding", accepted.encode())]
    scope = {"type": "http", "method": "GET", "path": STOCK_PATHS[0], "query_string": b"rank=0", "headers": headers}
    receive: Callable[[], Any] = asyncio.Event().wait
    asyncio.run(app(scope, receive, send))
    assert answer[0]["status"] == 200, answer
    return dict(answer[0]["headers"]).get(b"content-encoding")


def test_workers_that_can_not_be_served_leave_no_folder_and_no_socket(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def install(app: Any, node: Any) -> None:
        raise RuntimeError("no routes")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = open_sockets()
    with ExitStack() as stack, pytest.raises(RuntimeError, match="no routes"):
        stack.enter_context(several_workers.handed_on(installed_release(), SimpleNamespace(), install))
    assert list(tmp_path.iterdir()) == []
    until(lambda: open_sockets() <= before)
