"""Two processes over gloo: what ranks.py checks."""

import time
from pathlib import Path

import pytest

from support.torchrun import assert_passes_on_both_ranks, launch

SCRIPT = Path(__file__).parent / "ranks.py"

pytestmark = pytest.mark.slow


def test_ranks_agree():
    assert_passes_on_both_ranks(
        SCRIPT,
        "uneven_gather",
        "same_as_one_process",
        "error_reaches_all_ranks",
        "ranks_that_disagree",
        "through_the_dispatcher",
        "sharded_scorers",
    )


def test_a_rank_that_fails_among_waiting_peers_ends_the_job():
    start = time.monotonic()
    result = launch(SCRIPT, "sharded_failure_ends_the_job")
    assert result.returncode != 0
    assert "the scorer's device is on fire" in result.stderr
    assert "failed while computing the features of scorer 'length'" in result.stderr
    assert time.monotonic() - start < 90  # 60 s at most for the peers, and the start of two processes
