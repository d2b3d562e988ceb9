"""One HTTP call to another instance: a deadline for all of it, a bound on the answer, and errors that say whose
fault.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

import httpx
import msgspec

from rfork import wire
from rfork.auth import ANY_SEED, PROOF_HEADER, Signer, Unproven
from rfork.errors import SeedError, SeedRefused, SeedUnproven, SeedUnreachable
from rfork.tls import Tls
from rfork.wire.seed import Refusal

MAX_REFUSAL_NBYTES = 1 << 20
_CONNECT_TIMEOUT_S = 5.0
_REASON_OF_STATUS = {401: "unauthorized", 403: "unauthorized", 421: "other_instance", 429: "busy", 503: "not_ready"}

Headers = Callable[[str, str, bytes], Mapping[str, str]]
"""(method, path, body) → headers to add: where SGLang's API keys come in."""

T = TypeVar("T")


def bearer(api_key: str) -> Headers:
    """What opens SGLang's control end-points; for an address that the user typed."""
    return lambda method, path, body: {"Authorization": f"Bearer {api_key}"}


class Reply(NamedTuple):
    """A complete answer. `retry_after_s`: its Retry-After, if that is a number; `proof`: its proof of the fleet key."""

    status: int
    body: bytes
    retry_after_s: float | None
    proof: str = ""


class Caller:
    """Calls one base URL over one kept connection. Not thread-safe: each thread has its own.

    Where the fleet has a key, `signer` proves it to `audience`, and only answers that prove it count. Proxy variables
    of the environment are not followed: instances talk to each other directly.
    """

    def __init__(
        self,
        base_url: str,
        *,
        tls: Tls | None = None,
        headers: Headers | None = None,
        signer: Signer | None = None,
        audience: str = ANY_SEED,
    ) -> None:
        tls = tls or Tls()
        self.base_url = base_url.rstrip("/")
        self._headers = headers
        self._signer, self._audience = signer, audience
        self._extensions: dict[str, Any] = {"trace": self._trace, **tls.extensions()}
        verify: ssl.SSLContext | bool = tls.context() if self.base_url.startswith("https://") else False
        self._http = httpx.Client(trust_env=False, verify=verify, follow_redirects=False)
        self._lock = threading.Lock()
        self._late: threading.Event | None = None  # of the call that is running
        self._socket: socket.socket | None = None

    def call(self, method: str, path: str, *, timeout_s: float, limit: int, body: bytes = b"") -> Reply:
        """The whole answer within `timeout_s`, `limit` bytes at most once unpacked. Raises SeedUnreachable
        otherwise, and SeedUnproven where the fleet has a key and the answer does not prove it.
        """
        where = f"{method} {self.base_url}{path}"
        late = threading.Event()
        with self._lock:
            self._late = late
        timer = threading.Timer(timeout_s, self._cut, (late,))
        timer.daemon = True
        timer.start()
        try:
            if self._signer is None:
                return self._call(method, path, timeout_s, limit, body, {})
            return self._signer.ask(
                self._audience, method, path, body, lambda t: self._call(method, path, timeout_s, limit, body, t),
                to=self.base_url,
            )  # fmt: skip
        except Unproven as error:
            if error.status == 401:
                raise SeedRefused(f"{where}: {error}", reason="unauthorized") from None
            raise SeedUnproven(f"{where}: {error}") from None
        except httpx.HTTPError as error:
            if late.is_set() or isinstance(error, httpx.TimeoutException):
                raise SeedUnreachable(f"{where}: no complete answer within {timeout_s:g} s") from error
            raise SeedUnreachable(f"{where}: {error or type(error).__name__}") from error
        except (httpx.InvalidURL, UnicodeError, ValueError) as error:
            raise SeedUnreachable(f"{where}: {error}") from error
        finally:
            timer.cancel()
            with self._lock:
                self._late = None

    def _call(
        self, method: str, path: str, timeout_s: float, limit: int, body: bytes, ticket: Mapping[str, str]
    ) -> Reply:
        added = self._headers(method, path, body) if self._headers else {}
        headers = {"Accept-Encoding": "gzip", **added, **ticket}
        if body:
            headers["Content-Type"] = "application/json"
        with self._http.stream(
            method,
            self.base_url + path,
            content=body or None,
            headers=headers,
            timeout=httpx.Timeout(timeout_s, connect=min(timeout_s, _CONNECT_TIMEOUT_S)),
            extensions=self._extensions,
        ) as response:
            data = bytearray()
            for chunk in response.iter_bytes():
                data += chunk
                if len(data) > limit:
                    raise ValueError(f"the answer exceeds {limit} bytes")
            after = response.headers.get("retry-after", "")
            return Reply(
                response.status_code,
                bytes(data),
                float(after) if after.isdigit() else None,
                response.headers.get(PROOF_HEADER, ""),
            )

    def _trace(self, event: str, info: Mapping[str, Any]) -> None:
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            with self._lock:
                self._socket = info["return_value"].get_extra_info("socket")
                if self._late is not None and self._late.is_set():  # while the name was looked up, say
                    self._shut()

    def _cut(self, late: threading.Event) -> None:
        with self._lock:
            if self._late is late:  # else that call ended just now, and the socket is the next one's
                late.set()
                self._shut()

    def _shut(self) -> None:
        if self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._http.close()


def refusal_of(reply: Reply, where: str) -> SeedError:
    """What an answer that is no success means: SeedRefused with the seed's reason, or SeedUnreachable."""
    try:
        refusal = wire.decode(reply.body, Refusal, limit=MAX_REFUSAL_NBYTES)
    except (ValueError, RecursionError):
        reason = _REASON_OF_STATUS.get(reply.status)
        if reason is None:
            return SeedUnreachable(f"{where}: status {reply.status}, which is not R-Fork's protocol")
        message = f"{where}: status {reply.status} without a reason"
        return SeedRefused(message, reason=reason, retry_after_s=reply.retry_after_s)
    retry_after_s = refusal.retry_after_s if refusal.retry_after_s is not None else reply.retry_after_s
    return SeedRefused(
        f"{where}: {refusal.message} ({refusal.reason})",
        reason=refusal.reason,
        differing=refusal.differing,
        retry_after_s=retry_after_s,
        listener=refusal.listener if refusal.reason == "other_node" else None,
    )


def parse_json(reply: Reply, kind: type[T], where: str, *, limit: int = wire.MAX_JSON_NBYTES) -> T:
    """The body as `kind`. Raises SeedUnreachable if it is not that."""
    try:
        return wire.decode(reply.body, kind, limit=limit)
    except (ValueError, RecursionError) as error:
        raise SeedUnreachable(f"{where}: not R-Fork's protocol: {error}") from error


def parse_msgpack(reply: Reply, kind: type[T], where: str) -> T:
    """The body as `kind`. Raises SeedUnreachable if it is not that."""
    try:
        return msgspec.msgpack.decode(reply.body, type=kind)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise SeedUnreachable(f"{where}: not R-Fork's protocol: {error}") from error
