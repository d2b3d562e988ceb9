"""The other nodes of an instance, asked at their listeners: a drain is one of all nodes, whichever hears it first."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from rfork.auth import seed_audience
from rfork.client.calls import Caller, parse_json, refusal_of
from rfork.client.resolve import MAX_STATUS_NBYTES
from rfork.client.sources import signer_of, tls_of
from rfork.errors import SeedError
from rfork.seed.lifecycle import SeedState
from rfork.wire.seed import DRAIN_PATH, STATUS_PATH, StatusReply

if TYPE_CHECKING:
    from rfork.seed.node import NodeService

logger = logging.getLogger(__name__)

CALL_S = 5.0
POLL_S = 0.5


class OtherNodes:
    """One for each node. An instance of one node asks nobody."""

    def __init__(self, node: NodeService) -> None:
        self._node = node

    def on_state(self, state: SeedState) -> None:
        """Called at each change of this node's state; never waits. A node that drains already passes nothing on."""
        if state is SeedState.DRAINING and self._node.other_listeners:
            threading.Thread(target=self.drain, name="rfork-drain-nodes", daemon=True).start()

    def statuses(self, timeout_s: float = CALL_S) -> list[StatusReply | None]:
        """One for each other node, None where none of this instance answers. Waits, at most `timeout_s`."""
        return self._ask("GET", STATUS_PATH, timeout_s)

    def drain(self, timeout_s: float = CALL_S) -> None:
        """Tell them to grant nothing more. Waits, at most `timeout_s`."""
        self._ask("POST", DRAIN_PATH, timeout_s)

    def wait_drained(self, timeout_s: float) -> None:
        """Tell them, and wait until nobody reads from them; a node that does not answer is gone, and its readers with
        it.
        """
        deadline, told, readers = time.monotonic() + timeout_s, False, set[str]()
        if not self._node.other_listeners or timeout_s <= 0:
            return
        self.drain(min(CALL_S, timeout_s))
        while (left := deadline - time.monotonic()) > 0:
            seen = self.statuses(min(CALL_S, left))
            readers = {reader for status in seen if status is not None for reader in status.readers}
            if not readers:
                return
            if not told:
                logger.info("rfork: waiting for %d readers of other nodes", len(readers))
                told = True
            time.sleep(max(0.0, min(POLL_S, deadline - time.monotonic())))
        if told:
            logger.warning("rfork: %d readers of other nodes did not finish in time", len(readers))

    def _ask(self, method: str, path: str, timeout_s: float) -> list[StatusReply | None]:
        """Plain threads: an offline Engine asks while Python ends, when pools take nothing any more."""
        listeners = self._node.other_listeners
        found: dict[str, StatusReply | None] = {}
        errors: list[Exception] = []

        def ask(listener: str) -> None:
            try:
                found[listener] = self._ask_one(listener, method, path, timeout_s)
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=ask, args=(x,), name="rfork-nodes", daemon=True) for x in listeners]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout_s + 1.0)  # each call ends by its own deadline
        if errors:
            raise errors[0]
        return [found.get(listener) for listener in listeners]

    def _ask_one(self, listener: str, method: str, path: str, timeout_s: float) -> StatusReply | None:
        config, instance_id = self._node.config, self._node.instance_id
        caller = Caller(
            listener, tls=tls_of(config), signer=signer_of(config, instance_id), audience=seed_audience(instance_id)
        )
        try:
            reply = caller.call(method, path, timeout_s=timeout_s, limit=MAX_STATUS_NBYTES)
            if not 200 <= reply.status < 300:
                raise refusal_of(reply, f"{method} {listener}{path}")
            status = parse_json(reply, StatusReply, f"status of {listener}", limit=MAX_STATUS_NBYTES)
        except SeedError as error:
            logger.info("rfork: another node of this instance: %s", error)
            return None
        finally:
            caller.close()
        return status if status.instance_id == instance_id else None
