"""Launching a file on two ranks, as users launch their training."""

import os
import subprocess
import sys
from pathlib import Path

TESTS = Path(__file__).parents[1]


def launch(script, *names, timeout_s=240):
    """Run `script` with `names` as its arguments on two processes of one thread."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(TESTS)}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", script, *names]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout_s)


def assert_passes_on_both_ranks(script, *names):
    result = launch(script, *names)
    assert result.returncode == 0, result.stderr[-4000:]
    for name in names:
        for rank in (0, 1):
            assert f"{name}: rank {rank} ok" in result.stdout
