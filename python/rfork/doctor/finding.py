"""What a probe found."""

from __future__ import annotations

import enum

import msgspec


class Level(enum.Enum):
    """`WARN` does not keep anybody from forking; `FAIL` does, or makes it wrong."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(msgspec.Struct, frozen=True):
    """One line of the checklist. `remedy` says what to do; empty where there is nothing to do."""

    level: Level
    subject: str
    text: str
    remedy: str = ""


def ok(subject: str, text: str) -> Finding:
    return Finding(Level.OK, subject, text)


def warn(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.WARN, subject, text, remedy)


def fail(subject: str, text: str, remedy: str) -> Finding:
    return Finding(Level.FAIL, subject, text, remedy)
