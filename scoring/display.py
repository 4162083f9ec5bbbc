"""What a long job shows while it runs: a progress bar on a terminal, plain lines elsewhere; always on stderr."""

import sys
import time
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn

LINE_EVERY_S = 5.0


class Display(Protocol):
    """Where a job says what it does. Counts are samples."""

    def phase(self, text: str) -> None:
        """A new phase begins."""

    def advance(self, done: int, total: int) -> None:
        """`done` of `total` samples are through; the first call starts the clock."""


class BarDisplay:
    """A progress bar with the time left, for a terminal; use as a context manager."""

    def __init__(self, console: Console):
        columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(20), MofNCompleteColumn())
        self._progress = Progress(*columns, TextColumn("{task.fields[left]}"), console=console, transient=True)
        self._task = self._progress.add_task("starting", total=None, left="")
        self._left = TimeLeft()

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

    def advance(self, done: int, total: int) -> None:
        """Move the bar."""
        left = f"samples, {self._left(done, total)}"
        self._progress.update(self._task, completed=done, total=total, left=left)


class LineDisplay:
    """A line at each phase and every few seconds, for logs; use as a context manager."""

    def __init__(self) -> None:
        self._started = self._last_line = time.monotonic()
        self._left = TimeLeft()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def phase(self, text: str) -> None:
        """Print the phase."""
        self._print(text)

    def advance(self, done: int, total: int) -> None:
        """Print how far the job is and the time left, but not more often than every few seconds."""
        left = self._left(done, total)
        if 0 < done < total and time.monotonic() - self._last_line >= LINE_EVERY_S:
            self._print(f"{done} of {total} samples, {left}")

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        print(f"[{self._last_line - self._started:6.1f} s] {text}", file=sys.stderr, flush=True)


class TimeLeft:
    """Estimates the time left from the mean pace since the first call."""

    def __init__(self) -> None:
        self._first_call: float | None = None

    def __call__(self, done: int, total: int) -> str:
        """The time left, in words."""
        now = time.monotonic()
        if self._first_call is None:
            self._first_call = now
        if not done:
            return "time left unknown"
        seconds = round((now - self._first_call) / done * (total - done))
        return f"{seconds // 60} min {seconds % 60} s left" if seconds >= 60 else f"{seconds} s left"


def make_display(*, quiet: bool = False) -> BarDisplay | LineDisplay:
    """The display that suits stderr; `quiet` shows nothing."""
    console = Console(stderr=True, quiet=quiet)
    return BarDisplay(console) if quiet or console.is_terminal else LineDisplay()
