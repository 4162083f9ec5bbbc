"""Two processes over gloo: what ranks.py checks, launched as users launch their training."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

HERE = Path(__file__).parent

pytestmark = pytest.mark.slow


def launch(*names):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(HERE.parent)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    return subprocess.run(
        [*command, HERE / "ranks.py", *names], env=environment, capture_output=True, text=True, timeout=240
    )


def test_ranks_agree():
    names = ("uneven_gather", "same_as_one_process", "error_reaches_all_ranks", "sharded_scorers")
    result = launch(*names)
    assert result.returncode == 0, result.stderr[-4000:]
    for name in names:
        for rank in (0, 1):
            assert f"{name}: rank {rank} ok" in result.stdout


def test_a_rank_that_fails_among_waiting_peers_ends_the_job():
    start = time.monotonic()
    result = launch("sharded_failure_ends_the_job")
    assert result.returncode != 0
    assert "the scorer's device is on fire" in result.stderr
    assert "failed while computing the features of scorer 'length'" in result.stderr
    assert time.monotonic() - start < 90  # 60 s at most for the peers, and the start of two processes
