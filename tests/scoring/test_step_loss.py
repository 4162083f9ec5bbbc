"""score_step and the loss in one process: what leaves it, and that this equals dropping it before packing."""

import numpy as np
import pytest
import torch

from support.samples import sample
from support.steps import Logits, SumScorer, planned_batches, rewarded, trainer_with
from treepack import ScoringCollator, score_step


def loss_of(model, batch, grad_accumulation):
    """TRL 1.16's loss of one micro-batch with all W rows in this process, averaged over ranks as DDP does."""
    ranks = len(batch["token_index"])
    total = torch.zeros((), dtype=torch.float64)
    for row in range(ranks):
        live = batch["token_index"][row] >= 0
        kept = batch["attention_mask"][row].bool()
        logits = model(batch["input_ids"][row][kept], batch["position_ids"][row][kept])
        labels = batch["shift_labels"][row][kept]
        log_probs = torch.log_softmax(logits, -1).gather(1, labels.clamp(min=0)[:, None])[:, 0]
        log_probs = torch.where(labels >= 0, log_probs, 0.0)[batch["token_index"][row][live]]
        advantages = batch["advantages"][row][live].double()
        assert torch.isfinite(advantages).all()
        ratio = torch.exp(log_probs - batch["old_log_probs"][row][live])
        loss = -torch.min(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages).sum()
        per_rank = (batch["global_n_tokens"][row].double() / ranks).clamp(min=1.0)
        total = total + loss / per_rank / grad_accumulation / ranks
    return total


def gradient(model, batches):
    model.zero_grad()
    loss = sum(loss_of(model, batch, len(batches)) for batch in batches)
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in model.parameters()])


REMOVALS = {
    "zero_advantage": {"rewards": [0.5, 0.5, 0.5, 0.5, 3.0, 5.0, 9.0, 1.0, 0.0], "drop": {0, 1, 2, 3}},
    "unscorable": {"rewards": [1.0, float("nan"), 0.0, float("nan"), 3.0, 5.0, 9.0, 1.0, 0.0], "drop": {1, 3}},
    "truncated": {"rewards": [1.0, 0.0, 0.5, 0.2, 3.0, 5.0, 9.0, 1.0, 0.0], "drop": {0, 2, 5}},
}


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("reason", REMOVALS)
def test_masking_equals_dropping_before_packing(ranks, reason):
    """The gradient is that of rows packed without the removed samples, at the same composition, in float64."""
    case = REMOVALS[reason]
    stream = rewarded([4, 3, 2], case["rewards"], length=9)
    if reason == "truncated":
        stream = [{**s, "finished": s["uid"] not in case["drop"]} for s in stream]
    batches, rows = planned_batches(stream, ranks=ranks, steps=2, budget=60)
    scores = score_step(trainer_with(mask_truncated_completions=True), batches)
    assert {int(u) for u, r in zip(scores.uids, scores.reasons, strict=True) if r} == case["drop"]
    assert {r for r in scores.reasons if r} == {reason}
    of_uid = dict(zip(scores.uids.tolist(), scores.advantages, strict=True))

    kept = []
    for micro_batch in rows:
        new_rows = []
        for row in micro_batch:
            new = type(row)()
            new.reward_names = row.reward_names
            for s in row.samples:
                if s["uid"] not in case["drop"] and s["uid"] >= 0:
                    new.add({**s, "advantage": of_uid[s["uid"]]})
            new_rows.append(new)
        kept.append(new_rows)
    model = Logits()
    reference = [drop_collated(micro_batch) for micro_batch in kept if any(r.samples for r in micro_batch)]
    want_loss, want = gradient(model, reference)
    got_loss, got = gradient(model, batches)
    assert got_loss == pytest.approx(want_loss, rel=1e-10)
    assert (got - want).norm() / want.norm() <= 1e-10


def drop_collated(micro_batch):
    """The micro-batch as TRL would have packed it: rows without samples forward one that trains nothing."""
    rows = []
    for row in micro_batch:
        if not row.samples:
            row.add({**sample(0, 0, 1, [1], rewards={}), "advantage": 0.0})
        rows.append(row)
    batch = ScoringCollator(0, len(rows))([rows])
    batch.pop("scoring", None)
    return batch


def test_step_normalization_is_one_token_mean():
    stream = rewarded([2, 2, 2], [0.0, 1.0, 2.0, 5.0, 7.0, 7.0], length=12)
    batches, _ = planned_batches(stream, ranks=1, steps=3, budget=30)
    scores = score_step(trainer_with(loss_normalization="step"), batches)
    model = Logits()
    loss, _ = gradient(model, batches)
    whole, _ = planned_batches(stream, ranks=1, steps=1, budget=1000)
    score_step(trainer_with(), whole)
    expected, _ = gradient(model, whole)
    assert loss == pytest.approx(expected, rel=1e-6)
    assert sum(float(batch["global_n_tokens"][0]) for batch in batches) == pytest.approx(scores.trained_tokens.sum())


@pytest.mark.parametrize("normalization", ["microbatch", "step"])
def test_everything_removed_gives_a_finite_zero_loss_with_a_graph(normalization):
    # cases 36 and 38: one mask for numerator and denominator
    batches, _ = planned_batches(rewarded([4], [0.5] * 4))
    scores = score_step(trainer_with(loss_normalization=normalization), batches)
    assert set(scores.reasons) == {"zero_advantage"}
    model = Logits()
    loss, grad = gradient(model, batches)
    assert loss == 0.0
    assert torch.isfinite(grad).all()
    assert not grad.any()
    for batch in batches:
        assert (batch["token_index"] >= 0).any(dim=1).all()
        assert not batch["global_n_tokens"].any()


def test_filler_rows_are_neither_trained_nor_scored():
    scorer = SumScorer()
    batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), ranks=2, steps=2, scorers=[scorer])
    scores = score_step(trainer_with(scorer), batches)
    assert scores.uids.tolist() == [0, 1]
    assert sorted(uid for call in scorer.calls for uid in call) == [-1, -1, 0, 1]
    assert torch.isfinite(gradient(Logits(), batches)[1]).all()


def test_token_mean_weighs_tokens_not_samples():
    # case 37 (TRL#7249): 100 tokens at 2.0 and 900 at 0.5 give 0.65, not 1.25
    log_probs = np.r_[np.full(100, 2.0), np.full(900, 0.5)]
    stream = [sample(0, 0, 2, np.arange(101) % 50, prompt=1), sample(1, 0, 2, 50 + np.arange(901) % 50, prompt=1)]
    batches, _ = planned_batches(
        [{**s, "rewards": {"reward": r}} for s, r in zip(stream, [0.0, 1.0], strict=True)],
        ranks=1,
        steps=1,
        budget=2000,
    )
    score_step(trainer_with(scale_rewards="none"), batches)
    (batch,) = batches
    per_token = torch.from_numpy(np.where(batch["segment_id"][0] == 0, 2.0, 0.5))
    assert float(per_token.sum() / batch["global_n_tokens"][0]) == pytest.approx(log_probs.mean())
