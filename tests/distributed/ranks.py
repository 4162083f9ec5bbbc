"""What every rank of test_ranks.py runs under torchrun: checks by name, raising on the rank that finds them wrong."""

from collections import defaultdict

import numpy as np
import torch
from accelerate.data_loader import DataLoaderDispatcher
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification

from support.models import sample_sequences, tiny_model
from support.rank_checks import (
    RANKS,
    LengthScorer,
    batches_of,
    error_reaches_all_ranks,
    own_slice,
    ranks_that_disagree,
    rewarded,
    same_as_one_process,
    trainer_with,
    uneven_gather,
)
from support.samples import groups_of, sample
from support.two_ranks import run_checks
from treepack import (
    EBFTScorer,
    LogProbScorer,
    RewardModelScorer,
    ScoringCollator,
    StepPlanner,
    register_attention,
    score_step,
)
from treepack.scoring.trainer import LocalTrainer


def reward_model(**options):
    model = tiny_model(
        "qwen3", auto_class=AutoModelForSequenceClassification, attn_implementation="treepack", num_labels=1
    )
    return RewardModelScorer(model, token_budget=40, **options)


def log_prob(**options):  # its head is tied to the embedding, which is sharded with the base model
    model = tiny_model("qwen3", attn_implementation="treepack", tie_word_embeddings=True)
    return LogProbScorer(model, token_budget=40, **options)


def ebft(**options):
    return EBFTScorer(tiny_model("llama", attn_implementation="treepack"), token_budget=40, **options)


def sharded_scorers(accelerator):
    """FSDP2-sharded scorers give what whole ones give, with ranks of very different loads, step after step."""
    register_attention()
    rank = accelerator.process_index
    sequences = [ids.numpy() for ids in sample_sequences()]
    for make in (reward_model, log_prob, ebft):
        for ids_of_step in (sequences, sequences[:1]):
            stream = [
                {**sample(i, 0, len(ids_of_step), ids), "rewards": {}, "reference_ids": np.array([7, 8, 9])}
                for i, ids in enumerate(ids_of_step)
            ]
            whole, scorer = make(), make(shard=True)
            expected = score_step(LocalTrainer(whole.model, [whole]), batches_of(stream, [whole], steps=1, budget=100))
            trainer = trainer_with(accelerator, [scorer], torch.nn.Linear(1, 1))
            scorer.prepare(trainer)
            for _ in range(2):
                assert all(isinstance(p, DTensor) for p in scorer.model.base_model.parameters())
                batches = batches_of(stream, [scorer], steps=1, budget=100)
                scores = score_step(trainer, [own_slice(batch, rank) for batch in batches])
                if scores is not None:
                    np.testing.assert_allclose(scores.rewards, expected.rewards, atol=1e-5)


def sharded_failure_ends_the_job(accelerator):
    """Rank 1 fails where rank 0 waits for it: it must log why and end, so that the launcher ends rank 0."""
    mine = [own_slice(batch, accelerator.process_index) for batch in batches_of(groups_of([4]), [LengthScorer()])]
    score_step(trainer_with(accelerator, [LengthScorer(fail_on=1, sharded=True)]), mine)


def through_the_dispatcher(accelerator):
    """What accelerate's dispatcher brings to a rank is its slice of what rank 0 collated, also where that is empty."""
    rank = accelerator.process_index
    cases = {
        "no scorer": (rewarded([5, 3]), []),
        "no extras": (rewarded([5, 3]), [LengthScorer(extras=False)]),
        "no own rewards": ([{**s, "rewards": {}} for s in rewarded([5, 3])], [LengthScorer()]),
        "nothing at all": ([{**s, "rewards": {}} for s in rewarded([2])], []),
        "several": (rewarded([5, 3]), [LengthScorer(), LengthScorer(name="other", extras=False)]),
    }
    for name, (stream, scorers) in cases.items():
        shared = {"token_budget": 60, "scorers": scorers, "metrics": defaultdict(list)}
        planner = StepPlanner(stream if rank == 0 else [], num_processes=RANKS, steps=2, samples_per_row=0, **shared)
        collate = ScoringCollator(0, RANKS, **shared)
        loader = accelerator.prepare(DataLoader(planner, batch_size=1, collate_fn=collate, num_workers=0))
        assert isinstance(loader, DataLoaderDispatcher)
        got, expected = list(loader), batches_of(stream, scorers)
        assert len(got) == len(expected) == 2
        for batch, whole in zip(got, expected, strict=True):
            assert_same_tensors(batch, own_slice(whole, rank), name)
        scores = score_step(trainer_with(accelerator, scorers), got)
        if scores is not None:
            of_one = score_step(LocalTrainer(torch.nn.Identity(), scorers), expected)
            np.testing.assert_array_equal(scores.rewards, of_one.rewards)
            np.testing.assert_array_equal(scores.advantages, of_one.advantages)


def assert_same_tensors(got, expected, where):
    if isinstance(expected, dict):
        assert got.keys() == expected.keys(), where
        for key, value in expected.items():
            assert_same_tensors(got[key], value, f"{where}: {key}")
        return
    assert got.dtype == expected.dtype, where
    torch.testing.assert_close(got, expected, rtol=0, atol=0, equal_nan=True, msg=where)


if __name__ == "__main__":
    checks = (
        uneven_gather,
        same_as_one_process,
        error_reaches_all_ranks,
        ranks_that_disagree,
        through_the_dispatcher,
        sharded_scorers,
        sharded_failure_ends_the_job,
    )
    run_checks({check.__name__: check for check in checks})
