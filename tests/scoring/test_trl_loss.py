"""TRL's own compute_loss runs unchanged on what the collator and score_step leave, with treepack's attention."""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from trl.experimental.async_grpo.async_grpo_trainer import AsyncGRPOTrainer
from trl.trainer.utils import add_fused_lm_head

from support.models import VOCAB_SIZE, tiny_model
from support.samples import groups_of, sample
from treepack import ScoringCollator, StepPlanner, register_attention, score_step
from treepack.scoring.trainer import LocalTrainer, ScoringArgs


class OneProcess:
    """accelerate's collectives on one process that stands for `num_processes` ranks, one after the other."""

    def __init__(self, num_processes):
        self.num_processes = num_processes

    def reduce(self, tensor, reduction):
        return tensor

    def gather(self, tensor):
        return tensor


@pytest.fixture(scope="module")
def policy():
    register_attention()
    model = tiny_model("qwen3", attn_implementation="tree_fa3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def trl_loss(model, batch, grad_accumulation):
    ranks = len(batch["token_index"])
    trainer = SimpleNamespace(
        accelerator=OneProcess(ranks),
        aux_loss_enabled=False,
        epsilon_low=0.2,
        epsilon_high=0.2,
        current_gradient_accumulation_steps=grad_accumulation,
        _metrics={"train": defaultdict(list)},
        _step_forward_tokens=0.0,
        _step_trained_tokens=0.0,
        _step_seq_len_weighted=0.0,
        _step_samples=0.0,
        _step_forward_s=0.0,
    )
    rows = [{key: tensor[r : r + 1] for key, tensor in batch.items()} for r in range(ranks)]
    return sum(AsyncGRPOTrainer.compute_loss(trainer, model, row) for row in rows) / ranks, trainer._metrics["train"]


def gradient(model, batches):
    model.zero_grad()
    loss = sum(trl_loss(model, batch, len(batches))[0] for batch in batches)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


def planned(rewards, sizes, *, ranks=2, steps=2, budget=60):
    stream = groups_of(sizes, length=12)
    stream = [
        {**s, "input_ids": s["input_ids"] % VOCAB_SIZE, "rewards": {"reward": r}}
        for s, r in zip(stream, rewards, strict=True)
    ]
    shared = {"token_budget": budget, "scorers": [], "metrics": defaultdict(list)}
    rows = list(StepPlanner(stream, num_processes=ranks, steps=steps, samples_per_row=0, **shared))
    return [ScoringCollator(0, ranks, **shared)([micro_batch]) for micro_batch in rows], rows


def test_removal_equals_dropping_before_packing(policy):
    rewards = [0.5, 0.5, 0.5, 0.0, 1.5, 2.0, float("nan"), 3.0, 1.0]
    batches, rows = planned(rewards, [3, 4, 2], ranks=2, steps=2)
    scores = score_step(LocalTrainer(policy, [], ScoringArgs()), batches)
    removed = {int(u) for u, reason in zip(scores.uids, scores.reasons, strict=True) if reason}
    assert removed == {0, 1, 2, 6}
    of_uid = dict(zip(scores.uids.tolist(), scores.advantages, strict=True))
    reference = []
    for micro_batch in rows:
        kept = [type(row)() for row in micro_batch]
        for new, row in zip(kept, micro_batch, strict=True):
            for s in row.samples:
                if s["uid"] >= 0 and s["uid"] not in removed:
                    new.add({k: v for k, v in s.items() if k != "uid"} | {"advantage": of_uid[s["uid"]]})
            if not new.samples:  # TRL packs no empty row: one that trains nothing stands for it
                untrained = sample(0, 0, 1, [1]) | {"advantage": 0.0}
                new.add({k: v for k, v in untrained.items() if k != "uid"})
        reference.append(ScoringCollator(0, 2)([kept]))
    want_loss, want = gradient(policy, reference)
    got_loss, got = gradient(policy, batches)
    assert got_loss == pytest.approx(want_loss, abs=1e-6)
    assert (got - want).norm() / want.norm() <= 1e-5
    assert want.norm() > 1e-3


@pytest.mark.parametrize("rewards", [[0.5] * 3, [0.0, 1.0, 2.0]])
def test_rows_without_a_loss_term(policy, rewards):
    """Cases 38 and 39: a filler row, and a micro-batch emptied whole, cost a finite zero loss with a graph."""
    batches, _ = planned(rewards, [3], ranks=2, steps=2)
    score_step(LocalTrainer(policy, [], ScoringArgs()), batches)
    for batch in batches:
        loss, metrics = trl_loss(policy, batch, len(batches))
        assert torch.isfinite(loss)
        assert loss.requires_grad
        assert all(value == value for name in ("ratio", "kl", "entropy") for value in metrics[name])  # not NaN
    loss, grad = gradient(policy, batches)
    assert torch.isfinite(grad).all()
    assert bool(grad.any()) is (rewards != [0.5] * 3)


def test_a_term_that_only_keeps_its_row_alive_is_neutral_in_trls_metrics(policy):
    batches, _ = planned([0.5] * 3, [3], ranks=1, steps=1)
    score_step(LocalTrainer(policy, [], ScoringArgs()), batches)
    loss, metrics = trl_loss(policy, batches[0], 1)
    assert loss == 0.0
    assert metrics["ratio"] == [1.0]
    assert metrics["kl"] == [0.0]
