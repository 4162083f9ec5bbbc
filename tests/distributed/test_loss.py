"""TRL's loss on two processes over gloo, under DDP and FSDP2: what loss_ranks.py checks."""

from pathlib import Path

import pytest

from support.torchrun import assert_passes_on_both_ranks

pytestmark = pytest.mark.slow


def test_masking_after_packing_equals_dropping_before():
    assert_passes_on_both_ranks(Path(__file__).parent / "loss_ranks.py", "masking_equals_dropping")
