"""Moving frames through a group of two: several at a time, in order, small ones gathered on the way."""

from __future__ import annotations

import ctypes
import functools
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rfork.transports.collective import CLIENT, SEED, Group, tensor_at
from rfork.transports.frames import PACES, Frame, batches, nbytes_of

NUM_STAGES = 2
"""Gathered frames in flight: one is on the wire while the next is made ready."""

LONGEST_NAP_S = 0.1


class Flight(NamedTuple):
    """Frames on their way together, and the stage that carries them unless they travel in place."""

    frames: list[Frame]
    nbytes: int
    stage: torch.Tensor | None


class Courier:
    """Carries for one member. `addresses[g]` is where alias group g starts here.

    The seed starts frames in batches where its backend likes that, the client one by one. On the wire it is the same.
    A limit is the seed's to keep: what it has started and its client has not would wait on the device that serves.
    """

    def __init__(
        self,
        group: Group,
        addresses: Sequence[int],
        *,
        progress_timeout_s: float,
        check: Callable[[], None],
        on_bytes: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        self._group, self._addresses = group, addresses
        self._timeout_s, self._check, self._on_bytes = progress_timeout_s, check, on_bytes
        self._flying: deque[Flight] = deque()
        self._stages: list[torch.Tensor] = []

    def word(self, data: bytes | bytearray) -> bytes:
        """One small message from the seed: its bytes there, room for as many here. Returns what was said."""
        with self._group.on_device():
            tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(self._group.device)
            self._group.broadcast(tensor)
            self._group.finish(self._timeout_s, self._check)
            return bytes(tensor.cpu().numpy())

    def carry(self, frames: Sequence[Frame], limit_gbps: float | None = None) -> None:
        """Send all frames (the seed), or fill all (the client); on the average at `limit_gbps` at most.

        Raises SeedLost when the group breaks or stands still, and what `check` raises.
        """
        limits = PACES[self._group.backend]
        together = self._group.member == SEED and limit_gbps is None
        most = (limits.batch_frames, limits.batch_nbytes) if together else (1, 0)
        started_s, nbytes_before = time.monotonic(), 0
        with self._group.on_device():
            longest = max((nbytes_of(f) for f in frames if len(f) > 1), default=0)
            make = functools.partial(torch.empty, longest, dtype=torch.uint8, device=self._group.device)
            self._stages = [make() for _ in range(NUM_STAGES if longest else 0)]
            for batch in batches(frames, *most):
                nbytes = sum(map(nbytes_of, batch))
                if limit_gbps is not None:
                    self._wait_until(started_s + nbytes_before / (limit_gbps * 1e9))
                    nbytes_before += nbytes
                while not self._has_room_for(batch, nbytes):
                    self._land()
                self._start(batch, nbytes)
            while self._flying:
                self._land()

    def _wait_until(self, moment_s: float) -> None:
        while (left_s := moment_s - time.monotonic()) > 0:
            self._check()
            time.sleep(min(left_s, LONGEST_NAP_S))

    def _has_room_for(self, batch: list[Frame], nbytes: int) -> bool:
        if len(batch[0]) > 1 and not self._stages:
            return False
        limits = PACES[self._group.backend]
        num_frames = sum(len(flight.frames) for flight in self._flying) + len(batch)
        flying_nbytes = sum(flight.nbytes for flight in self._flying) + nbytes
        return not self._flying or (num_frames <= limits.flying_frames and flying_nbytes <= limits.flying_nbytes)

    def _start(self, batch: list[Frame], nbytes: int) -> None:
        first, stage = batch[0], None
        if len(first) > 1:
            stage = self._stages.pop()
            if self._group.member == SEED:
                self._copy(first, stage[:nbytes], gather=True)
            self._group.broadcast(stage[:nbytes])
        else:
            views = [view for frame in batch for view in self._views(frame)]
            self._group.broadcast_together(views) if len(views) > 1 else self._group.broadcast(views[0])
        self._flying.append(Flight(batch, nbytes, stage))

    def _land(self) -> None:
        self._group.finish(self._timeout_s, self._check)
        batch, nbytes, stage = self._flying.popleft()
        if stage is not None:
            if self._group.member == CLIENT:
                self._copy(batch[0], stage[:nbytes], gather=False)
            self._stages.append(stage)
        self._on_bytes(nbytes)

    def _copy(self, frame: Frame, tensor: torch.Tensor, *, gather: bool) -> None:
        """Between a stage and the places of its pieces. Host memory is moved plainly: torch's own copies would start
        threads and wait for them, which takes long where cores are few.
        """
        if self._group.device.type != "cpu":
            views, parts = self._views(frame), list(tensor.split([p.nbytes for p in frame]))
            torch._foreach_copy_(*((parts, views) if gather else (views, parts)))
            return
        staged = tensor.data_ptr()
        for group, offset, nbytes in frame:
            here = self._addresses[group] + offset
            to, source = (staged, here) if gather else (here, staged)
            ctypes.memmove(to, source, nbytes)
            staged += nbytes

    def _views(self, frame: Frame) -> list[torch.Tensor]:
        device = self._group.device
        return [tensor_at(self._addresses[p.group] + p.offset, p.nbytes, device) for p in frame]
