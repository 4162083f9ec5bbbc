"""Times on a GPU: medians by device events with a cold L2, peak memory, and the device's own ceilings.

Without a GPU the host's clock takes their place, so that a dry run goes the same way.
"""

import statistics
import time
from collections.abc import Callable

import torch

# Larger than any L2, so that filling it evicts everything; and long enough that launches run ahead of the device.
_FLUSH_BYTES = 2**30
_MIN_ROUNDS, _MAX_ROUNDS = 5, 50


class DeviceTimer:
    """Times calls on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._flush = torch.empty(_FLUSH_BYTES if device.type == "cuda" else 1, dtype=torch.uint8, device=device)

    def median_ms(self, run: Callable[[], object], *, budget_s: float = 0.3) -> float:
        """Median time of a call, each with a cold L2; about `budget_s` seconds of calls after two to warm up."""
        if self.device.type == "cpu":
            return self.wall_ms(run)
        run()
        first = self.wall_ms(run)
        rounds = max(_MIN_ROUNDS, min(_MAX_ROUNDS, int(budget_s * 1e3 / max(first, 1e-3))))
        events = []
        for _ in range(rounds):
            self._flush.zero_()
            start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            run()
            stop.record()
            events.append((start, stop))
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(stop) for start, stop in events)

    def wall_ms(self, run: Callable[[], object]) -> float:
        """Time on the host's clock, from an idle device to an idle device."""
        self.synchronize()
        start = time.perf_counter()
        run()
        self.synchronize()
        return (time.perf_counter() - start) * 1e3

    def peak_gb(self, run: Callable[[], object]) -> float:
        """Memory that a call allocates at its peak, in GB beyond what was allocated before; 0 on a CPU."""
        if self.device.type == "cpu":
            run()
            return 0.0
        self.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        self.synchronize()
        return (torch.cuda.max_memory_allocated() - before) / 1e9

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def matmul_tflops(self, size: int = 8192) -> float:
        """Rate of a square bf16 matrix product on random data."""
        size = size if self.device.type == "cuda" else 64
        a, b = (torch.randn(size, size, device=self.device, dtype=torch.bfloat16) for _ in range(2))
        return 2 * size**3 / self.median_ms(lambda: a @ b) / 1e9

    def copy_gb_per_s(self, num_bytes: int = 4 * 10**9) -> float:
        """Rate of a copy on the device, bytes read and bytes written."""
        num_bytes = num_bytes if self.device.type == "cuda" else 10**6
        source = torch.randint(255, (num_bytes,), dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * num_bytes / self.median_ms(lambda: target.copy_(source)) / 1e6
