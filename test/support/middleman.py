"""A middleman between a client and a real seed: it hands everything on, and changes what a test tells it to.

It stands for a hostile or broken network and for a seed that lies. What it was asked, with all headers, is kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple, Self

import httpx
import msgspec

from rfork import wire
from rfork.manifest import Manifest, encode_manifest
from rfork.wire.seed import LeaseReply, StatusReply
from support.server import HOST, Server

STATUS = "/rfork/v1/status"
LEASES = "/rfork/v1/leases"


class Asked(NamedTuple):
    method: str
    path: str
    headers: Mapping[str, str]


class Middleman:
    """`edits` maps the end of a path to a function of the answer's body; paths that end as `hang` says get none."""

    def __init__(self, seed: Server) -> None:
        self._seed = seed
        self.asked: list[Asked] = []
        self.edits: dict[str, Callable[[bytes], bytes]] = {}
        self.hang: set[str] = set()
        self._gone = threading.Event()
        self._http = httpx.Client(trust_env=False, timeout=30)
        self._listener = self._http.get(seed.url + STATUS).json()["listener"]
        middleman = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                middleman.asked.append(Asked(self.command, self.path, dict(self.headers)))
                if any(self.path.endswith(end) for end in middleman.hang):
                    middleman._gone.wait()
                    self.close_connection = True
                    return
                reply = middleman._hand_on(self.command, self.path, dict(self.headers), body)
                self.send_response(reply.status_code)
                data = middleman._edited(self.path, reply.content) if reply.status_code < 300 else reply.content
                if (after := reply.headers.get("retry-after")) is not None:
                    self.send_header("Retry-After", after)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer((HOST, 0), Handler)
        self._server.daemon_threads = True
        self.port: int = self._server.server_address[1]
        self.url = f"http://{HOST}:{self.port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def _hand_on(self, method: str, path: str, headers: dict[str, str], body: bytes) -> httpx.Response:
        base = self._seed.url if path == STATUS else self._listener
        kept = {k: v for k, v in headers.items() if k.lower() in ("authorization", "content-type")}
        return self._http.request(method, base + path, headers=kept, content=body or None)

    def _edited(self, path: str, body: bytes) -> bytes:
        if path == STATUS:
            status = wire.decode(body, StatusReply, limit=1 << 20)
            body = wire.encode(msgspec.structs.replace(status, listener=self.url))
        for end, edit in self.edits.items():
            if path.endswith(end):
                body = edit(body)
        return body

    def lie_about_the_manifest(self, change: Callable[[Manifest], Manifest]) -> None:
        """Pass another manifest off as the seed's, consistently: in the lease, its binding and the manifest itself."""
        made: dict[str, Manifest] = {}

        def lease(body: bytes) -> bytes:
            reply = wire.decode(body, LeaseReply, limit=1 << 20)
            true = msgspec.msgpack.decode(self._http.get(self._listener + reply.manifest_path).content, type=Manifest)
            made[reply.manifest_path] = change(true)
            digest = made[reply.manifest_path].digest
            binding = msgspec.structs.replace(reply.binding, manifest_digest=digest)
            return wire.encode(msgspec.structs.replace(reply, manifest_digest=digest, binding=binding))

        self.edits[LEASES] = lease
        self.edits["/manifest"] = lambda body: encode_manifest(next(iter(made.values())))

    def close(self) -> None:
        self._gone.set()
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
        self._http.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()
