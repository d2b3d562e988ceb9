"""The seed's door where the fleet has a key: who is let in, and what is shown to those who are not (I12)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec

from rfork import wire
from rfork.auth import ANY_SEED, TICKET_HEADER, Guard, seed_audience, vouch
from rfork.clock import Clock
from rfork.config import Config
from rfork.guarded import VERDICT, Scope, admit, proof_headers
from rfork.identity import InstanceId
from rfork.keys import keyring
from rfork.seed.admission import STATUS_CODES, refuse
from rfork.wire.seed import Refusal, StatusReply, WeightsReport

_OF_PROXIES = ("forwarded", "via", "x-forwarded-for", "x-real-ip")


def guard_of(config: Config, instance_id: Callable[[], InstanceId], clock: Clock) -> Guard | None:
    """The guard of one instance; None where the fleet has no key. Raises ConfigError for a key file that is unsound.

    The id is asked each time: a node learns from its ranks whose part it is.
    """
    keys = keyring(config.key, config.key_file)
    if keys is None:
        return None
    return Guard(keys, lambda: (ANY_SEED, seed_audience(instance_id())), clock=clock)


def refusal_of(guard: Guard | None, scope: Scope, headers: Mapping[str, str], body: bytes) -> Refusal | None:
    """Why this request is not let in, or None. Uses its ticket up."""
    if guard is None:
        return None
    verdict = admit(guard, scope, headers, body)
    if not verdict.why:
        return None
    return refuse("other_instance" if verdict.is_for_another else "unauthorized", verdict.why)


def caller_of(scope: Scope, headers: Mapping[str, str]) -> str | None:
    """The address that a request comes from; None where a proxy says that it passes it on: what it, or whoever wrote
    its headers, says of others proves nothing.
    """
    client = scope.get("client")
    if client is None or any(name in headers for name in _OF_PROXIES):
        return None
    return str(client[0])


def status_answer(
    guard: Guard | None, full: StatusReply, scope: Scope, headers: Mapping[str, str]
) -> tuple[int, bytes, dict[str, str]]:
    """Code, body and headers of a status, on SGLang's port and on ours: all of it with a ticket, no secret without.

    A ticket that is no good is refused: its sender has another key, or another clock, and has to know.
    """
    refused = refusal_of(guard, scope, headers, b"")
    code = 200 if refused is None or not headers.get(TICKET_HEADER) else STATUS_CODES[refused.reason]
    body = wire.encode(full if refused is None else public(full) if code == 200 else refused)
    return code, body, proof_headers(guard, scope.get(VERDICT), code, body)


def word_for(config: Config, instance_id: InstanceId, listeners: Sequence[str]) -> str:
    """What an instance says of its own listeners, for clients to check; empty where the fleet has no key."""
    keys = keyring(config.key, config.key_file)
    return vouch(keys, instance_id, listeners) if keys is not None else ""


def public(status: StatusReply) -> StatusReply:
    """A status for strangers: who, in what state, with whose weights; no address, and no text that may hold one."""
    return msgspec.structs.replace(
        status,
        listener=None,
        readers=(),
        nodes=(),
        ticket_wanted=True,
        weights=_public(status.weights) if status.weights else None,
        ranks=[
            msgspec.structs.replace(r, state=r.state.partition(":")[0], weights=_public(r.weights))
            for r in status.ranks
        ],
    )


def _public(report: WeightsReport) -> WeightsReport:
    seed = msgspec.structs.replace(report.seed, address="") if report.seed else None
    return msgspec.structs.replace(report, seed=seed, fallback_detail=None)
