"""How each kind of setting is written.

A parser takes a JSON value, or the text of a variable, and raises Invalid: what it expected.
"""

from __future__ import annotations

import ipaddress
import json
import math
import re
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from rfork.identity import Content

MAX_PORT = 65_535
_SHOWN = 60
_HOST = re.compile(r"^[A-Za-z0-9_]([A-Za-z0-9_.\-]*[A-Za-z0-9_])?\.?$|^[0-9A-Fa-f:.]+(%\w+)?$")


class Invalid(ValueError):
    """The value does not fit; the message completes "expected …"."""


def shown(value: object) -> str:
    """A value as a user wrote it, in one short line."""
    text = without_password(json.dumps(value, default=str))
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}… ({type(value).__name__})"


def without_password(text: str) -> str:
    """Addresses as they may be shown: without what stands before an `@`, wherever a password ends."""
    head, at, tail = text.rpartition("@")
    scheme = re.match(r"\W*([\w+]+://)?", head)
    return f"{scheme.group() if scheme else ''}***@{tail}" if at else text


def _text(value: object, expected: str) -> str:
    if not isinstance(value, str) or not value.strip() or "\n" in value:
        raise Invalid(expected)
    return value.strip()


def one_of(*choices: str) -> Callable[[object], str]:
    expected = f"{', '.join(choices[:-1])} or {choices[-1]}"

    def parse(value: object) -> str:
        text = _text(value, expected)
        if text not in choices:
            raise Invalid(expected)
        return text

    return parse


def number(low: float, high: float, *, unit: str = "") -> Callable[[object], float]:
    expected = f"a number{unit} from {low:g} to {high:g}"

    def parse(value: object) -> float:
        # bool is an int to Python; `true` seconds is a mistake.
        if isinstance(value, bool) or not isinstance(value, int | float | str):
            raise Invalid(expected)
        try:
            found = float(value)
        except (ValueError, OverflowError):
            raise Invalid(expected) from None
        if not math.isfinite(found) or not low <= found <= high:
            raise Invalid(expected)
        return found

    return parse


def seconds(low: float = 0.1, high: float = 86_400) -> Callable[[object], float]:
    return number(low, high, unit=" of seconds")


def integer(low: int, high: int) -> Callable[[object], int]:
    expected = f"an integer from {low} to {high}"

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"[0-9]{1,18}", value):
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise Invalid(expected)
        return value

    return parse


def url(value: object) -> str:
    expected = "a URL such as http://planner:7700"
    text = _text(value, expected)
    try:
        parts = urlsplit(text)
        fits = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fits = False
    if not fits:
        raise Invalid(expected)
    return text.rstrip("/")


def urls(value: object) -> str:
    """One URL or several, which are kept in one text with commas between them."""
    expected = 'a URL such as http://planner:7700, or several: "http://a:7700,http://b:7700" or a list'
    try:
        given = [url(text) for text in _list(value, expected)]
        if any("," in text for text in given):  # in a password it is written %2C
            raise Invalid(expected)
        return ",".join(given)
    except Invalid:
        raise Invalid(expected) from None


def host(value: object) -> str:
    expected = "a host name or address"
    text = _text(value, expected).removeprefix("[").removesuffix("]")
    if not _HOST.match(text):
        raise Invalid(expected)
    return text


def host_port(text: str, expected: str) -> tuple[str, int]:
    """Split `host:port` or `[address]:port`."""
    name, colon, port = text.rpartition(":")
    if not colon or not name or (":" in name and not (name.startswith("[") and name.endswith("]"))):
        raise Invalid(expected)
    try:
        return host(name), integer(1, MAX_PORT)(port)
    except Invalid:
        raise Invalid(expected) from None


def seeds(value: object) -> tuple[str, ...]:
    expected = 'a list of host:port, such as ["10.0.0.7:30000", "https://10.0.0.8:30000", "dns+seeds.svc:30000"]'
    for text in (found := _list(value, expected)):
        host_port(text.removeprefix("dns+").removeprefix("https://"), expected)
    return tuple(found)


