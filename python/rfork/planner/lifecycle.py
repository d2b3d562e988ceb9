"""What an instance may say next, as a table, and the errors that say whose fault it is."""

from __future__ import annotations

from collections.abc import Iterable

from rfork.wire.planner import InstanceState

_S = InstanceState

FOLLOWS: dict[InstanceState, frozenset[InstanceState]] = {
    _S.STARTING: frozenset({_S.STARTING, _S.SERVING, _S.PAUSED, _S.DRAINING, _S.STOPPED}),
    _S.SERVING: frozenset({_S.SERVING, _S.PAUSED, _S.DRAINING, _S.STOPPED}),
    _S.PAUSED: frozenset({_S.PAUSED, _S.SERVING, _S.DRAINING, _S.STOPPED}),
    _S.DRAINING: frozenset({_S.DRAINING, _S.STOPPED}),
    _S.STOPPED: frozenset(),
}


class PlannerError(Exception):
    """The planner refuses; nothing changed. `status` is the HTTP status, `code` the stable word."""

    status = 400
    code = "bad_request"

    def __init__(self, message: str, story: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.story = tuple(story)


class BadRequest(PlannerError):
    """The sender's fault: not what the protocol says."""


class NotUnderstood(PlannerError):
    """The sender requires what this planner does not know. Consequence: it does without the planner."""

    status, code = 422, "not_understood"


class TooLarge(PlannerError):
    """A body over the bound."""

    status, code = 413, "too_large"


class Unauthorized(PlannerError):
    """No ticket, or not one of this fleet."""

    status, code = 401, "unauthorized"


class UnknownInstance(PlannerError):
    """Nobody of that id is registered."""

    status, code = 404, "unknown_instance"


class IllegalTransition(PlannerError):
    """An instance said what its state does not allow. The sender's bug; the story is its entry's."""

    status, code = 409, "illegal_transition"


class InstanceGone(PlannerError):
    """That instance id was withdrawn or replaced; an id lives once. Consequence: register under a new id."""

    status, code = 410, "gone"


class PlannerFull(PlannerError):
    """A bound of this planner is reached. Consequence: the sender goes on without it."""

    status, code = 503, "full"
