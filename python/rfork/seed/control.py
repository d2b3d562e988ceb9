"""The control connection: ranks of one node talk to its main process over a Unix socket that only they share.

The socket's name is abstract (unix(7)): it is no file, so that a server that is killed leaves none behind. Such a name
has no mode; both ends look at the other's user id instead.

A frame is a 4-byte big-endian length and a MessagePack body (`rfork.wire.control`). Messages of one rank arrive in the
order sent. A frame that is too long or does not parse ends its connection, never the process.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import queue
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, Generic, TypeVar

import msgspec

from rfork.errors import TransportError
from rfork.wire import MAX_BLOB_NBYTES
from rfork.wire.collective import GroupOrder
from rfork.wire.control import Answer, Ask, Hello, NodeMessage, RankMessage

logger = logging.getLogger(__name__)

SEND_TIMEOUT_S = 60
CLOSE_TIMEOUT_S = 2.0
ACCEPT_AGAIN_S = 1.0
"""After the process had no descriptor or thread left for a rank."""

MAX_WAITING = 256
"""Messages of a rank that its main process has not taken yet; more means that it never will."""

GONE = "the rank is gone"

_LENGTH = struct.Struct("!I")
_CREDENTIALS = struct.Struct("3i")
T = TypeVar("T")


class ControlLost(TransportError):
    """The other process is gone, or sent what is no frame. Consequence: this connection is not used again."""


class Channel(Generic[T]):
    """One connected socket that carries whole messages. Any thread may send; one thread receives."""

    def __init__(self, sock: socket.socket, kind: Any, *, limit: int = MAX_BLOB_NBYTES) -> None:
        self._socket = sock
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._limit = limit
        self._sending = threading.Lock()

    def send(self, message: object) -> None:
        """Raises ControlLost if the peer is gone, ValueError if the message is too large for any peer."""
        body = msgspec.msgpack.encode(message)
        if len(body) > self._limit:
            raise ValueError(f"a control message of {len(body)} bytes exceeds {self._limit}")
        with self._sending:
            try:
                self._socket.sendall(_LENGTH.pack(len(body)))
                self._socket.sendall(body)
            except OSError as error:
                self._shut()  # part of a frame may be on its way: nothing can follow it
                raise ControlLost(f"control connection lost while sending: {error}") from error

    def receive(self) -> T | None:
        """The next message, None at a clean end. Raises ControlLost otherwise."""
        head = self._read(_LENGTH.size, at_start=True)
        if head is None:
            return None
        (nbytes,) = _LENGTH.unpack(head)
        if nbytes > self._limit:
            raise ControlLost(f"control frame of {nbytes} bytes exceeds {self._limit}")
        body = self._read(nbytes)
        try:
            return self._decoder.decode(body or b"")
        except (msgspec.MsgspecError, ValueError) as error:
            raise ControlLost(f"control frame does not parse: {error}") from error

    def _read(self, nbytes: int, *, at_start: bool = False) -> bytearray | None:
        # Grown as it comes: a length alone must not make us reserve half a gigabyte.
        data = bytearray()
        while len(data) < nbytes:
            try:
                part = self._socket.recv(min(nbytes - len(data), 1 << 20))
            except OSError as error:
                raise ControlLost(f"control connection lost: {error}") from error
            if not part:
                if at_start and not data:
                    return None
                raise ControlLost("control connection ended inside a frame")
            data += part
        return data

    def close(self) -> None:
        self._shut()
        self._socket.close()

    def _shut(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def abandon(self) -> None:
        """Let go of a descriptor that a fork copied, without ending the connection for the parent."""
        self._socket.close()


class RankPeer:
    """A rank as its node's main process sees it, from its Hello on."""

    def __init__(self, hello: Hello, channel: Channel[RankMessage]) -> None:
        self.hello = hello
        self._channel = channel
        self._ids = itertools.count(1)
        self._waiting: dict[int, Future[Answer]] = {}
        self._lock = threading.Lock()
        self._gone = False

    def ask(self, verb: str, timeout_s: float, *, order: GroupOrder | None = None, group: str = "") -> Answer:
        """Ask and wait. A dead or silent rank answers `ok=False` with the reason; nothing is raised."""
        number, future = next(self._ids), Future[Answer]()
        with self._lock:
            if self._gone:
                return Answer(number, False, GONE)
            self._waiting[number] = future
        try:
            self._channel.send(Ask(number, verb, order, group))
            return future.result(timeout=timeout_s)
        except (FutureTimeout, TimeoutError):
            return Answer(number, False, f"no answer to {verb} within {timeout_s:g} s")
        except ControlLost:
            return Answer(number, False, GONE)
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def tell(self, verb: str) -> None:
        """Say what needs no answer, from any thread; the one that comes is dropped."""
        with contextlib.suppress(ControlLost):
            self._channel.send(Ask(next(self._ids), verb))

    def answered(self, answer: Answer) -> None:
        with self._lock:
            future = self._waiting.pop(answer.id, None)
        if future is not None:  # None: asked too long ago
            future.set_result(answer)

    def lost(self) -> None:
        with self._lock:
            self._gone = True
            waiting, self._waiting = self._waiting, {}
        for number, future in waiting.items():
            future.set_result(Answer(number, False, GONE))

    def __repr__(self) -> str:
        return f"<RankPeer rank={self.hello.rank} replica={self.hello.replica} pid={self.hello.pid}>"


