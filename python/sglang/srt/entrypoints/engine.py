"""The main process of a node: its service starts before the ranks are spawned and ends after they are gone."""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

from rfork.client.planned import planner_of
from rfork.config_values import host_port
from rfork.seed.lifecycle import SeedState
from rfork.seed.node import NodeService
from rfork.seed.registration import Registration
from rfork.seed.stock import stock_tables
from rfork.transports.addresses import is_loopback
from rfork.wire.seed import StatusReply
from sglang_rfork.srt.compat import installed_release
from sglang_rfork.srt.plugin import announce
from sglang_rfork.srt.server_args import ForkRequest, one_line, request_of, settings_of

log = logging.getLogger("rfork")

START_LINE_WAIT_S = 10.0
INFO_ATTRIBUTE = "remote_instance_transfer_engine_info"

_node: NodeService | None = None
_registration: Registration | None = None
_lock = threading.Lock()


def running_node() -> NodeService | None:
    """The service of this process, or None where R-Fork was not asked for."""
    return _node


def around_launch(original: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
    """AROUND Engine._launch_subprocesses: the ranks find their node through the environment that they inherit."""
    server_args = kwargs["server_args"] if "server_args" in kwargs else args[0]
    if hasattr(server_args, "resolve_once"):
        server_args.resolve_once()
    request = request_of(server_args)
    if request is None:
        return original(cls, *args, **kwargs)
    # SGLang's next step, taken early: in a program nothing has set logging up yet, and the first line would be lost.
    installed_release().get("engine.logging")(server_args)
    with one_line(server_args):
        node = start_node(server_args, request)
    try:
        offer_attribute(cls)
        result = original(cls, *args, **kwargs)
        if is_offline():
            announce_ready(node)
    except BaseException:
        stop_node()
        raise
    return result


def before_shutdown(*args: Any, **kwargs: Any) -> None:
    """BEFORE Engine.shutdown: readers finish first."""
    finish_node()


def offer_attribute(cls: type) -> None:
    """Give engines of this process `remote_instance_transfer_engine_info`: {rank: [session id, {name: [address, …]}]}.

    A property of the class, because SGLang launches ranks from a class method, before an instance is any use.
    """
    setattr(cls, INFO_ATTRIBUTE, property(lambda engine: {} if _node is None else stock_tables(_node)))


def start_node(server_args: Any, request: ForkRequest) -> NodeService:
    """Start this node's service and put what its ranks need into the environment, or leave nothing. Raises
    ConfigError.
    """
    global _node, _registration
    announce("main", request.backend)
    view = installed_release().arguments(server_args)
    node = _node = NodeService(settings_of(server_args))
    try:
        node.start(host=listener_host(view), num_local_ranks=num_local_ranks(view))
        os.environ.update(node.environment())
        planner = planner_of(node.config)
        if planner is not None and int(view.node_rank or 0) == 0:
            _registration = Registration(node, planner)
            _registration.start()
    except BaseException:
        stop_node()  # a program may well try again
        raise
    return node


def stop_node() -> None:
    """End the service; idempotent, and safe from any thread."""
    global _node, _registration
    with _lock:
        node, _node = _node, None
        registration, _registration = _registration, None
    if registration is not None:
        registration.stop("shutdown")
    if node is not None:
        for name in node.environment():
            os.environ.pop(name, None)
        node.stop()


def finish_node() -> None:
    """Grant nothing more, let readers finish for `drain_timeout_s` at most, then end the service. Idempotent; waits."""
    node = _node
    if node is None:
        return
    try:
        node.drain()
        num_readers = node.num_readers
        if num_readers:
            log.info("rfork: shutting down once %d readers have finished", num_readers)
        if not node.wait_drained(node.config.drain_timeout_s):
            log.warning(
                "rfork: %d readers are cut off: they did not finish in %g s (drain_timeout_s)",
                *(node.num_readers, node.config.drain_timeout_s),
            )
    finally:
        stop_node()


def listener_host(view: Any) -> str:
    """Where this node's listener binds: beside SGLang's own port.

    Another node of the instance has no port that users reach, and as a rule no host given: it binds the address at
    which this host reaches the first node, as its ranks do.
    """
    host, first_node = str(view.host), view.dist_init_addr
    if int(view.node_rank or 0) == 0 or not is_loopback(host) or not first_node:
        return host
    first_host, port = host_port(str(first_node), "dist_init_addr")
    family, kind, _, _, address = socket.getaddrinfo(first_host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        probe.connect(address)  # sends nothing: it asks the routing table
        return str(probe.getsockname()[0])


def num_local_ranks(view: Any) -> int:
    """Scheduler processes that this node runs."""
    world = int(view.tp_size) * int(view.pp_size) // int(view.nnodes or 1)
    return world if view.enable_dp_attention else world * int(view.dp_size or 1)


def is_offline() -> bool:
    """Whether `sgl.Engine(...)` is on the stack: then there is no HTTP server whose health could be waited for."""
    frame = sys._getframe()
    while frame is not None:
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) == ("sglang.srt.entrypoints.engine", "__init__"):
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def announce_ready(node: NodeService) -> None:
    """The server is up: become a seed, and say in the last line of the start where the weights came from."""
    settled = threading.Event()
    node.subscribe(lambda state: settled.set())
    node.ready()
    if node.state is SeedState.STARTING:
        settled.wait(
            timeout=START_LINE_WAIT_S
        )  # so that this line is the last of the start; a rank that is no seed never settles
    log.info("%s", start_line(node.status_reply()))


def start_line(status: StatusReply) -> str:
    """`rfork: weights from seed … (…)` or `rfork: weights from checkpoint (reason …)`."""
    weights = status.weights
    if weights is None:
        return "rfork: weights from checkpoint (reason no rank has reported)"
    if weights.source == "seed" and weights.seed is not None:
        checked = "verified" if weights.verify == "full" else f"verify {weights.verify}"
        return (
            f"rfork: weights from seed {weights.seed.instance_id} at {weights.seed.address} "
            f"({weights.nbytes / 1e9:.3f} GB in {weights.seconds:.2f} s, {weights.gbps:.2f} GB/s, "
            f"{weights.protocol}, {checked})"
        )
    reason = weights.fallback_reason or "no fork was asked for"
    detail = f": {weights.fallback_detail.splitlines()[0]}" if weights.fallback_detail else ""
    return f"rfork: weights from checkpoint (reason {reason}{detail})"
