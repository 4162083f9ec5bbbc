"""Checks of score_step on two ranks: each rank runs them with its own accelerator and raises where it finds them wrong.

Under torchrun they run in processes (tests/distributed), in the default run in threads (tests/scoring/test_ranks.py).
"""

import json
import re
from collections import defaultdict

import numpy as np
import pytest
import torch
import torch.distributed as dist

from support.samples import group, groups_of
from treepack import ScoringCollator, StepPlanner, TrainerScorer, score_step
from treepack.scoring.collectives import gather_rows
from treepack.scoring.scorer import collate_packed, scored_sequences
from treepack.scoring.trainer import LocalTrainer, ScoringArgs

RANKS = 2


def own_slice(value, rank):
    """What the dispatcher gives to `rank`: nested dicts of tensors, cut in dim 0."""
    if isinstance(value, dict):
        return {key: own_slice(entry, rank) for key, entry in value.items()}
    return value[rank : rank + 1].clone()


def trainer_with(accelerator, scorers, model=None, **args):
    return LocalTrainer(model or torch.nn.Identity(), scorers, ScoringArgs(**args), accelerator)


class LengthScorer(TrainerScorer):
    """Feature: the sequence's length and last token; reward: their sum. `fail_on` makes that rank's forward raise."""

    def __init__(self, fail_on=None, sharded=False, *, name="length", extras=True):
        self.name, self.fail_on, self.sharded, self.extras, self.calls = name, fail_on, sharded, extras, 0

    def group_extras(self, samples):
        return [{"input_ids": np.arange(3 + len(samples))}] if self.extras else []

    def collate(self, rows, index):
        return collate_packed([scored_sequences(row, index) for row in rows], token_budget=20)

    def features(self, trainer, inputs):
        self.calls += 1
        if trainer.accelerator.process_index == self.fail_on:
            raise RuntimeError("the scorer's device is on fire")
        if self.sharded:  # what an all-gather of parameters does to a rank whose peer is gone
            dist.all_reduce(torch.zeros(1))
        offsets = inputs["offsets"][0, : int(inputs["sizes"][0, 3])]
        last = inputs["input_ids"][0, inputs["positions"][0, offsets[1:] - 1]]
        return inputs["uid"][0, : len(last)], torch.stack([offsets.diff(), last], dim=1).float()

    def group_rewards(self, sample_features, extra_features):
        assert extra_features.shape == (int(self.extras), 2)
        return sample_features.double().sum(1) - extra_features[:, 0].sum(), {}


def batches_of(stream, scorers, steps=2, budget=60):
    shared = {"token_budget": budget, "scorers": scorers, "metrics": defaultdict(list)}
    rows = list(StepPlanner(stream, num_processes=RANKS, steps=steps, samples_per_row=0, **shared))[:steps]
    return [ScoringCollator(0, RANKS, **shared)([micro_batch]) for micro_batch in rows]


def rewarded(sizes, seed=0, **more):
    rng = np.random.default_rng(seed)
    return [{**s, "rewards": {"reward": float(rng.integers(0, 4))}} for s in groups_of(sizes, **more)]


def uneven_gather(accelerator):
    rank = accelerator.process_index
    for sizes in ((0, 0), (3, 0), (0, 2), (4, 5)):
        rows = torch.full((sizes[rank], 2), rank, dtype=torch.int64)
        gathered = gather_rows(accelerator, rows)
        assert gathered[:, 0].tolist() == [0] * sizes[0] + [1] * sizes[1]
    with pytest.raises(
        ValueError, match=r"rows must have one shape on all ranks after dim 0, got \[\[1, 2\], \[1, 3\]\]"
    ):
        gather_rows(accelerator, torch.zeros(1, 2 + rank))


def same_as_one_process(accelerator):
    """Two ranks with a row each leave the same micro-batches and scores as one process with both rows, bit for bit."""
    rank = accelerator.process_index
    for sizes, length in (([5, 3, 4], 9), ([2], 8), ([6], 12)):
        stream = rewarded(sizes, length=length)
        whole, scorers = batches_of(stream, [LengthScorer()]), [LengthScorer()]
        expected = score_step(LocalTrainer(torch.nn.Identity(), [LengthScorer()]), whole)
        mine = [own_slice(batch, rank) for batch in batches_of(stream, [LengthScorer()])]
        scores = score_step(trainer_with(accelerator, scorers), mine)
        assert (scores is None) is (rank != 0)
        if scores is not None:
            assert scores.names == expected.names == ("reward", "length")
            np.testing.assert_array_equal(scores.rewards, expected.rewards)
            np.testing.assert_array_equal(scores.advantages, expected.advantages)
            assert scores.reasons == expected.reasons
        for batch, of_all in zip(mine, whole, strict=True):
            for key, tensor in of_all.items():
                assert torch.equal(batch[key], tensor[rank : rank + 1]), key
        calls = gather_rows(accelerator, torch.tensor([scorers[0].calls])).tolist()
        assert len(set(calls)) == 1, calls  # case 40: as many forwards on every rank, whatever it holds


