"""score_step refuses what cannot be scored, and says what is wrong."""

import re

import numpy as np
import pytest
import torch

from support.steps import SumScorer, planned_batches, rewarded, trainer_with
from treepack import score_step
from treepack.scoring.trainer import ScoringArgs


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (
            lambda f: np.zeros(len(f) + 1),
            r"must give one reward a sample, got shape \(3,\) for the 2 samples",
        ),
        (lambda f: np.full(len(f), np.inf), "scorer 'sum' must give finite rewards or NaN"),
    ],
)
def test_wrong_rewards(reward, message):
    scorer = SumScorer(reward=reward)
    batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), scorers=[scorer])
    with pytest.raises(ValueError, match=message):
        score_step(trainer_with(scorer), batches)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda u, f: (u[:1], f[:1]), "must give a feature of every sequence, got none of uid"),
        (lambda u, f: (torch.cat([u, u]), torch.cat([f, f])), "must give one feature a sequence, got uid . twice"),
        (lambda u, f: (u, f[:, 0]), r"must give uids \(S,\) and features \(S, F\)"),
        (lambda u, f: (u, f[:, : 1 + int(u.min() > 0)]), "must give features of one width everywhere"),
    ],
)
def test_wrong_features(change, message):
    class Wrong(SumScorer):
        def features(self, trainer, inputs):
            return change(*super().features(trainer, inputs))

    scorer = Wrong()
    batches, _ = planned_batches(rewarded([4, 2], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]), ranks=2, steps=1, scorers=[scorer])
    with pytest.raises(ValueError, match=message):
        score_step(trainer_with(scorer), batches)


def test_weights_must_match_the_columns():
    batches, _ = planned_batches(rewarded([2], [0.0, 1.0]))
    with pytest.raises(ValueError, match=r"one weight for each of \['reward'\], got \[1.0, 2.0\]"):
        score_step(trainer_with(reward_weights=[1.0, 2.0]), batches)


def test_batches_without_scoring():
    with pytest.raises(ValueError, match="batches must be micro-batches of ScoringCollator"):
        score_step(trainer_with(), [])
    with pytest.raises(ValueError, match="batches must be micro-batches of ScoringCollator"):
        score_step(trainer_with(), [{"input_ids": torch.zeros(1)}])


def test_a_group_split_over_two_steps():
    batches, rows = planned_batches(rewarded([5], [0.0, 1.0, 2.0, 3.0, 4.0], length=12), ranks=1, budget=40)
    here = sorted(s["uid"] for s in rows[0][0].samples)
    assert 0 < len(here) < 5
    message = f"a group must be whole in a step, got {len(here)} of the 5 samples of group 0: uids {here}"
    with pytest.raises(ValueError, match=re.escape(message)):
        score_step(trainer_with(), batches[:1])


def test_a_sample_that_is_there_twice():
    batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), ranks=1, steps=2)
    again = [{**batch, "scoring": dict(batch["scoring"])} for batch in batches[:1]]
    message = r"uid must be unique in a step, got uid 0 on rank 0 \(micro-batch 0\) and rank 0 \(micro-batch 2\)"
    with pytest.raises(ValueError, match=message):
        score_step(trainer_with(), batches + again)


def test_scorers_that_the_collator_did_not_have():
    for of_collator, of_trainer in (([], [SumScorer()]), ([SumScorer()], [])):
        batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), scorers=of_collator)
        message = (
            f"must be those the .* collated with, got {len(of_trainer)} for the {len(of_collator)} of micro-batch 0"
        )
        with pytest.raises(ValueError, match=message):
            score_step(trainer_with(*of_trainer), batches)


@pytest.mark.parametrize("name", ["advantage_estimator", "scale_rewards", "loss_normalization"])
def test_bad_arguments(name):
    with pytest.raises(ValueError, match=f"{name} must be one of .*got 'nonsense'"):
        ScoringArgs(**{name: "nonsense"})
