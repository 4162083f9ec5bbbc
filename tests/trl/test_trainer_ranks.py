"""The trainer on two ranks, under DDP and FSDP2, beside one process; and an error on one rank."""

import json
from pathlib import Path

import pytest

from support.torchrun import launch
from support.trl_scored import three_steps
from support.trl_training import losses_of, save_policy
from treepack.scoring.trl_hooks import PROGRESS_FILE

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
]

SCRIPT = Path(__file__).parent / "trainer_ranks.py"


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture(scope="module")
def one_process(policy, tmp_path_factory):
    trainer, scores = three_steps(policy, tmp_path_factory.mktemp("one"), accumulation=4)
    return losses_of(trainer), [step.advantages.tolist() for step in scores]


@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_two_ranks_train_as_one(policy, one_process, tmp_path, kind):
    """With reward model and EBFT scorers, which FSDP2 shards like the policy."""
    result = launch(SCRIPT, kind, policy, str(tmp_path))
    assert result.returncode == 0, result.stderr[-4000:]
    line = next(line for line in result.stdout.splitlines() if line.startswith('{"losses"'))
    got = json.loads(line)
    losses, advantages = one_process
    for step, expected in zip(got["advantages"], advantages, strict=True):
        assert step == pytest.approx(expected, abs=1e-4)
    assert got["losses"] == pytest.approx(losses, abs=1e-4)
    state = json.loads((tmp_path / "checkpoint-3" / PROGRESS_FILE).read_text())
    assert state["watermark"] == 6
    if kind == "ddp":  # then a scorer fails on one rank
        assert "rank 1: rank 1 has no features" in result.stdout
        assert "rank 0: rank 1 failed while computing the features of scorer 'fails': " in result.stdout
