"""For whom a group is opened, and where its member may then be dialled. Pure.

Whoever has the fleet key is of the fleet, and no question is asked. Without one the seed dials its client only, at the
address that it called from, or at one that the operator allows (`group_clients`):
 1 gloo     what the member tells is checked before it is dialled; here it is refused only where no address would do
 2 others   what a member tells is never seen, so its caller must be near: loopback, link-local, private, shared; or
            allowed
"""

from __future__ import annotations

from collections.abc import Sequence

from rfork.seed.admission import refuse
from rfork.transports.peer_address import NEARBY, is_within, parsed
from rfork.wire.collective import InitGroup
from rfork.wire.seed import Refusal

_SHOWN = 60


def peers_of(body: InitGroup, caller: str | None, allowed: Sequence[str]) -> tuple[str, ...] | Refusal:
    """The networks that a caller without key may be dialled in. `caller`: its address, None where it is not known."""
    address = parsed(caller) if caller else None
    here = f"this call came from {address}" if address else "who called is not known (a proxy passed it on)"
    advice = "Set a fleet key on both sides, or list the client's addresses in `group_clients` of the seed."
    peers = (*([str(address)] if address else []), *allowed)
    if body.backend != "gloo":
        near = (*NEARBY, *allowed)
        if is_within(address, near):
            return peers
        why = f"without a fleet key a seed is in a {body.backend} group only with {', '.join(near)}; {here}"
        return refuse("not_for_this_address", f"{why}. {advice}")
    if not peers:
        return refuse("not_for_this_address", f"without a fleet key a seed dials who called it; {here}. {advice}")
    if body.interface and not is_within(parsed(body.interface), peers):
        tells = f"the client would be dialled at {body.interface[:_SHOWN]!r}"
        return refuse("not_for_this_address", f"{tells}, expected one of {', '.join(peers)}. {advice}")
    return peers
