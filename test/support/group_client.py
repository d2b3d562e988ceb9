"""A client that forks from a real server by a collective transfer, without being a server: it knows no model, so it
asks the seed what it holds. In this process, or as one to be killed:

    python -m support.group_client ADDRESS SHARE     says `at SHARE` there and stands still, for ever
"""

from __future__ import annotations

import sys
import threading
from typing import Any

from rfork.client.lease import Lease, take_lease
from rfork.client.resolve import resolve
from rfork.errors import SeedRefused
from rfork.identity import RankIdentity
from rfork.wire.seed import LeaseRequest
from support.groups import AtShare, receive
from support.host_shard import HostShard


def take(address: str, client: str = "i-light", rank: RankIdentity | None = None) -> Lease:
    """A lease on a shard of the server at `address`. What it is, its refusal of a client that is nothing says."""
    seed = resolve(address, timeout_s=10)
    fields = {
        "client": client,
        "content": seed.content,
        "rank": rank or RankIdentity(),
        "transport": "collective",
        "instance_key": seed.instance_key,
    }
    try:
        return take_lease(seed.listener, LeaseRequest(engine="nobody", identity={}, **fields), timeout_s=10)
    except SeedRefused as error:
        theirs: dict[str, Any] = {name: there for name, _, there in error.differing}
    engine = theirs.pop("engine")
    return take_lease(seed.listener, LeaseRequest(engine=engine, identity=theirs, **fields), timeout_s=10)


def fork(address: str, client: str = "i-light", **how: Any) -> HostShard:
    """What the server's first rank holds, every byte verified."""
    with take(address, client) as lease:
        target = HostShard(lease.manifest())
        receive(target, lease, **how)
    return target


def main() -> None:
    address, share = sys.argv[1:]

    def stand_still() -> None:
        print(f"at {share}", flush=True)
        threading.Event().wait(600)

    fork(address, observer=AtShare(float(share), stand_still))


if __name__ == "__main__":
    main()
