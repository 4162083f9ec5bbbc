"""Running one scorer over one group, from planning to rewards."""

from collections import defaultdict

from treepack import ScoringCollator, StepPlanner, score_step
from treepack.scoring.trainer import LocalTrainer


def score_group(scorer, samples, *, ranks=2, steps=1, token_budget=400):
    """The scores of `samples`, one optimizer step, by `scorer` alone: their reward column and its metrics."""
    shared = {"token_budget": token_budget, "scorers": [scorer], "metrics": defaultdict(list)}
    plan = StepPlanner(samples, num_processes=ranks, steps=steps, samples_per_row=0, **shared)
    batches = [ScoringCollator(0, ranks, **shared)([rows]) for rows in plan]
    assert len(batches) == steps
    scores = score_step(LocalTrainer(scorer.model, [scorer]), batches)
    assert scores.names == (scorer.name,)
    assert scores.uids.tolist() == [sample["uid"] for sample in samples]
    return scores.rewards[:, 0], scores.metrics
