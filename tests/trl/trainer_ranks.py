"""What every rank of test_trainer_ranks.py runs under torchrun: one kind of training.

Arguments: the kind, the policy's folder, a folder to write to.
"""

import json
import sys

import torch
from accelerate.utils import DistributedType
from torch.distributed.tensor import DTensor

from support.fsdp_on_cpu import use_fsdp
from support.trl_scored import three_steps
from support.trl_training import QueuedRollouts, leave_ranks, losses_of, scoring_trainer
from treepack import TrainerScorer
from treepack.scoring.scorer import collate_packed, scored_sequences


class FailsOnRank1(TrainerScorer):
    name = "fails"

    def collate(self, rows, index):
        return collate_packed([scored_sequences(row, index) for row in rows], token_budget=64)

    def features(self, trainer, inputs):
        if trainer.accelerator.process_index == 1:
            raise RuntimeError("rank 1 has no features")
        return inputs["uid"][0], inputs["uid"][0][:, None].float()

    def group_rewards(self, sample_features, extra_features):
        return sample_features[:, 0].double(), {}


def train_alike(kind, policy, folder):
    """The training of `three_steps`; the main process prints what it came to."""
    shape = {"accumulation": 2, "save_strategy": "steps", "save_steps": 3}
    trainer, scores = three_steps(policy, folder, shard=kind == "fsdp", **shape)
    accelerator = trainer.accelerator
    if kind == "fsdp":
        assert accelerator.distributed_type == DistributedType.FSDP
        for model in (trainer.model, trainer.scorers[0].model):
            assert any(isinstance(parameter, DTensor) for parameter in model.parameters())
    else:
        assert accelerator.distributed_type == DistributedType.MULTI_CPU
    assert accelerator.num_processes == 2
    assert len(scores) == (3 if accelerator.is_main_process else 0)
    if accelerator.is_main_process:
        advantages = [step.advantages.tolist() for step in scores]
        print(json.dumps({"losses": losses_of(trainer), "advantages": advantages}), flush=True)


def fail_on_one_rank(policy, folder):
    """A scorer that fails on rank 1; each rank prints the error it gets."""
    trainer = scoring_trainer(policy, folder, QueuedRollouts(60), scorers=[FailsOnRank1()])
    try:
        trainer.train()
    except RuntimeError as error:
        print(f"rank {trainer.accelerator.process_index}: {error}", flush=True)


def main(kind, policy, folder):
    torch.set_num_threads(1)
    if kind == "fsdp":
        use_fsdp()
    train_alike(kind, policy, folder)
    if kind == "ddp":
        fail_on_one_rank(policy, f"{folder}/failure")
    leave_ranks()


if __name__ == "__main__":
    main(*sys.argv[1:])
