"""Ranks as threads of this process, whose collectives wait for each other: seconds cheaper than processes."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext

import torch

from support.rank_checks import RANKS

DEADLINE_S = 30.0


class ThreadAccelerator:
    """One rank's collectives. A rank that its peers wait for in vain breaks the barrier for all."""

    device = torch.device("cpu")
    num_processes = RANKS

    def __init__(self, process_index, barrier, slots):
        self.process_index, self._barrier, self._slots = process_index, barrier, slots
        self.is_main_process = process_index == 0

    def autocast(self):
        return nullcontext()

    def gather(self, tensor):
        self._slots[self.process_index] = tensor
        self._barrier.wait(DEADLINE_S)
        gathered = torch.cat(self._slots)
        self._barrier.wait(DEADLINE_S)  # nobody writes the next ones before all have read these
        return gathered


def run_on_ranks(check):
    """Run `check(accelerator)` on every rank; what a rank raises is raised here."""
    barrier, slots = threading.Barrier(RANKS), [None] * RANKS

    def rank(process_index):
        try:
            check(ThreadAccelerator(process_index, barrier, slots))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(RANKS) as pool:
        ranks = [pool.submit(rank, process_index) for process_index in range(RANKS)]
    errors = [error for error in (future.exception() for future in ranks) if error is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
