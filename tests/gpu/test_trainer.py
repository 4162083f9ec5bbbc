"""ScoringGRPOTrainer on a GPU: the losses of a CPU, with a reward model beside the policy, and bf16 as TRL trains."""

import pytest
import torch

from support.cuda import needs_gpu

pytest.importorskip("trl", reason="needs the extra `trl`")

from support.trl_scored import reward_model
from support.trl_training import QueuedRollouts, losses_of, save_policy, scoring_trainer
from treepack import RewardModelScorer

pytestmark = [needs_gpu, pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")]


def train(folder, device, **more):
    trainer = scoring_trainer(
        save_policy(folder / "policy"),
        folder,
        QueuedRollouts(20),
        scorers=[RewardModelScorer(reward_model().to(device), token_budget=64)],
        more={"use_cpu": device == "cpu", **more},
    )
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    return losses_of(trainer)


def test_losses_are_those_of_a_cpu(tmp_path):
    on_gpu = train(tmp_path / "gpu", "cuda")
    assert on_gpu == pytest.approx(train(tmp_path / "cpu", "cpu"), abs=2e-3)


def test_bf16_with_checkpointing(tmp_path):
    losses = train(tmp_path, "cuda", bf16=True, gradient_checkpointing=True, deterministic=True)
    assert torch.isfinite(torch.tensor(losses)).all()
    assert max(map(abs, losses)) > 0.01
