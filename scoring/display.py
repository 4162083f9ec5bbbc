"""What a long job shows while it runs: a progress bar on a terminal, plain lines elsewhere; always on stderr."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeRemainingColumn

LINE_EVERY_S = 5.0


class Display(Protocol):
    """Where a job says what it does. Counts are samples."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def advance(self, done: int, total: int, detail: str) -> None:
        """`done` of `total` samples are through the current phase."""


class BarDisplay:
    """A progress bar with the time left, for a terminal; use as a context manager."""

    def __init__(self, console: Console):
        self._progress = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("samples, left:"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("starting", total=None)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def phase(self, text: str) -> None:
        """Show the phase beside the bar."""
        self._progress.update(self._task, description=text, refresh=True)

    def advance(self, done: int, total: int, detail: str) -> None:
        """Move the bar."""
        self._progress.update(self._task, description=detail, completed=done, total=total, refresh=True)


class LineDisplay:
    """A line at each phase and every few seconds, for logs; use as a context manager."""

    def __init__(self) -> None:
        self._started = self._last_line = time.monotonic()
        self._counting_since: float | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def phase(self, text: str) -> None:
        """Print the phase."""
        self._print(text)

    def advance(self, done: int, total: int, detail: str) -> None:
        """Print how far the job is and the time left, but not more often than every few seconds."""
        now = time.monotonic()
        if self._counting_since is None:
            self._counting_since = now
        if done and done < total and now - self._last_line >= LINE_EVERY_S:
            left_s = (now - self._counting_since) / done * (total - done)
            self._print(f"{detail}: {done} of {total} samples, {left_s:.0f} s left")

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(f"[{self._last_line - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)


def make_display() -> BarDisplay | LineDisplay:
    """The display that suits stderr."""
    console = Console(stderr=True)
    return BarDisplay(console) if console.is_terminal else LineDisplay()
