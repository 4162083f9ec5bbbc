"""Where the time of a job goes, and Ctrl-C at the right moment."""

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

PHASES = ("load", "plan", "pack", "forward", "rewards", "compare", "write")


class PhaseClock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self.seconds[name] += seconds


@contextmanager
def held_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, so that what it writes is whole."""
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt
