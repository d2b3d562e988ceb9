"""Who watches a pull: phases as they begin, bytes as they land."""

from __future__ import annotations

from typing import Protocol

from tqdm import tqdm


class Observer(Protocol):
    """Called from the pulling thread, so every method returns at once."""

    def on_phase(self, name: str) -> None: ...

    def on_total(self, nbytes: int) -> None: ...

    def on_bytes(self, nbytes: int) -> None: ...


class Silent:
    """Watches nothing."""

    def on_phase(self, name: str) -> None: ...

    def on_total(self, nbytes: int) -> None: ...

    def on_bytes(self, nbytes: int) -> None: ...


class ProgressBar:
    """A bar on standard error while bytes are read: for rank 0. Each attempt has a bar of its own."""

    def __init__(self, title: str = "rfork") -> None:
        self._title = title
        self._bar: tqdm | None = None

    def on_phase(self, name: str) -> None:
        if name != "read":
            self.close()

    def on_total(self, nbytes: int) -> None:
        self._bar = tqdm(total=nbytes, desc=self._title, unit="B", unit_scale=True, leave=True, mininterval=0.5)

    def on_bytes(self, nbytes: int) -> None:
        if self._bar is not None:
            self._bar.update(nbytes)

    def close(self) -> None:
        """End the bar; nothing happens without one."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
