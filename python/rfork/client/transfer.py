"""One attempt to take one shard from one seed that granted a lease, whoever moves the bytes.

match → connect → read → settle, all or nothing: on return the shard holds the seed's bytes; on an error it may be half
written, and may be filled again or thrown away, because nothing writes to it any more.
"""

from __future__ import annotations

import abc
import contextlib
import logging
import random
from collections.abc import Iterator
from dataclasses import dataclass

from rfork.client.connect import FenceCheck, refuse_own
from rfork.client.contract import HeldLease, LocalShard, PullSettings
from rfork.client.lifecycle import PullEvent, PullState
from rfork.client.progress import Observer, Silent
from rfork.client.verify import Chunk, check_table, differing_chunks, groups_to_verify
from rfork.clock import Clock
from rfork.errors import NotQuiet, SeedError, SeedRefused, SeedUnreachable
from rfork.machine import Machine
from rfork.manifest import Manifest, TransferPlan, pair
from rfork.wire.seed import DigestTable, SeedRef, WeightsReport

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Task:
    """What to take, and how.

    `life`, if given, is in MATCHING, and ends in LOADED, in SEEKING (SeedError: try the next seed) or in REFUSED
    (NotQuiet: memory may still be written to, so the process must end).
    """

    shard: LocalShard
    lease: HeldLease
    settings: PullSettings
    check_fence: FenceCheck
    clock: Clock
    observer: Observer | None = None
    life: Machine[PullState, PullEvent] | None = None


class Transfer(abc.ABC):
    """What every way to move the bytes has in common; a way of its own is a subclass with a `run`."""

    def __init__(self, task: Task) -> None:
        self._shard, self._lease, self._settings = task.shard, task.lease, task.settings
        self._reply = task.lease.reply
        self._check_fence = task.check_fence
        self._clock = task.clock
        self._observer = task.observer or Silent()
        self._life = task.life
        self._phases_s: dict[str, float] = {}
        self._read_nbytes = self._lent_nbytes = 0
        self._start_s = task.clock.now()

    def carry_out(self) -> WeightsReport:
        """Run, and tell the lifecycle how it ended. Any exception but SeedError and NotQuiet is a bug."""
        try:
            return self.run()
        except SeedError as error:
            self._move(PullEvent.SEED_FAILED, f"{error.reason}: {error}")
            raise
        except NotQuiet as error:
            self._move(PullEvent.FORBIDDEN, str(error))
            raise

    @abc.abstractmethod
    def run(self) -> WeightsReport:
        """From a lease to a shard that is whole."""

    def _move(self, event: PullEvent, note: str = "") -> None:
        if self._life is not None:
            self._life.apply(event, now=self._clock.now(), note=note)

    def _match(self) -> tuple[Manifest, DigestTable | None, TransferPlan]:
        """What both sides have, the seed's digests where they are verified, and what that means for our memory.

        Nothing local is touched.
        """
        reply, verify = self._reply, self._settings.verify
        if verify == "full" and not reply.verified:
            raise SeedRefused(
                f"{reply.instance_id} did not verify the weights that it forked itself: verify=full wants that. "
                "Start it with verify=full, or this instance with verify=sample",
                reason="unverified",
            )
        for endpoint in reply.binding.endpoints:
            refuse_own(endpoint.session_id, self._settings.own_sessions)
        with self._phase("lease"):
            manifest = self._lease.manifest()
            theirs = self._lease.digests() if verify != "off" else None
        with self._phase("pair"):
            if manifest.digest != reply.binding.manifest_digest:
                raise SeedUnreachable(f"{reply.instance_id} sent another manifest than its lease names")
            plan = pair(manifest, self._shard.manifest, seed_name=reply.instance_id)
            if reply.binding.group_nbytes != plan.group_nbytes:
                raise SeedUnreachable(f"{reply.instance_id} binds other groups than its manifest has")
            if theirs is not None:
                check_table(theirs, manifest, reply.instance_id)
                self._check_algorithm(theirs)
        return manifest, theirs, plan

    def _check_algorithm(self, theirs: DigestTable) -> None:
        mine = self._shard.digests(theirs.chunk_nbytes, ()).algorithm
        if mine != theirs.algorithm:
            raise SeedRefused(
                f"{self._reply.instance_id} has {theirs.algorithm} digests, this device computes {mine}: "
                "nothing could be verified. verify=off would take the weights unverified",
                reason="unverified",
            )

    def _groups_to_verify(self, num_groups: int) -> list[int]:
        return groups_to_verify(self._settings.verify, num_groups, random.Random(self._reply.lease))

    def _wrong_chunks(self, manifest: Manifest, theirs: DigestTable, groups: list[int]) -> list[Chunk]:
        mine = self._shard.digests(theirs.chunk_nbytes, groups)
        return differing_chunks(mine, theirs, manifest, groups)

    def _settle(self, plan: TransferPlan, protocol: str) -> WeightsReport:
        """All bytes are there and right: values and inline tensors follow."""
        with self._phase("finish"):
            self._shard.apply(plan.set_states, plan.set_inline)
        self._move(PullEvent.SETTLED)
        return self._report(protocol)

    @contextlib.contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        start_s = self._clock.now()
        self._observer.on_phase(name)
        try:
            yield
        finally:
            self._phases_s[name] = self._phases_s.get(name, 0.0) + self._clock.now() - start_s

    def _report(self, protocol: str) -> WeightsReport:
        reply, verify, nbytes = self._reply, self._settings.verify, self._read_nbytes
        seconds = max(self._clock.now() - self._start_s, 1e-9)
        read_s = max(self._phases_s["read"], 1e-9)
        logger.info(
            "rfork: %s: %d bytes from %s generation %d in %.3f s, %.2f GB/s over %s (read %.3f s, %.2f GB/s), "
            "verified: %s; %s%s",
            self._shard.manifest.rank.key,
            nbytes,
            reply.instance_id,
            reply.generation,
            seconds,
            nbytes / seconds / 1e9,
            protocol,
            read_s,
            nbytes / read_s / 1e9,
            verify,
            ", ".join(f"{name} {spent_s:.3f}" for name, spent_s in self._phases_s.items()),
            f"; {self._lent_nbytes} bytes more were here already and copied" if self._lent_nbytes else "",
        )
        return WeightsReport(
            source="seed",
            seed=SeedRef(reply.instance_id, self._lease.address, reply.generation),
            verify=verify,
            protocol=protocol,
            nbytes=nbytes,
            lent_nbytes=self._lent_nbytes,
            seconds=seconds,
            gbps=nbytes / seconds / 1e9,
            phases_s=dict(self._phases_s),
            origin_verified=reply.verified and verify == "full",
        )