class ControlServer:
    """Listens in the main process.

    `on_message` and `on_gone` run in the thread of the rank's connection, one message at a time. `ask` is not for
    there: that thread is the one that takes the answers.
    """

    def __init__(
        self,
        on_message: Callable[[RankPeer, RankMessage], None],
        on_gone: Callable[[RankPeer], None],
    ) -> None:
        self._on_message = on_message
        self._on_gone = on_gone
        self.name = f"@rfork-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(_abstract(self.name))
        self._socket.listen(128)
        self._channels: set[Channel[RankMessage]] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="rfork-control", daemon=True)
        self._thread.start()
        # A forked child must not hold our ends of these sockets: ranks learn of our death by their end of file.
        os.register_at_fork(after_in_child=self._in_forked_child)

    def close(self) -> None:
        """End every connection and give the socket's name up. Idempotent."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            channels = list(self._channels)
        self._closing.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        for channel in channels:
            channel.close()
        self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _in_forked_child(self) -> None:
        self._closed = True
        self._socket.close()
        for channel in self._channels:
            channel.abandon()

    def _accept(self) -> None:
        while not self._closed:
            try:
                self._take(self._socket.accept()[0])
            except (OSError, RuntimeError) as error:
                if not self._closed:
                    logger.warning("rfork: a rank can't be heard yet: %s; trying again", error)
                    self._closing.wait(ACCEPT_AGAIN_S)

    def _take(self, sock: socket.socket) -> None:
        try:
            if _peer_uid(sock) != os.geteuid():
                logger.warning("rfork: a process of another user tried the control socket; refused")
                sock.close()
                return
            _bound_sending(sock)
            threading.Thread(target=self._serve, args=(sock,), name="rfork-control-rank", daemon=True).start()
        except BaseException:
            sock.close()
            raise

    def _serve(self, sock: socket.socket) -> None:
        channel = Channel[RankMessage](sock, RankMessage)
        with self._lock:
            if self._closed:
                channel.close()
                return
            self._channels.add(channel)
        peer: RankPeer | None = None
        try:
            hello = channel.receive()
            if not isinstance(hello, Hello):
                return
            peer = RankPeer(hello, channel)
            self._on_message(peer, hello)
            while (message := channel.receive()) is not None:
                if isinstance(message, Answer):
                    peer.answered(message)
                else:
                    self._on_message(peer, message)
        except ControlLost as error:
            if not self._closed:
                logger.warning("rfork: %s (%s)", error, peer)
        except Exception:
            logger.exception("rfork: the node could not take a message of %s; it is treated as gone", peer)
        finally:
            with self._lock:
                self._channels.discard(channel)
            channel.close()
            if peer is not None:
                peer.lost()
                self._on_gone(peer)


class ControlClient:
    """A rank's end. `on_ask` runs in this client's thread and returns the answer; `on_lost` runs there at the end."""

    def __init__(
        self,
        name: str,
        hello: Hello,
        on_ask: Callable[[Ask], Answer],
        on_lost: Callable[[], None],
        *,
        timeout_s: float = 10.0,
    ) -> None:
        """Connect and say hello. Raises TransportError if the main process can't be reached."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(timeout_s)
            sock.connect(_abstract(name))
            if _peer_uid(sock) != os.geteuid():
                raise PermissionError("another user listens there")
            sock.settimeout(None)
            _bound_sending(sock)
        except OSError as error:
            sock.close()
            raise TransportError(f"can't reach this node's main process at {name}: {error}") from error
        self._channel = Channel[NodeMessage](sock, NodeMessage)
        self._outgoing: queue.Queue[object] = queue.Queue(maxsize=MAX_WAITING)
        self._on_ask = on_ask
        self._on_lost = on_lost
        self._closing = False
        self.lost = threading.Event()
        try:
            self._channel.send(hello)
        except BaseException:
            self._channel.close()
            raise
        self._sender = threading.Thread(target=self._send_all, name="rfork-control-sender", daemon=True)
        self._thread = threading.Thread(target=self._run, name="rfork-control-client", daemon=True)
        self._sender.start()
        self._thread.start()

    def send(self, message: object) -> bool:
        """Never waits: another thread sends, in order. False if the main process is gone or has stopped listening."""
        if self.lost.is_set() or self._closing:
            return False
        try:
            self._outgoing.put_nowait(message)
        except queue.Full:
            self._channel.close()
            return False
        return True

    def close(self) -> None:
        """Send what waits, for a moment, and leave."""
        self._closing = True
        with contextlib.suppress(queue.Full):
            self._outgoing.put_nowait(None)
        me = threading.current_thread()
        if me is not self._sender:
            self._sender.join(timeout=CLOSE_TIMEOUT_S)
        self._channel.close()
        if me is not self._thread:
            self._thread.join(timeout=CLOSE_TIMEOUT_S)

    def _send_all(self) -> None:
        try:
            while (message := self._outgoing.get()) is not None:
                self._channel.send(message)
        except (ControlLost, ValueError) as error:
            logger.debug("rfork: %s", error)
            self._channel.close()

    def _run(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._channel.send(self._answer(message))
        except ControlLost as error:
            logger.debug("rfork: %s", error)
        finally:
            self.lost.set()
            with contextlib.suppress(queue.Full):
                self._outgoing.put_nowait(None)
            if not self._closing:
                self._on_lost()

    def _answer(self, ask: Ask) -> Answer:
        try:
            return self._on_ask(ask)
        except Exception as error:
            logger.exception("rfork: this rank could not answer %s", ask.verb)
            return Answer(ask.id, False, f"{type(error).__name__}: {error}")


def _abstract(name: str) -> str:
    """`@…`, as the system's own tools write it and as it fits into a variable, as the kernel wants it."""
    return "\0" + name.removeprefix("@")


def _bound_sending(sock: socket.socket) -> None:
    """A process that is stopped, and takes nothing any more, must not stop the other end for good."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", SEND_TIMEOUT_S, 0))


def _peer_uid(sock: socket.socket) -> int:
    _pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return int(uid)
