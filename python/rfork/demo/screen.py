"""What the user sees: steps that run, with a clock; a line for each that is done; a table at the end."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rfork.demo.facts import ELECTED, Facts, InstanceFacts
from rfork.demo.server import DemoFailed, Server

_PLAIN_WIDTH = 120
_SIGN_OF_LIFE_S = 15.0


class Screen:
    """A live display on a terminal, plain lines anywhere else."""

    def __init__(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(AttributeError):  # not a text stream of the interpreter's own
                stream.reconfigure(errors="replace")  # type: ignore[union-attr]
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = max(self.console.width, _PLAIN_WIDTH)
        self._started_s = time.monotonic()
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        # 4 a second: the servers that we wait for need the cores more.
        self._progress = Progress(*columns, console=self.console, transient=True, refresh_per_second=4)
        self._silent_since_s = self._started_s

    @contextlib.contextmanager
    def live(self) -> Iterator[None]:
        """The block in which steps run."""
        if not self.console.is_terminal:
            yield
            return
        with self._progress:
            yield

    def say(self, text: str = "", style: str = "") -> None:
        self.console.print(escape(text), style=style or None, soft_wrap=True)
        self._silent_since_s = time.monotonic()

    def begin(self, text: str) -> TaskID | None:
        """A step starts; more than one may run."""
        if self.console.is_terminal:
            return self._progress.add_task(escape(text))
        self.say(f"  {text} …")
        return None

    def done(self, step: TaskID | None, text: str) -> None:
        if step is not None:
            self._progress.remove_task(step)
        self.console.print(f"[green]✓[/green] {escape(text)}", soft_wrap=True)
        self._silent_since_s = time.monotonic()

    def still(self, text: str) -> None:
        """Where nothing spins, show now and then that we are alive."""
        if not self.console.is_terminal and time.monotonic() - self._silent_since_s > _SIGN_OF_LIFE_S:
            self.say(f"  … {text}")

    # -- the end ---------------------------------------------------------------------------------------------------

    def table(self, facts: Facts) -> None:
        table = Table(title="R-Fork demo", title_justify="left", title_style="bold", expand=False)
        for column in ("instance", "weights from", "over"):
            table.add_column(column, no_wrap=column != "weights from")
        for column in ("weights s", "GB/s", "ready s"):
            table.add_column(column, justify="right", no_wrap=True)
        table.add_column("verified", no_wrap=True)
        names = {one.instance_id: one.name for one in facts.instances}
        failed = {check.name for check in facts.checks if not check.ok}
        for one in facts.instances:
            table.add_row(*(escape(cell) for cell in _row(one, names, failed)))
        self.console.print()
        self.console.print(table)

    def verdict(self, facts: Facts) -> None:
        for check in facts.checks:
            if not check.ok:
                self.console.print(f"[red]✗[/red] {escape(check.text)}", soft_wrap=True)
        if facts.ok:
            count, first = len(facts.instances), facts.instances[0]
            self.say(
                f"All {count} hold the same weights ({len(first.checksums)} tensors, by SGLang's own weight checker) "
                f"and give the same {sum(map(len, first.tokens))} greedy tokens. {facts.seconds:.0f} s in all.",
                "bold green",
            )
        else:
            self.say(f"The demo failed after {facts.seconds:.0f} s.", style="bold red")

    def failure(self, error: DemoFailed, servers: list[Server]) -> None:
        """Why, and the end of the guilty server's log."""
        self.console.print(f"[red]✗[/red] {escape(str(error))}", soft_wrap=True)
        if error.server is not None:
            self.say(f"── last lines of {error.server.log}", style="dim")
            self.say(error.server.last_lines())
        for server in servers:
            self.say(f"log of {server.name}: {server.log}", style="dim")

    def kept(self, what: str, path: Path) -> None:
        self.say(f"{what}: {path}", style="dim")


def size(nbytes: float) -> str:
    return f"{nbytes / 1e9:.1f} GB" if nbytes >= 1e9 else f"{nbytes / 1e6:.0f} MB"


def weights_line(one_name: str, server: Server, names: dict[str, str]) -> str:
    """What a server says of its weights, in a line."""
    assert server.status is not None
    weights = server.status.weights
    ready = f"{one_name} is ready after {server.ready_s or 0:.1f} s"
    if weights is None:
        return ready
    if weights.seed is not None:
        seed = names.get(weights.seed.instance_id, weights.seed.instance_id)
        rate = f"in {weights.seconds:.2f} s, {weights.gbps:.2f} GB/s over {weights.protocol}"
        return f"{ready}: {size(weights.nbytes)} from {seed} {rate}"
    if weights.fallback_reason == ELECTED:
        return f"{ready}: weights from disk in {weights.seconds:.2f} s, for it is the first"
    if weights.fallback_reason:
        detail = weights.fallback_detail or weights.fallback_reason
        return f"{ready}: weights from disk in {weights.seconds:.2f} s, because: {detail}"
    return f"{ready}: weights from disk in {weights.seconds:.2f} s"


def _row(one: InstanceFacts, names: dict[str, str], failed: set[str]) -> tuple[str, ...]:
    weights = one.weights
    if weights.seed is not None:
        seed = weights.seed.instance_id
        source = f"seed {names.get(seed, seed)}"
    elif weights.fallback_reason == ELECTED:
        source = "disk (the first)"
    elif weights.fallback_reason:
        source = f"disk (fallback: {weights.fallback_reason})"
    else:
        source = "disk"
    wrong = [check.partition(".")[2] for check in sorted(failed) if check.startswith(f"{one.name}.")]
    verified = (
        "the reference" if weights.fallback_reason in (None, ELECTED) and not weights.seed else "✓ weights, tokens"
    )
    return (
        one.name if one.gpu is None else f"{one.name} (GPU {one.gpu})",
        source,
        weights.protocol or "–",
        f"{weights.seconds:.2f}" if weights.seconds else "–",
        f"{weights.gbps:.2f}" if weights.gbps else "–",
        f"{one.ready_s:.1f}",
        f"✗ {', '.join(wrong)}" if wrong else verified,
    )
