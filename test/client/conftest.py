"""A listener on a stage: what it answers, a test says."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from rfork import wire
from rfork.wire.seed import LeaseReply, Refusal


class Server(ThreadingHTTPServer):
    def handle_error(self, request: object, client_address: object) -> None:
        """A client that hangs up is what some tests are about: no word of it in their output."""


class Stage:
    """A listener whose answers a test sets: path suffix → (status, body). What was asked is kept."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, str], tuple[int, bytes]] = {}
        self.asked: list[tuple[str, str]] = []
        self.renewed = threading.Event()
        stage = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                self.rfile.read(int(self.headers.get("content-length", 0)))
                stage.asked.append((self.command, self.path))
                if self.path.endswith("/renew"):
                    stage.renewed.set()
                status, body = stage.answers.get((self.command, self.path), (404, b"{}"))
                self.send_response(status)
                if body and "gzip" in self.headers.get("accept-encoding", ""):
                    body = gzip.compress(body, 1)
                    self.send_header("Content-Encoding", "gzip")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            do_GET = do_POST = do_DELETE = answer

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = Server(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def grant(self, reply: LeaseReply) -> None:
        self.answers["POST", "/rfork/v1/leases"] = (201, wire.encode(reply))
        self.answers["POST", f"/rfork/v1/leases/{reply.lease}/renew"] = (200, b"{}")
        self.answers["DELETE", f"/rfork/v1/leases/{reply.lease}"] = (204, b"")

    def refuse(self, method: str, path: str, status: int, refusal: Refusal) -> None:
        self.answers[method, path] = (status, wire.encode(refusal))

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture
def stage() -> Iterator[Stage]:
    stage = Stage()
    yield stage
    stage.close()