def error_reaches_all_ranks(accelerator):
    stream = [*group(0, [8, 9, 12])]
    mine = [own_slice(batch, accelerator.process_index) for batch in batches_of(stream, [LengthScorer()])]
    scorer = LengthScorer(fail_on=1)
    with pytest.raises(RuntimeError, match="the scorer's device is on fire") as caught:
        score_step(trainer_with(accelerator, [scorer]), mine)
    if accelerator.process_index == 0:
        assert "rank 1 failed while computing the features of scorer 'length'" in str(caught.value)

    class Reckless(LengthScorer):
        def group_rewards(self, sample_features, extra_features):
            return np.zeros(len(sample_features) + accelerator.process_index), {}

    mine = [own_slice(batch, accelerator.process_index) for batch in batches_of(stream, [Reckless()])]
    with pytest.raises((RuntimeError, ValueError), match=r"must give one reward a sample, got shape \(4,\)") as caught:
        score_step(trainer_with(accelerator, [Reckless()]), mine)
    if accelerator.process_index == 0:
        assert "rank 1 failed while computing the group rewards of scorer 'length'" in str(caught.value)


def raised(accelerator, scorers, batches, **args):
    """The message of the ValueError that score_step raises, which every rank must have."""
    with pytest.raises(ValueError, match=r"rank") as caught:
        score_step(trainer_with(accelerator, scorers, **args), batches)
    return str(caught.value)


def ranks_that_disagree(accelerator):
    """Whatever rank 1 does otherwise is an error on both ranks that says what, and leaves them able to go on."""
    rank = accelerator.process_index
    odd = rank == 1

    def mine(scorers=(), **options):
        return [own_slice(batch, rank) for batch in batches_of(rewarded([5, 3]), list(scorers), **options)]

    batches = mine()
    message = raised(accelerator, [], batches[:1] if odd else batches)
    assert "the number of micro-batches must be the same on every rank, got 2 on rank 0, 1 on rank 1" in message
    message = raised(accelerator, [], batches[::-1] if odd else batches)
    assert message.startswith("the micro-batches' tokens must be the same on every rank, got [")

    for option, (usual, other) in {
        "advantage_estimator": ("grpo", "rloo"),
        "scale_rewards": ("group", "none"),
        "reward_weights": ([1.0], [2.0]),
        "mask_truncated_completions": (False, True),
        "loss_normalization": ("microbatch", "step"),
    }.items():
        message = raised(accelerator, [], mine(), **{option: other if odd else usual})
        got = f"{json.dumps(usual)} on rank 0, {json.dumps(other)} on rank 1"
        assert message == f"{option} must be the same on every rank, got {got}"

    pair = [LengthScorer(), LengthScorer(name="other")]
    message = raised(accelerator, pair[::-1] if odd else pair, mine(pair))
    assert message.startswith("scorers must be the same on every rank, got [")
    assert 'LengthScorer)"] on rank 0, ["other' in message
    message = raised(accelerator, [LengthScorer(sharded=odd)], mine([LengthScorer()]))
    assert 'got ["length (LengthScorer)"] on rank 0, ["length (sharded LengthScorer)"] on rank 1' in message
    with pytest.raises(ValueError if odd else RuntimeError, match="got 1 for the 2 of micro-batch 0") as caught:
        score_step(trainer_with(accelerator, pair[:1] if odd else pair), mine(pair))
    assert odd or "rank 1 failed while reading the micro-batches: ValueError: scorers must be" in str(caught.value)

    message = raised(accelerator, [], [own_slice(batch, 0) for batch in batches_of(rewarded([5, 3]), [])])
    assert message == "uid must be unique in a step, got uid 0 on rank 0 (micro-batch 0) and rank 1 (micro-batch 0)"

    class Wide(LengthScorer):
        def features(self, trainer, inputs):
            uids, features = super().features(trainer, inputs)
            return uids, features[:, : 1 + odd]

    message = raised(accelerator, [Wide()], mine([Wide()]))
    assert message.startswith("features of scorer 'length' must have one shape on all ranks after dim 0, got [[")

    class Moody(LengthScorer):
        def group_rewards(self, sample_features, extra_features):
            rewards, metrics = super().group_rewards(sample_features, extra_features)
            return rewards + rank, metrics

    message = raised(accelerator, [Moody()], mine([Moody()]))
    assert re.fullmatch(
        r"scorer 'length' must give the same rewards on every rank, got (.+) on rank 0 and (.+) on rank 1 for uid 0",
        message,
    )
    scores = score_step(trainer_with(accelerator, [LengthScorer()]), mine([LengthScorer()]))
    assert (scores is not None) is (rank == 0)
