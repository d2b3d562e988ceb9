"""A seed's listener as far as its status: enough to be found from a list."""

from __future__ import annotations

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from rfork import wire
from rfork.wire.seed import StatusReply


class Stage:
    """Serves the status of a seed with that id and key on a free port."""

    def __init__(self, instance_id: str, key: str) -> None:
        stage = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = StatusReply(
                    version="0", protocol_version=1, instance_id=instance_id, state="serving", generation=2,
                    listener=stage.url, instance_key=key,
                )  # fmt: skip
                body = wire.encode(status)
                self.send_response(200)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
