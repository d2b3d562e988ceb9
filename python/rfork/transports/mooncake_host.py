"""A Mooncake engine seen from outside, on its own host: ports, sockets, address texts, and the watchdog."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import socket
import struct
import sys
from collections.abc import Iterator

from rfork.errors import TransportError

_PORTS_PER_ENGINE = 2
_MOONCAKE_PORTS = 1024, 32767
"""It leaves the rest to the kernel. Another range is passed over with a line in its log."""
_ACCEPT_WAKES_EVERY_US = 5_000


def bare_host(host: str) -> str:
    """`[fd00::1]` → `fd00::1`; anything else unchanged."""
    return host[1:-1] if host.startswith("[") and host.endswith("]") else host


def bracketed(host: str) -> str:
    """`fd00::1` → `[fd00::1]`, as session ids want it."""
    return f"[{host}]" if ":" in host else host


def split_session_id(session_id: str) -> tuple[str, int]:
    """`host:port` or `[v6]:port` → host without brackets, port. Raises ValueError if it is neither."""
    host, separator, port = session_id.rpartition(":")
    if not separator or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ValueError(f"a session id is host:port, got {session_id!r}")
    if ":" in host and not (host.startswith("[") and host.endswith("]")):
        raise ValueError(f"an IPv6 session id is [address]:port, got {session_id!r}")
    return bare_host(host), int(port)


def require_free_ports(port_range: tuple[int, int]) -> None:
    """Raise TransportError unless the range has ports for one more engine: where none is left, Mooncake crashes."""
    free = 0
    for port in range(port_range[0], port_range[1] + 1):
        with socket.socket() as probe:
            try:
                probe.bind(("", port))
            except OSError:
                continue
            free += 1
            if free == _PORTS_PER_ENGINE:
                return
    raise TransportError(
        f"port_range {port_range[0]}-{port_range[1]} has {free} free ports left, a transfer engine takes "
        f"{_PORTS_PER_ENGINE}: widen it (one engine per shard and fabric serves, one more per shard pulls)"
    )


def own_sockets() -> Iterator[socket.socket]:
    """Every TCP socket of this process, as a duplicate that is closed when the next one is asked for."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            duplicate = os.dup(int(name))
        except OSError:
            continue  # closed since the folder was listed
        try:
            sock = socket.socket(fileno=duplicate)
        except OSError:
            os.close(duplicate)  # the number is a file's by now
            continue
        with sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6) and sock.type == socket.SOCK_STREAM:
                yield sock


def _listeners(port: int) -> Iterator[socket.socket]:
    for sock in own_sockets():
        with contextlib.suppress(OSError):
            if sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and sock.getsockname()[1] == port:
                yield sock


def listens(port: int) -> bool:
    """Whether this process listens on `port`."""
    return any(True for _ in _listeners(port))


def listener_problem(port: int, host: str, port_range: tuple[int, int] | None) -> str | None:
    """What is wrong with where a new engine listens, with the remedy; None if it is as asked.

    Mooncake reads these settings when its library is loaded, so one that something else loaded earlier ignores ours.
    """
    families = {sock.family for sock in _listeners(port)}
    if ":" in host and socket.AF_INET6 not in families:
        return (
            f"Mooncake was loaded in this process before R-Fork asked for IPv6, and listens on IPv4 only: "
            f"set MC_USE_IPV6=1 in the server's environment, or advertise an IPv4 address instead of {host}"
        )
    if ":" not in host and families == {socket.AF_INET6}:
        return (
            f"Mooncake listens on IPv6 only in this process (MC_USE_IPV6, or an IPv6 engine came first): "
            f"advertise an IPv6 address instead of {host}"
        )
    if port_range is None:
        return None
    first, last = port_range
    low, high = _MOONCAKE_PORTS
    if not first <= port <= last and not low <= first <= last <= high:
        return (
            f"Mooncake takes ports from {low} to {high} only: it passed over port_range {first}-{last}, "
            f"and took {port}. Choose a range in there"
        )
    if not first <= port <= last:
        return (
            f"Mooncake was loaded in this process before R-Fork asked for ports {first}-{last}, and took {port}: "
            f"set MC_MIN_RPC_PORT={first} and MC_MAX_RPC_PORT={last} in the server's environment"
        )
    return None


def hasten_listener(port: int) -> None:
    """Let the accept() of an engine that is about to be destroyed wake every 5 ms instead of every second.

    The destructor waits for it with the GIL held. The connection ends the wait that is under way.
    """
    for sock in _listeners(port):
        with contextlib.suppress(OSError):
            timeout = struct.pack("@ll", 0, _ACCEPT_WAKES_EVERY_US)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeout)
            loopback = "::1" if sock.family == socket.AF_INET6 else "127.0.0.1"
            socket.create_connection((loopback, port), timeout=0.2).close()


def cut_connections(session_id: str) -> None:
    """Shut down this process's connections to a peer that does not answer, so that the call which waits for it
    returns.
    """
    try:
        host, port = split_session_id(session_id)
        addresses = {str(info[4][0]) for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
    except (ValueError, OSError):
        return
    for sock in own_sockets():
        with contextlib.suppress(OSError):
            peer = sock.getpeername()
            if peer[1] == port and peer[0].removeprefix("::ffff:") in addresses:
                sock.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def exit_unless_quiet_after(timeout_s: float) -> Iterator[None]:
    """End the process, with the stacks of all threads, if the body takes longer, even while it holds the GIL.

    Memory that a stuck engine may still write to must not be used by anything: ending the process is all that is left.
    """
    armed = False
    with contextlib.suppress(ValueError, RuntimeError, OSError, AttributeError):  # no stderr: then without a watchdog
        faulthandler.dump_traceback_later(timeout_s, exit=True, file=sys.__stderr__ or sys.stderr)
        armed = True
    try:
        yield
    finally:
        if armed:
            faulthandler.cancel_dump_traceback_later()
