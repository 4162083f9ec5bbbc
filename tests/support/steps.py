"""One optimizer step in one process: its micro-batches, a scorer whose rewards are easily told, a policy of tables."""

from collections import defaultdict
from itertools import pairwise

import numpy as np
import torch

from support.samples import groups_of
from treepack import ScoringCollator, StepPlanner, TrainerScorer
from treepack.scoring.scorer import collate_packed, scored_sequences
from treepack.scoring.trainer import LocalTrainer, ScoringArgs

VOCAB = 1000


class SumScorer(TrainerScorer):
    """Feature: (sum of the token ids, length) of a sequence; reward: that sum, less those of its group's extras."""

    def __init__(self, name="sum", *, token_budget=64, extras=0, reward=None):
        self.name, self.token_budget, self.extras, self.reward = name, token_budget, extras, reward
        self.calls = []

    def group_extras(self, samples):
        return [{"input_ids": np.array([100 + i, samples[0]["group_id"]])} for i in range(self.extras)]

    def collate(self, rows, index):
        return collate_packed([scored_sequences(row, index) for row in rows], token_budget=self.token_budget)

    def features(self, trainer, inputs):
        assert not torch.is_grad_enabled()
        assert not trainer.model.training
        count = int(inputs["sizes"][0, 3]) - 1
        bounds = inputs["offsets"][0, : count + 1]
        tokens = inputs["input_ids"][0, inputs["positions"][0, : bounds[-1]]]
        sums = torch.stack([tokens[a:b].sum() for a, b in pairwise(bounds)])
        self.calls.append(inputs["uid"][0, :count].tolist())
        return inputs["uid"][0, :count], torch.stack([sums, bounds.diff()], dim=1).float()

    def group_rewards(self, sample_features, extra_features):
        if self.reward is not None:
            return self.reward(sample_features), {}
        reward = sample_features[:, 0].double() - extra_features[:, 0].double().sum()
        return reward, {"sum/extras": float(len(extra_features))}


class Logits(torch.nn.Module):
    """A policy whose prediction depends on the token it follows and on its depth: no attention, exact in float64."""

    def __init__(self):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = torch.nn.Parameter(torch.randn(VOCAB, VOCAB, generator=generator, dtype=torch.float64) / 30)
        self.depth = torch.nn.Parameter(torch.randn(64, VOCAB, generator=generator, dtype=torch.float64) / 30)

    def forward(self, input_ids, position_ids):
        return self.table[input_ids] + self.depth[position_ids]


def planned_batches(samples, *, ranks=2, steps=2, budget=40, scorers=(), metrics=None):
    """The micro-batches of the first planned step."""
    metrics = defaultdict(list) if metrics is None else metrics
    plan = StepPlanner(
        samples,
        num_processes=ranks,
        steps=steps,
        token_budget=budget,
        samples_per_row=0,
        scorers=scorers,
        metrics=metrics,
    )
    collator = ScoringCollator(0, ranks, metrics=metrics, token_budget=budget, scorers=scorers)
    rows = list(plan)[:steps]
    return [collator([micro_batch]) for micro_batch in rows], rows


def trainer_with(*scorers, **args):
    return LocalTrainer(Logits(), scorers, ScoringArgs(**args))


def rewarded(sizes, rewards, **more):
    stream = groups_of(sizes, **more)
    return [{**s, "rewards": {"reward": r}} for s, r in zip(stream, rewards, strict=True)]
