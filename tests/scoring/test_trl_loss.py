"""TRL's own compute_loss runs unchanged on what the collator and score_step leave, with treepack's attention."""

from collections import defaultdict

import pytest
import torch
from trl.trainer.utils import add_fused_lm_head

from support.loss import ExactPolicy, gradient, loss_over_ranks
from support.models import VOCAB_SIZE, checkpoint_activations, tiny_model
from support.removals import REMOVED, collated, dropped_before_packing
from support.samples import groups_of
from treepack import ScoringCollator, StepPlanner, register_attention, score_step
from treepack.scoring.trainer import LocalTrainer, ScoringArgs


@pytest.fixture(scope="module")
def policy():
    register_attention()
    model = tiny_model("qwen3", attn_implementation="tree_fa3")
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    return model


def planned(rewards, sizes, *, ranks=2, steps=2, budget=60):
    stream = groups_of(sizes, length=12)
    stream = [
        {**s, "input_ids": s["input_ids"] % VOCAB_SIZE, "rewards": {"reward": r}}
        for s, r in zip(stream, rewards, strict=True)
    ]
    shared = {"token_budget": budget, "scorers": [], "metrics": defaultdict(list)}
    planner = StepPlanner(stream, num_processes=ranks, steps=steps, samples_per_row=0, **shared)
    return [ScoringCollator(0, ranks, **shared)([rows]) for rows in planner]


@pytest.mark.parametrize("ranks", [1, 2])
def test_masking_after_packing_equals_dropping_before(ranks):
    """In float64, for advantages rounded alike: what is left is the masking and its normalisation."""
    register_attention()
    policy, args = ExactPolicy(), ScoringArgs(mask_truncated_completions=True)
    batches = collated(VOCAB_SIZE, ranks)
    counted = [batch["global_n_tokens"].clone() for batch in batches]
    scores = score_step(LocalTrainer(policy, [], args), batches)
    assert {int(u) for u, reason in zip(scores.uids, scores.reasons, strict=True) if reason} == REMOVED
    assert set(scores.reasons) == {"", "truncated", "unscorable", "zero_advantage"}
    want_loss, want = gradient(policy, dropped_before_packing(VOCAB_SIZE, scores, ranks))
    got_loss, got = gradient(policy, batches)
    assert want.dtype == torch.float64
    assert got_loss == pytest.approx(want_loss, rel=1e-10)
    assert (got - want).norm() / want.norm() <= 1e-10
    for batch, tokens in zip(batches, counted, strict=True):
        batch["global_n_tokens"] = tokens  # masked, but normalised as before
    assert (gradient(policy, batches)[1] - want).norm() / want.norm() > 0.1


def test_masking_equals_dropping_under_trls_own_head(policy):
    """The same in float32 throughout, on the head that TRL fuses into its policies."""
    batches = collated(VOCAB_SIZE)
    scores = score_step(LocalTrainer(policy, [], ScoringArgs(mask_truncated_completions=True)), batches)
    want_loss, want = gradient(policy, dropped_before_packing(VOCAB_SIZE, scores))
    got_loss, got = gradient(policy, batches)
    assert got_loss == pytest.approx(want_loss, abs=1e-6)
    assert (got - want).norm() / want.norm() <= 1e-5
    assert want.norm() > 1e-3


@pytest.mark.parametrize("rewards", [[0.5] * 3, [0.0, 1.0, 2.0]])
def test_rows_without_a_loss_term(policy, rewards):
    """Cases 38 and 39: a filler row, and a micro-batch emptied whole, cost a finite zero loss with a graph."""
    batches = planned(rewards, [3], ranks=2, steps=2)
    score_step(LocalTrainer(policy, [], ScoringArgs()), batches)
    for batch in batches:
        loss, metrics = loss_over_ranks(policy, batch, len(batches))
        assert torch.isfinite(loss)
        assert loss.requires_grad
        assert all(value == value for name in ("ratio", "kl", "entropy") for value in metrics[name])  # not NaN
    loss, grad = gradient(policy, batches)
    assert torch.isfinite(grad).all()
    assert bool(grad.any()) is (rewards != [0.5] * 3)


def test_a_term_that_only_keeps_its_row_alive_is_neutral_in_trls_metrics(policy):
    batches = planned([0.5] * 3, [3], ranks=1, steps=1)
    score_step(LocalTrainer(policy, [], ScoringArgs()), batches)
    loss, metrics = loss_over_ranks(policy, batches[0], 1)
    assert loss == 0.0
    assert metrics["ratio"] == [1.0]
    assert metrics["kl"] == [0.0]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_gradients_are_those_without_checkpointing(use_reentrant):
    # case 46 (AReaL#889)
    register_attention()
    model = tiny_model("qwen3", attn_implementation="tree_fa3").train()
    add_fused_lm_head(model, outputs=("log_probs", "entropy"))
    batches = planned([0.0, 1.0, 2.0], [3])
    score_step(LocalTrainer(model, [], ScoringArgs()), batches)
    _, want = gradient(model, batches)
    checkpoint_activations(model, use_reentrant=use_reentrant)
    model.enable_input_require_grads()
    assert getattr(model, "is_activation_checkpointing", None) or model.is_gradient_checkpointing
    _, got = gradient(model, batches)
    assert want.any()
    assert torch.equal(got, want)
