"""A collective transfer, received: the seed's rank sends everything, once, in manifest order.

The group is ended on every way out, before the memory is used for anything else.
"""

from __future__ import annotations

from dataclasses import dataclass
from urllib.parse import urlsplit

from rfork import wire
from rfork.auth import Signer, seed_audience
from rfork.client.calls import Caller, parse_json, refusal_of
from rfork.client.connect import FenceCheck
from rfork.client.contract import HeldLease, LocalShard, PullSettings
from rfork.client.lifecycle import PullEvent, PullState
from rfork.client.progress import Observer
from rfork.client.transfer import Task, Transfer
from rfork.client.verify import describe
from rfork.clock import Clock
from rfork.errors import DigestMismatch, SeedLost, SeedRefused, SeedUnreachable
from rfork.machine import Machine
from rfork.manifest import Manifest
from rfork.tls import Tls
from rfork.transports.collective import CLIENT, Device, Group, Meeting, backend_for, local_address_towards
from rfork.transports.courier import Courier
from rfork.transports.frames import cut
from rfork.transports.preamble import FENCE_HEADER_NBYTES, Header, read_header
from rfork.transports.select import Fabrics
from rfork.wire.collective import INIT_PATH, SEND_PATH, InitGroup, InitReply, SendWeights
from rfork.wire.seed import DigestTable, WeightsReport

_REPLY_NBYTES = 1 << 20
_QUEUE_PAUSE_S = 0.5
_DEFAULT_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True)
class Receiver:
    """How this rank receives; called as `rfork.client.pull.pull` is. `port` is the seed's, 0 for any free one.

    `queue_timeout_s` is how long a seed whose port or places are taken is asked again.
    """

    device: Device
    port: int = 0
    tls: Tls | None = None
    queue_timeout_s: float = 30.0
    signer: Signer | None = None

    def __call__(
        self,
        shard: LocalShard,
        lease: HeldLease,
        fabrics: Fabrics,
        settings: PullSettings,
        *,
        check_fence: FenceCheck,
        clock: Clock,
        observer: Observer | None = None,
        life: Machine[PullState, PullEvent] | None = None,
    ) -> WeightsReport:
        task = Task(shard, lease, settings, check_fence, clock, observer, life)
        return _Receive(task, self).carry_out()


class _Receive(Transfer):
    def __init__(self, task: Task, how: Receiver) -> None:
        super().__init__(task)
        self._how = how

    def run(self) -> WeightsReport:
        manifest, theirs, plan = self._match()
        self._move(PullEvent.PAIRED)
        self._shard.synchronize()
        audience = seed_audience(self._reply.instance_id)
        caller = Caller(self._lease.address, tls=self._how.tls, signer=self._how.signer, audience=audience)
        try:
            with self._phase("connect"):
                group = self._join(caller)
            try:
                self._receive(group, caller, manifest, theirs)
            except SeedLost:
                self._lease.check()  # a lease that was revoked is the better reason
                raise
            finally:
                with self._phase("close"):
                    group.close(self._settings.close_timeout_s)
        finally:
            caller.close()
        self._read_nbytes = plan.nbytes
        return self._settle(plan, group.backend)

    def _receive(self, group: Group, caller: Caller, manifest: Manifest, theirs: DigestTable | None) -> None:
        reply = self._reply
        courier = Courier(
            group,
            self._shard.addresses,
            progress_timeout_s=self._settings.progress_timeout_s,
            check=self._lease.check,
            on_bytes=self._observer.on_bytes,
        )
        with self._phase("connect"):
            self._ask_to_send(caller)
            blank = Header(bytes(FENCE_HEADER_NBYTES), manifest.digest, 0, 0, 0).encode()
            header = read_header(courier.word(blank), manifest.digest, manifest.nbytes)
            self._check_fence(header.fence, reply.instance_id, reply.generation)
        self._move(PullEvent.CONNECTED, f"{group.backend} {caller.base_url}")
        with self._phase("read"):
            self._observer.on_total(manifest.nbytes)
            frames = cut(manifest.group_nbytes, header.frame_nbytes, header.lone_nbytes)
            courier.carry(frames)
            trailer = courier.word(bytes(FENCE_HEADER_NBYTES))
            group.tell("done")
        self._move(PullEvent.ALL_READ)
        with self._phase("verify"):
            self._check_fence(trailer, reply.instance_id, reply.generation)
            if theirs is not None:
                self._verify_received(manifest, theirs)

    def _join(self, caller: Caller) -> Group:
        url = urlsplit(caller.base_url)
        host = url.hostname or ""
        try:
            interface = local_address_towards(
                host, url.port or _DEFAULT_PORTS[url.scheme], self._settings.connect_timeout_s
            )
        except OSError as error:
            raise SeedUnreachable(f"{caller.base_url}: {error}") from None
        ready = self._queue_up(caller, host, interface)
        try:
            meeting = Meeting(host, int(ready.ports), ready.group_name, interface)
        except ValueError as error:
            raise SeedUnreachable(f"{caller.base_url}: no group to join at {ready.ports[:40]!r}: {error}") from None
        settings = self._settings
        return Group(
            meeting,
            CLIENT,
            self._how.device,
            join_timeout_s=settings.connect_timeout_s,
            operation_timeout_s=min(settings.progress_timeout_s, settings.close_timeout_s / 2),
        )

    def _queue_up(self, caller: Caller, host: str, interface: str) -> InitReply:
        """Ask for a group until there is one, or `queue_timeout_s` is over."""
        deadline = self._clock.now() + self._how.queue_timeout_s
        while True:
            try:
                return self._ask_for_group(caller, host, interface)
            except SeedRefused as error:
                if error.retry_after_s is None or error.reason != "busy" or self._clock.now() >= deadline:
                    raise
                self._lease.check()
                self._clock.sleep(min(_QUEUE_PAUSE_S, error.retry_after_s))

    def _ask_for_group(self, caller: Caller, host: str, interface: str) -> InitReply:
        body = InitGroup(
            master_address=host,
            ports=str(self._how.port),
            group_rank=0,
            world_size=2,
            backend=backend_for(self._how.device),
            lease=self._reply.lease,
            interface=interface,
            limit_gbps=self._settings.limit_gbps,
        )
        where = f"group at {caller.base_url}"
        answer = caller.call(
            "POST", INIT_PATH, timeout_s=self._settings.connect_timeout_s, limit=_REPLY_NBYTES, body=wire.encode(body)
        )
        if answer.status != 200:
            raise refusal_of(answer, where)
        return parse_json(answer, InitReply, where, limit=_REPLY_NBYTES)

    def _ask_to_send(self, caller: Caller) -> None:
        body = SendWeights(master_address="", ports=str(self._how.port), lease=self._reply.lease)
        answer = caller.call(
            "POST", SEND_PATH, timeout_s=self._settings.connect_timeout_s, limit=_REPLY_NBYTES, body=wire.encode(body)
        )
        if answer.status != 200:
            raise refusal_of(answer, f"transfer from {caller.base_url}")

    def _verify_received(self, manifest: Manifest, theirs: DigestTable) -> None:
        """Compare digests. What differs can't be asked for again here: the seed sends once."""
        groups = self._groups_to_verify(len(manifest.group_nbytes))
        if wrong := self._wrong_chunks(manifest, theirs, groups):
            raise DigestMismatch(
                f"{len(wrong)} chunks from {self._reply.instance_id} differ from its digests, with its fence unmoved "
                f"at generation {self._reply.generation}. First: {describe(wrong[0], manifest)}"
            )
