"""From an address that a user or the planner names to a seed: which instance answers there, and where its listener
is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from urllib.parse import urlsplit, urlunsplit

import msgspec

from rfork import wire
from rfork.auth import Signer
from rfork.client.calls import Caller, Headers, parse_json, refusal_of
from rfork.errors import SeedRefused, SeedUnreachable
from rfork.tls import Tls
from rfork.transports.addresses import is_loopback, is_own, is_wildcard
from rfork.transports.mooncake_host import bare_host, bracketed
from rfork.wire.seed import STATUS_PATH, StatusReply

MAX_STATUS_NBYTES = 16 << 20
"""A status has a report for each shard of each rank: about 1 KB."""


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A seed that answered. `address` is the URL it was asked at, `listener` where leases are to be had."""

    address: str
    instance_id: str
    listener: str
    state: str
    generation: int
    instance_key: str | None = None
    content: str | None = None


def seed_url(seed: str, port: int | None = None) -> str:
    """`host:port`, `[v6]:port`, a bare host with `port`, or an http(s) URL → `scheme://host:port`.

    Raises ValueError on anything else; a port must be given in one place.
    """
    text = seed.strip()
    if re.match(r"^[a-z]+://", text, re.IGNORECASE):
        parts = urlsplit(text)
        host, own_port = parts.hostname or "", parts.port
        scheme = parts.scheme.lower()
        if scheme not in ("http", "https") or parts.path not in ("", "/") or parts.query or parts.username:
            raise ValueError(f"an instance is host:port or http(s)://host:port, got {seed!r}")
    else:
        scheme = "http"
        host, own_port = _split(text)
    if not host or re.search(r"[\s/?#@\\]", host):
        raise ValueError(f"an instance is host:port, got {seed!r}")
    port = own_port if own_port is not None else port
    if port is None or not 0 < port < 65536:
        raise ValueError(f"an instance needs a port from 1 to 65535, got {seed!r}")
    return f"{scheme}://{bracketed(host)}:{port}"


def _split(text: str) -> tuple[str, int | None]:
    if text.startswith("["):
        host, closing, rest = text.partition("]")
        if not closing or (rest and not re.fullmatch(r":\d+", rest)):
            raise ValueError(f"an IPv6 address is [address]:port, got {text!r}")
        return bare_host(host + "]"), int(rest[1:]) if rest else None
    if text.count(":") > 1:
        return text, None
    host, colon, port = text.partition(":")
    if colon and not port.isdigit():
        raise ValueError(f"an instance is host:port, got {text!r}")
    return host, int(port) if colon else None


def resolve(
    seed: str,
    *,
    timeout_s: float,
    own_instance_ids: Collection[str] = (),
    tls: Tls | None = None,
    headers: Headers | None = None,
    signer: Signer | None = None,
) -> Candidate:
    """Ask who is at `seed` (as `seed_url` takes it). `headers` may carry the API key: the user typed this address.

    Raises SeedUnreachable where nobody answers in time or not in our protocol; SeedRefused where a stock SGLang answers
    (reason `stock_seed`), where it is this very process (`self`), where no leases are to be had (`no_listener`), and
    with the seed's own reason otherwise.
    """
    try:
        base = seed_url(seed)
    except ValueError as error:
        raise SeedUnreachable(str(error)) from error
    caller = Caller(base, tls=tls, headers=headers, signer=signer)
    try:
        answer = caller.call("GET", STATUS_PATH, timeout_s=timeout_s, limit=MAX_STATUS_NBYTES)
    finally:
        caller.close()
    if answer.status == 404:
        raise SeedRefused(
            f"{base} is not SGLang, or SGLang without R-Fork (404 on {STATUS_PATH})",
            reason="stock_seed",
        )
    if answer.status != 200:
        raise refusal_of(answer, f"status of {base}")
    status = parse_json(answer, StatusReply, f"status of {base}", limit=MAX_STATUS_NBYTES)
    if status.protocol_version < 1:
        raise SeedUnreachable(f"{base} speaks protocol {status.protocol_version}, here is {wire.PROTOCOL_VERSION}")
    if status.instance_id in own_instance_ids:
        raise SeedRefused(f"{base} is this instance itself ({status.instance_id})", reason="self")
    if status.ticket_wanted and status.listener is None:
        raise SeedRefused(
            f"{status.instance_id} at {base} belongs to a fleet with a key: set `key_file` (or `key`) here too",
            reason="unauthorized",
        )
    if status.listener is None:
        raise SeedRefused(
            f"{status.instance_id} at {base} gives no leases (state {status.state}): `seed: off`, or not published yet",
            reason="no_listener",
        )
    return Candidate(
        address=base,
        instance_id=status.instance_id,
        listener=reachable_listener(status.listener, base),
        state=status.state,
        generation=status.generation,
        instance_key=status.instance_key,
        content=status.content,
    )


def reachable_listener(listener: str, asked: str) -> str:
    """The listener's URL as seen from here: a wildcard address is replaced by the one that was asked.

    Raises SeedUnreachable if it is no URL, SeedRefused (`loopback`) if only the seed's own host can use it, and that is
    not this one.
    """
    try:
        parts, asked_host = urlsplit(listener), urlsplit(asked).hostname or ""
        host, port = parts.hostname or "", parts.port
    except ValueError as error:
        raise SeedUnreachable(f"{asked} names a listener that is no URL: {listener[:200]!r}") from error
    if parts.scheme not in ("http", "https") or not host or port is None or parts.username:
        raise SeedUnreachable(f"{asked} names a listener that is no URL: {listener[:200]!r}")
    if is_wildcard(host):
        host = asked_host
    elif is_loopback(host) and not (is_loopback(asked_host) or is_own(asked_host)):
        raise SeedRefused(
            f"the seed at {asked} listens on loopback ({host}), which other hosts can't reach: start it with `listen` "
            "or SGLang's --host on an address of its network",
            reason="loopback",
        )
    return urlunsplit((parts.scheme, f"{bracketed(host)}:{port}", parts.path.rstrip("/"), "", ""))
