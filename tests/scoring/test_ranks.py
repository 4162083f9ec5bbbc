"""score_step on two ranks that are threads: equal to one process, errors on both, and disagreements that are named."""

import pytest

from support.rank_checks import error_reaches_all_ranks, ranks_that_disagree, same_as_one_process, uneven_gather
from support.thread_ranks import run_on_ranks


@pytest.mark.parametrize("check", [uneven_gather, same_as_one_process, error_reaches_all_ranks, ranks_that_disagree])
def test_on_two_ranks(check):
    run_on_ranks(check)
