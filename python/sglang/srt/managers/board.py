"""The agreement's board on top of the key-value store that torch.distributed made for this WORLD."""

from __future__ import annotations

import datetime

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store


class StoreBoard:
    """Keys under one prefix of a torch.distributed store; `get` waits with its own deadline."""

    def __init__(self, store: dist.Store, prefix: str) -> None:
        self._store = dist.PrefixStore(prefix, store)

    def set(self, key: str, value: bytes) -> None:
        self._store.set(key, value)

    def get(self, key: str, timeout_s: float) -> bytes:
        try:
            self._store.wait([key], datetime.timedelta(seconds=timeout_s))
        except dist.DistStoreError as error:
            raise TimeoutError(key) from error
        return bytes(self._store.get(key))

    def poll(self, key: str) -> bytes | None:
        """The value of `key` if it is there; never waits, so that a thread may ask while others use the store."""
        return bytes(self._store.get(key)) if self._store.check([key]) else None


def world_board(prefix: str) -> StoreBoard:
    """The board of this process's WORLD."""
    return StoreBoard(_get_default_store(), prefix)
