"""The fleet key: read from a file or the environment, read again when the file changes, shown nowhere."""

from __future__ import annotations

import functools
import logging
import os
import stat
import threading
from pathlib import Path

from rfork.errors import ConfigError

logger = logging.getLogger(__name__)

MIN_NCHARS = 16
MAX_FILE_NBYTES = 4096
Stamp = tuple[int, int, int]


class KeyRing:
    """The current key and, while both are in the file, the previous one. Thread-safe; `repr` shows neither."""

    def __init__(self, key: str | None = None, path: str | None = None) -> None:
        """One of the two. Raises ConfigError where a file can't be read or holds no key."""
        self._path = Path(path) if path is not None else None
        self._lock = threading.Lock()
        self._stamp: Stamp | None = None
        self._problem = ""
        self._keys: tuple[bytes, ...] = (key.encode(),) if key is not None else ()
        if self._path is not None:
            self._stamp, self._keys = _stamp(self._path), _read(self._path)
            _warn_of_mode(self._path)

    def all(self) -> tuple[bytes, ...]:
        """The current key first. A file that has changed is read again; one that is unsound now keeps the old keys."""
        if self._path is not None:
            with self._lock:
                self._look_again(self._path)
        return self._keys

    def _look_again(self, path: Path) -> None:
        try:
            stamp = _stamp(path)
            if stamp == self._stamp:
                return
            self._keys, self._stamp, self._problem = _read(path), stamp, ""
            logger.info("rfork: the fleet key was read again, %d keys are taken", len(self._keys))
        except ConfigError as error:
            if str(error) != self._problem:
                self._problem = str(error)
                logger.warning("rfork: %s; the keys read before stay", error)

    def __repr__(self) -> str:
        return f"<KeyRing of {self._path or 'the environment'}, {len(self._keys)} keys>"


@functools.cache
def keyring(key: str | None, key_file: str | None) -> KeyRing | None:
    """The key ring of these settings, the same one each time; None where the fleet has no key. Raises ConfigError."""
    return KeyRing(key, key_file) if key or key_file else None


def _stamp(path: Path) -> Stamp:
    try:
        found = path.stat()
    except OSError as error:
        raise ConfigError(f"key_file: can't read {path}: {error.strerror}") from None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _read(path: Path) -> tuple[bytes, ...]:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_NBYTES + 1)
    except OSError as error:
        raise ConfigError(f"key_file: can't read {path}: {error.strerror}") from None
    lines = [line.strip() for line in data.splitlines()]
    keys = tuple(line for line in lines if line and not line.startswith(b"#"))
    if len(data) > MAX_FILE_NBYTES or not 1 <= len(keys) <= 2 or min(map(len, keys)) < MIN_NCHARS:
        raise ConfigError(
            f"key_file: expected in {path} the current key and at most the previous one, a line each, of at least "
            f"{MIN_NCHARS} characters; got {len(keys)} lines"
        )
    return keys


def _warn_of_mode(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & (stat.S_IRWXO | stat.S_IWGRP) and os.name == "posix":
        logger.warning("rfork: key_file %s can be read by others on this host (mode %04o): chmod 600 it", path, mode)
