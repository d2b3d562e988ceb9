"""What verbs ask of one instance itself, with the fleet key and the certificates that the environment names."""

from __future__ import annotations

from rfork.auth import ANY_SEED, seed_audience
from rfork.cli import _planner
from rfork.client.calls import Caller, Reply, parse_json, refusal_of
from rfork.client.resolve import MAX_STATUS_NBYTES, reachable_listener, seed_url
from rfork.client.sources import signer_of, tls_of
from rfork.errors import ConfigError, SeedRefused
from rfork.wire.seed import STATUS_PATH, StatusReply

CALL_S = 5.0
MAX_REPLY_NBYTES = 16 << 20


class Instance:
    """The instance that serves at an address (SGLang's port, or rfork's own listener). Ends the verb on a bad one."""

    def __init__(self, address: str) -> None:
        try:
            self._base = seed_url(address)
            found = _planner.settings()
            self._tls, self._signer = tls_of(found), signer_of(found, "operator")
        except (ValueError, ConfigError) as error:
            raise _planner.usage(str(error)) from None

    def status(self, listener: str = "") -> StatusReply:
        """Of its node at `listener`, else of the one that was named. Raises SeedError; also where the fleet has a key
        and this verb has not.
        """
        there = reachable_listener(listener, self._base) if listener else self._base
        answer = self._call("GET", there, STATUS_PATH, ANY_SEED, CALL_S)
        status = parse_json(answer, StatusReply, f"status of {there}", limit=MAX_STATUS_NBYTES)
        if status.ticket_wanted and status.listener is None:
            raise SeedRefused(f"{there} is of a fleet with a key: set RFORK_KEY_FILE or RFORK_KEY")
        return status

    def post(self, path: str, instance_id: str, listener: str, *, timeout_s: float) -> Reply:
        """Ask a listener of that instance to do something. Raises SeedError."""
        there = reachable_listener(listener, self._base)
        return self._call("POST", there, path, seed_audience(instance_id), timeout_s)

    def _call(self, method: str, base: str, path: str, audience: str, timeout_s: float) -> Reply:
        caller = Caller(base, tls=self._tls, signer=self._signer, audience=audience)
        try:
            answer = caller.call(method, path, timeout_s=timeout_s, limit=MAX_REPLY_NBYTES)
        finally:
            caller.close()
        if not 200 <= answer.status < 300:
            raise refusal_of(answer, f"{method} {base}{path}")
        return answer
