"""The training that one process and two ranks run alike."""

import numpy as np
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from support.models import tiny_model
from support.trl_training import VOCAB_SIZE, QueuedRollouts, scoring_trainer
from treepack import EBFTScorer, RewardModelScorer, register_attention

SHAPE = {"groups_per_step": 2, "loss_normalization": "step", "token_budget": 128}


def reward_model():
    """A tiny random one that reads the policy's tokens."""
    register_attention()
    return tiny_model(
        "llama",
        auto_class=AutoModelForSequenceClassification,
        num_labels=1,
        vocab_size=VOCAB_SIZE,
        attn_implementation="treepack",
    )


def scorers_of(policy, *, shard):
    scored = reward_model()  # makes the attention known, too
    frozen = AutoModelForCausalLM.from_pretrained(policy, attn_implementation="treepack")
    return [
        RewardModelScorer(scored, token_budget=64, shard=shard),
        EBFTScorer(frozen, token_budget=64, shard=shard),
    ]


def three_steps(policy, folder, *, accumulation, shard=False, **more):
    """Three steps with a reward column, a reward model and EBFT; the trainer and each step's scores."""
    scores = []
    columns = {"reference_ids": np.array([7, 8, 9])}
    trainer = scoring_trainer(
        policy,
        folder,
        QueuedRollouts(16, columns=columns),
        scorers=scorers_of(policy, shard=shard),
        on_rollouts_scored=[scores.append],
        more={**SHAPE, "gradient_accumulation_steps": accumulation, **more},
    )
    trainer.train()
    return trainer, scores
