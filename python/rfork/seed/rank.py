"""The seed's part in a rank process: publishes its shards, fences every change, answers its node.

A rank's weights are readable only between `publish()` and `close()`, and never while they change. Nothing that goes
wrong here stops the server: the rank says by name why it is no seed, once, and serves on.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from rfork.binding import Binding
from rfork.errors import NotQuiet, RForkError, TransportError
from rfork.identity import Content, ModelIdentity, RankIdentity, canonical_digest
from rfork.manifest import Manifest, encode_manifest
from rfork.seed.control import ControlClient
from rfork.seed.offer import Change, Live, SeedShard
from rfork.seed.serving import Fence, ServingEngines, union
from rfork.seed.standing import Standing
from rfork.transports.base import Transport
from rfork.wire.collective import GroupOrder
from rfork.wire.control import (
    WITHDRAWAL_S,
    Answer,
    Ask,
    Changing,
    Elsewhere,
    Healthy,
    Hello,
    Loaded,
    Published,
    Refused,
    Seeking,
    Told,
)
from rfork.wire.planner import Report
from rfork.wire.seed import DigestTable, WeightsReport

if TYPE_CHECKING:
    from rfork.seed.broadcast import Broadcasts

logger = logging.getLogger(__name__)

_SHOWN = 4


class RankAgent:
    """One for each rank process. Thread-safe; `publish`, `changing` and `settle` come from the weights' own thread."""

    def __init__(
        self,
        control_name: str | None,
        hello: Hello,
        instance_id: str,
        *,
        is_on: bool,
        transports: Callable[[], Sequence[Transport]],
        make_fence: Callable[[], Fence],
        chunk_nbytes: int,
        close_timeout_s: float = 30.0,
        broadcasts: Broadcasts | None = None,
        on_healthy: Callable[[], None] = lambda: None,
    ) -> None:
        self._broadcasts = broadcasts
        self._rank = hello.rank
        self._instance_id = instance_id
        self._is_on = is_on
        self._on_healthy = on_healthy
        self._make_fence = make_fence
        self._chunk_nbytes = chunk_nbytes
        self._engines = ServingEngines(transports, close_timeout_s, may_be_none=broadcasts is not None)
        self._fence: Fence | None = None
        self._live: list[Live] = []
        self._content: Content | None = None
        self._depth = 0
        self._why = ""
        self._standing = Standing()
        self._refused: str | None = None
        self._lock = threading.RLock()
        self._digesting = threading.Lock()
        self._withdrawn = threading.Event()
        self._client: ControlClient | None = None
        try:
            if control_name is None:
                raise TransportError("this process has no RFORK_CONTROL: its main process does not run the plugin")
            self._client = ControlClient(control_name, hello, self._answer, self._main_is_gone)
        except TransportError as error:
            self._refuse(str(error))

    @property
    def generation(self) -> int:
        """What the fence page says: even while readers may come; 0 before the first publication."""
        return self._fence.generation if self._fence else 0

    def seeking(self, identity: ModelIdentity, content: Content, *, reads_disk: bool = False) -> None:
        """The target is about to load: the planner may count on this instance before it can serve."""
        engine, fields = identity.engine, identity.fields
        self._send(
            Seeking(rank=self._rank, engine=engine, identity=fields, content=str(content), reads_disk=reads_disk)
        )

    def tell(self, report: Report) -> None:
        """Something for the planner; never waits."""
        self._send(Told(report))

    def elsewhere(self, listeners: dict[str, str]) -> None:
        """What the other nodes of this instance hold: shard key → URL of the listener that grants leases of it."""
        self._send(Elsewhere(self._rank, listeners))

    def healthy(self) -> None:
        """The node that answers requests is healthy; this rank's own node can't tell."""
        self._send(Healthy(self._rank))

    def loaded(self, shard: RankIdentity, report: WeightsReport) -> None:
        """A shard has its weights: told for each before the first `publish()`, also by ranks that never publish."""
        self._send(Loaded(shard=shard, rank=self._rank, report=report))

    def publish(self, shards: Sequence[SeedShard]) -> bool:
        """Offer all that this rank has, after every post-load step. False if this rank can't be a seed."""
        with self._lock:
            if not self._is_on:
                self._refuse("it was switched off (seed: off)")
            if self._refused:
                return False
            with self._never_fatal("publishing"):
                found = [(source, source.resolve()) for source in shards]
                self._live = [Live(source, r.manifest, r, source.origin_digests) for source, r in found]
                if self._standing.altered or self._depth:  # what its origin knew is no use any more
                    self._standing.unsettled = self._standing.altered = True
                    self.settle()
                else:
                    for live in self._live:
                        live.digests = live.digests or self._digest(live)
                    self._standing.unsettled = False
                    self._offer()
            return self._refused is None

    @contextlib.contextmanager
    def changing(
        self,
        why: str,
        *,
        alters: bool = True,
        settles: bool = True,
        whole: bool = True,
        unmaps: bool = False,
        maps: bool = False,
    ) -> Iterator[Change]:
        """Wrap whatever changes or moves weights. Nested uses count as one change; the outermost says how it ends.

        `alters=False`: bytes may go and come back (release and resume of memory); the rank is offered again, as what it
        was, once its digests are again those that it published. The same holds where the body raises or sets `failed`.
        `settles=False`: the weights are not whole afterwards (one call of many, released memory): the rank stays closed
        until a change that settles, or `settle()`. `whole=False`: some of the weights only, so it can't mend an earlier
        one of many that failed. `unmaps`: memory goes away inside, so engines are destroyed first, and nothing is read
        until a change that `maps` it again; raises NotQuiet, before the body, if that can't be proven.
        """
        change = Change()
        self._begin(why, unmaps)
        try:
            yield change
        except BaseException:
            change.failed = True
            raise
        finally:
            with self._lock:
                self._standing.changed(alters=alters, whole=whole, unmaps=unmaps, maps=maps, failed=change.failed)
                self._end(alters=alters, settles=settles, failed=change.failed)

    def settle(self) -> None:
        """The weights are whole again (generation continues): publish what many small changes have made.

        Not where one of them failed, nor where bytes are gone that no update has brought back since.
        """
        with self._lock:
            if self._standing.unsettled and not self._depth:
                self._publish_change()

    def retire(self, why: str) -> None:
        """Call before what the weights mean changes outside of them, where no manifest and no digest would show it:
        never a seed again. Idempotent.
        """
        with self._lock:
            self._refuse(why)

    def close(self) -> None:
        """Destroy the engines and leave the node. Idempotent; called at shutdown. Raises NotQuiet if one won't end."""
        try:
            self._withdraw("it was closed")
        finally:
            if self._client:
                self._client.close()

    # Changes

    def _begin(self, why: str, unmaps: bool) -> None:
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                self._why = why
                self._fence_off(why, unmaps)
            if not unmaps:
                return
            try:
                with self._digesting:  # a digest under way reads this memory
                    if self._broadcasts:
                        self._broadcasts.close(why)
                    self._engines.close()
            except BaseException:
                self._depth -= 1
                self._refuse(f"its engines could not be destroyed before {why}")
                raise

    def _fence_off(self, why: str, unmaps: bool) -> None:
        if self._fence is None or not self._live:
            return
        self._withdrawn.clear()
        told = self._client is not None and self._client.send(Changing(self._rank, why, unmaps))
        if self._broadcasts:
            self._broadcasts.cancel(why)
        with self._never_fatal(f"fencing {why}"):  # a fence that can't be moved ends in engines destroyed
            self._fence.close()
            for live in self._live:
                if live.resolved:
                    live.resolved.synchronize()
                live.resolved = None
        if unmaps and told and not self._withdrawn.wait(WITHDRAWAL_S):
            logger.warning("rfork: rank %d: %s does not wait any longer for the planner to hear of it", self._rank, why)

    def _end(self, *, alters: bool, settles: bool, failed: bool) -> None:
        self._depth -= 1
        # Before the first publication there is no digest that could show that nothing was altered.
        self._standing.altered |= not self._live
        if not self._depth and (settles or failed) and (alters or not self._standing.altered):
            self._publish_change(failed=failed)

    def _publish_change(self, *, failed: bool = False) -> None:
        """Offer the weights as they are now, unless something leaves it open what they are."""
        doubt = self._standing.against(self._why, failed=failed)
        if doubt is not None:
            logger.warning("rfork: rank %d: %s; no seed until an update ends well", self._rank, doubt)
            return
        if self._standing.altered:
            # Ranks change in step, so they name the new content alike without a word to each other.
            self._content = Content("live", canonical_digest([self._instance_id, self.generation])[:16])
        if self._refused or not self._live:
            self._standing.unsettled = bool(self._live)
            return
        with self._never_fatal(f"publishing after {self._why}"):
            for live in self._live:
                self._resolve_again(live)
                if self._refused or not self._is_what_it_was(live):
                    return
            self._standing.published()
            self._offer()

    def _resolve_again(self, live: Live) -> None:
        live.resolved = live.source.resolve()
        live.resolved.synchronize()
        if live.resolved.manifest.digest != live.manifest.digest:
            self._refuse(f"{self._why} changed the layout of its weights")
        live.manifest = live.resolved.manifest

    def _is_what_it_was(self, live: Live) -> bool:
        if self._standing.altered:
            live.digests = None  # taken when somebody asks: updates come often, forks seldom
            return True
        if live.digests is not None and self._digest(live) == live.digests:
            return True
        self._standing.other_bytes()
        logger.warning("rfork: rank %d: %s left other bytes; no seed until an update ends well", self._rank, self._why)
        return False

    def _offer(self) -> None:
        """Register, open the fence, tell the node: in this order, so that what the node hands out can be read."""
        self._fence = self._fence or self._make_fence()
        resolved = [live.resolved for live in self._live if live.resolved]
        regions = union(region for r in resolved for region in r.regions_for((self._fence.tensor,)))
        if self._engines.serve(regions):
            self._warn_open()
        generation = self._fence.open()
        for live in self._live:
            self._send(self._publication(live, self._fence, generation))

    def _publication(self, live: Live, fence: Fence, generation: int) -> Published:
        assert live.resolved is not None
        table = live.source.stock_table()
        return Published(
            shard=live.manifest.rank,
            rank=self._rank,
            engine=live.source.identity.engine,
            identity=live.source.identity.fields,
            content=str(self._content or live.source.content),
            weight_version=live.source.weight_version(),
            generation=generation,
            manifest=encode_manifest(live.manifest),
            binding=Binding(
                manifest_digest=live.manifest.digest,
                generation=generation,
                regions=self._engines.regions,
                addresses=live.resolved.addresses,
                group_nbytes=live.manifest.group_nbytes,
                fence_address=fence.address,
                fence_nbytes=fence.nbytes,
                endpoints=self._engines.endpoints,
            ),
            digests=live.digests,
            verified=live.source.verified,
            parameters=None if isinstance(table, str) else table,
            parameters_refusal=table if isinstance(table, str) else None,
        )

    def _warn_open(self) -> None:
        where = ", ".join(f"{e.session_id} ({e.protocol})" for e in self._engines.endpoints)
        logger.warning(
            "rfork: rank %d serves its weights at %s. Transfer engines listen on all interfaces, whatever the server "
            "binds, and have no authentication: whoever reaches these ports can read and overwrite the weights. Close "
            "them to all but the fleet, or set `seed: off`.",
            self._rank,
            where,
        )

    # Digests, in the control thread

    def _digest(self, live: Live) -> DigestTable:
        chunk_nbytes = live.digests.chunk_nbytes if live.digests else self._chunk_nbytes
        with self._digesting:
            resolved = live.resolved or live.source.resolve()
            return resolved.digests(chunk_nbytes)

    def _tables(self, *, keep: bool) -> list[tuple[Live, DigestTable]] | None:
        """Digests of the memory as it is; None if it changed while they were taken. `keep`: as its own."""
        with self._lock:
            generation, shards = self.generation, list(self._live)
            if generation % 2 or self._depth or not shards:
                return None
        tables: list[tuple[Live, DigestTable]] = []
        for live in shards:
            with self._digesting:
                resolved = live.resolved
                if resolved is None or self.generation != generation:
                    return None
                chunk_nbytes = live.digests.chunk_nbytes if live.digests else self._chunk_nbytes
                tables.append((live, resolved.digests(chunk_nbytes)))
        with self._lock:
            if self.generation != generation:
                return None
            for live, table in tables:
                live.digests = table if keep else live.digests
            return tables

    def _answer(self, ask: Ask) -> Answer:
        match ask.verb:
            case "ping":
                return Answer(ask.id, True)
            case "withdrawn":
                self._withdrawn.set()
                return Answer(ask.id, True)
            case "recheck":  # asked once the server is healthy
                self._on_healthy()
                return self._recheck(ask.id)
            case "digests" | "audit":
                tables = self._tables(keep=ask.verb == "digests")
                if tables is None:
                    return Answer(ask.id, False, "the weights are changing")
                return Answer(ask.id, True, digests=[(live.manifest.rank, table) for live, table in tables])
            case "close":
                self._withdraw("its node closed it")
                return Answer(ask.id, True)
            case "group" if ask.order is not None:
                return self._open_group(ask.id, ask.order)
            case "send" if self._broadcasts is not None:
                found = self._broadcasts.send(ask.group)
                return Answer(ask.id, found, None if found else "this group has ended", reason="unknown_lease")
        return Answer(ask.id, False, f"this rank does not know {ask.verb!r}")

    def _open_group(self, number: int, order: GroupOrder) -> Answer:
        """Offer a collective transfer; a thread of its own sends, so this returns at once."""
        if self._broadcasts is None:
            return Answer(number, False, "this rank has no collective transport", reason="not_understood")
        from rfork.seed.broadcast import NoGroup, Source

        with self._lock:
            live = next((x for x in self._live if x.manifest.rank == order.shard), None)
            readable = live is not None and live.resolved is not None and self._fence is not None and not self._depth
            if not readable or self.generation != order.generation:
                return Answer(number, False, "the weights are changing", reason="paused")
            assert live is not None
            assert live.resolved is not None
            assert self._fence is not None
            source = Source(live.resolved, self._fence, live.source.stock_table())
            try:
                return Answer(number, True, port=self._broadcasts.open(order, source, self._send))
            except NoGroup as error:
                return Answer(number, False, str(error), reason=error.reason)

    def _recheck(self, number: int) -> Answer:
        tables = self._tables(keep=False)
        if tables is None:  # a change came between: its own publication counts, not this check
            return Answer(number, True)
        changed = [
            name
            for live, table in tables
            if live.digests is not None and live.digests != table
            for name in _names_of_difference(live.manifest, live.digests, table)
        ]
        if not changed:
            return Answer(number, True)
        more = f" and {len(changed) - _SHOWN} more" if len(changed) > _SHOWN else ""
        names = ", ".join(changed[:_SHOWN])
        return Answer(number, False, f"changed since it was published, unannounced: {names}{more}")

    # The node

    def _send(self, message: object) -> None:
        if self._client:
            self._client.send(message)

    def _main_is_gone(self) -> None:
        """Nobody is left who could grant, revoke or drain: stop being readable."""
        with self._lock:
            self._refuse("its main process is gone")

    def _withdraw(self, why: str) -> None:
        with self._lock:
            self._refused = self._refused or why
            if self._fence:
                self._fence.close()
            self._live = []
            if self._broadcasts:
                self._broadcasts.close(why)
            self._engines.close()

    def _refuse(self, why: str) -> None:
        if self._refused:
            return
        self._refused = why
        logger.log(logging.WARNING if self._is_on else logging.INFO, "rfork: rank %d is no seed: %s", self._rank, why)
        if self._fence:
            self._fence.close()
        self._live = []
        self._send(Refused(self._rank, why))
        if self._broadcasts:
            self._broadcasts.cancel(why)
        try:
            self._engines.close()
        except Exception as error:
            logger.error("rfork: rank %d: %s", self._rank, error)

    @contextlib.contextmanager
    def _never_fatal(self, doing: str) -> Iterator[None]:
        try:
            yield
        except NotQuiet:
            raise
        except RForkError as error:
            self._refuse(f"{doing}: {error}")
        except Exception as error:
            logger.exception("rfork: rank %d failed while %s", self._rank, doing)
            self._refuse(f"{doing}: {type(error).__name__}: {error}")


def _names_of_difference(manifest: Manifest, one: DigestTable, other: DigestTable) -> list[str]:
    if len(one.values) != len(other.values):
        return ["(another number of groups)"]
    groups = {g for g, (a, b) in enumerate(zip(one.values, other.values, strict=True)) if a != b}
    return [t.name for t in manifest.tensors if t.group in groups]