def _list(value: object, expected: str) -> list[str]:
    if isinstance(value, str):
        is_json = value.lstrip().startswith("[")
        value = _json(value, expected) if is_json else [t.strip() for t in value.rstrip(", ").split(",")]
    if not isinstance(value, list) or not value or not all(isinstance(t, str) and t for t in value):
        raise Invalid(expected)
    return value


def _json(text: str, expected: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise Invalid(expected) from None


def networks(value: object) -> tuple[str, ...]:
    expected = 'addresses or networks such as ["192.0.2.7", "2001:db8::/64"], without host bits, zones and mapped IPv4'
    try:
        found = [ipaddress.ip_network(text) for text in _list(value, expected)]
    except ValueError:
        raise Invalid(expected) from None
    # A peer's address is looked up without its zone, and as IPv4 if it maps that.
    if any("%" in str(network) or getattr(network.network_address, "ipv4_mapped", None) for network in found):
        raise Invalid(expected)
    return tuple(map(str, found))


def listen(value: object) -> tuple[str | None, int]:
    expected = "host:port, :port or a port"
    if isinstance(value, int) and not isinstance(value, bool):
        value = str(value)
    text = _text(value, expected)
    name, _, port = text.rpartition(":")
    if ":" in name and not name.startswith("["):
        raise Invalid(expected)
    try:
        return (host(name) if name else None), integer(0, MAX_PORT)(port)
    except Invalid:
        raise Invalid(expected) from None


def port_range(value: object) -> tuple[int, int]:
    expected = f"two ports from 1 to {MAX_PORT}, low-high"
    parts = value.split("-") if isinstance(value, str) else value
    if not isinstance(parts, list) or len(parts) != 2:
        raise Invalid(expected)
    try:
        low, high = (integer(1, MAX_PORT)(p.strip() if isinstance(p, str) else p) for p in parts)
    except Invalid:
        raise Invalid(expected) from None
    if low > high:
        raise Invalid(expected)
    return low, high


def content(value: object) -> Content:
    expected = "checkpoint:<id>"
    text = _text(value, expected)
    try:
        found = Content.parse(text)
    except ValueError:
        raise Invalid(expected) from None
    if found.kind != "checkpoint":
        raise Invalid(expected)
    return found


def load_format(value: object) -> str:
    expected = "auto, never or a load format such as safetensors"
    text = _text(value, expected)
    if not re.fullmatch(r"[a-z][a-z0-9_]*", text) or text == "remote_instance":
        raise Invalid(expected)
    return text


def device_map(value: object) -> str | dict[str, str]:
    expected = 'device names, such as "mlx5_0", or one for each device index, such as {"0": "mlx5_0"}'
    if isinstance(value, str) and not value.lstrip().startswith("{"):
        return _text(value, expected)
    found = _map(value, expected)
    if not all(k.isdigit() for k in found):
        raise Invalid(expected)
    return found


def text_map(value: object) -> dict[str, str]:
    return _map(value, 'names with texts, such as {"zone": "a"} or zone=a,fabric=b')


def _map(value: object, expected: str) -> dict[str, str]:
    if isinstance(value, str):
        if value.lstrip().startswith("{"):
            value = _json(value, expected)
        else:
            pairs = [p.partition("=") for p in value.split(",")]
            value = {k.strip(): v.strip() for k, _, v in pairs}
    if not isinstance(value, dict) or not all(isinstance(v, str) and v and k for k, v in value.items()):
        raise Invalid(expected)
    return value


def path(value: object) -> str:
    return _text(value, "a path")


def secret(value: object) -> str:
    text = _text(value, "a key of at least 16 characters")
    if len(text) < 16:
        raise Invalid("a key of at least 16 characters")
    return text
