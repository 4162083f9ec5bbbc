"""score_step in one process: the scoring contract, what leaves the loss, and that this equals dropping it earlier."""

import re
from collections import defaultdict
from itertools import pairwise

import numpy as np
import pytest
import torch

from support.samples import group, groups_of, sample
from treepack import ScoringCollator, StepPlanner, TrainerScorer, score_step
from treepack.scoring.scorer import collate_packed, scored_sequences
from treepack.scoring.trainer import LocalAccelerator, LocalTrainer, ScoringArgs

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


def rewarded(sizes, rewards, **more):
    stream = groups_of(sizes, **more)
    return [{**s, "rewards": {"reward": r}} for s, r in zip(stream, rewards, strict=True)]


def test_scores_by_hand():
    stream = rewarded([4, 2], [1.0, 0.0, 0.0, 1.0, 3.0, 5.0])
    scorer = SumScorer(extras=2)
    batches, _ = planned_batches(stream, scorers=[scorer])
    scores = score_step(trainer_with(scorer, reward_weights={"sum": 0.25, "reward": 2.0}), batches)
    sums = np.array([s["input_ids"].sum() for s in stream], dtype=float)
    sums[:4] -= 100 + 101 + 0 + 0
    sums[4:] -= 100 + 101 + 1 + 1
    assert scores.names == ("reward", "sum")
    assert scores.uids.tolist() == list(range(6))
    np.testing.assert_array_equal(scores.rewards, np.stack([[1, 0, 0, 1, 3, 5], sums], axis=1))
    total = scores.rewards @ [2.0, 0.25]
    for members in (slice(0, 4), slice(4, 6)):
        expected = (total[members] - total[members].mean()) / (total[members].std() + 1e-8)
        np.testing.assert_allclose(scores.advantages[members], expected)
    assert scores.metrics["sum/extras"] == 2.0
    assert scores.metrics["rewards/reward"] == pytest.approx(10 / 6)
    assert scores.metrics["frac_reward_zero_std"] == (0.0, 2.0)
    assert scores.metrics["perf/score_s"] > 0


def test_advantages_reach_every_loss_term_of_their_sample():
    batches, rows = planned_batches(rewarded([4, 3], [1.0, 0.0, 0.5, 0.25, 3.0, 5.0, 9.0]))
    scores = score_step(trainer_with(), batches)
    of_uid = dict(zip(scores.uids.tolist(), scores.advantages, strict=True))
    terms = 0
    for batch, micro_batch in zip(batches, rows, strict=True):
        assert "scoring" not in batch
        for r, row in enumerate(micro_batch):
            live = batch["token_index"][r] >= 0
            expected = [of_uid[row.samples[s]["uid"]] for s in batch["segment_id"][r][live]]
            np.testing.assert_array_equal(batch["advantages"][r][live].numpy(), np.float32(expected))
            terms += int(live.sum())
    assert terms == sum(int(batch["global_n_tokens"][0]) for batch in batches) == scores.trained_tokens.sum()


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


def test_every_row_of_a_micro_batch_has_the_same_number_of_chunks():
    # case 40: every rank runs the same number of forwards, whatever it holds
    scorer = SumScorer(token_budget=16)
    batches, rows = planned_batches(
        rewarded([6, 1], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 1.0], length=12), ranks=2, steps=1, budget=70, scorers=[scorer]
    )
    calls = []
    features = scorer.features
    scorer.features = lambda trainer, inputs: calls.append(inputs["input_ids"].shape) or features(trainer, inputs)
    scores = score_step(trainer_with(scorer), batches)
    assert len(calls) % 2 == 0
    assert len(calls) > 2
    assert all(shape[0] == 1 for shape in calls)
    sums = {s["uid"]: float(s["input_ids"].sum()) for row in rows[0] for s in row.samples}
    np.testing.assert_array_equal(scores.rewards[:, 1], [sums[u] for u in scores.uids])


def test_padding_never_reaches_a_feature():
    # case 41 / 43: rows and chunks of very different lengths
    scorer = SumScorer(token_budget=1000)
    stream = [*group(0, [60, 5]), *group(1, [4], first_uid=2), *group(2, [33, 7, 8], first_uid=3)]
    batches, _ = planned_batches(stream, ranks=3, steps=1, budget=80, scorers=[scorer])
    scores = score_step(trainer_with(scorer), batches)
    np.testing.assert_array_equal(scores.rewards[:, 1], [s["input_ids"].sum() for s in stream])


def test_scorer_that_does_not_apply_leaves_the_other_columns():
    def reward(features):
        values = np.full(len(features), np.nan)
        values[0] = 4.0
        return values

    scorer = SumScorer(reward=reward)
    batches, _ = planned_batches(rewarded([3], [1.0, float("nan"), 2.0]), scorers=[scorer])
    scores = score_step(trainer_with(scorer), batches)
    assert scores.reasons == ("", "unscorable", "")
    np.testing.assert_allclose(scores.advantages, [1.0, 0.0, -1.0], rtol=1e-6)


def test_rows_of_a_conversation_carry_its_advantage():
    # case 35 (SkyRL#1507) through the whole step
    stream = [sample(i, 0, 4, [1, 2, 3 + i], rollout_id=r) for i, r in enumerate(["x", "y", "x", "z"])]
    stream = [{**s, "rewards": {"reward": v}} for s, v in zip(stream, [9.0, 0.0, 1.0, 0.0], strict=True)]
    batches, _ = planned_batches(stream)
    scores = score_step(trainer_with(), batches)
    np.testing.assert_allclose(scores.advantages, [1.41421356, -0.70710678, 1.41421356, -0.70710678])
    assert scores.metrics["reward"] == pytest.approx(1 / 3)


def test_mean_over_the_rows_a_scorer_applies_to():
    scorer = SumScorer(reward=lambda features: np.array([np.nan, 5.0, 1.0, 3.0, np.nan]))
    scorer.rows = "mean"
    stream = [sample(i, 0, 5, [1, 2, 3 + i], rollout_id=r, rewards={}) for i, r in enumerate("xyxxz")]
    batches, _ = planned_batches(stream, scorers=[scorer])
    scores = score_step(trainer_with(scorer), batches)
    np.testing.assert_array_equal(scores.rewards[:, 0], [2.0, 5.0, 2.0, 2.0, np.nan])
    assert scores.reasons == ("", "", "", "", "unscorable")


def test_truncated_stays_in_mean_and_std():
    # case 34: TRL's choice
    stream = [{**s, "finished": s["uid"] != 0} for s in rewarded([3], [1.0, 0.0, 0.0])]
    batches, _ = planned_batches(stream)
    scores = score_step(trainer_with(mask_truncated_completions=True), batches)
    np.testing.assert_allclose(scores.advantages, [1.41421356, -0.70710678, -0.70710678])
    assert scores.reasons == ("truncated", "", "")


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


def test_training_mode_is_restored_also_after_an_error():
    def fail(features):
        raise RuntimeError("reward went wrong")

    for scorer in (SumScorer(), SumScorer(reward=fail)):
        batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), scorers=[scorer])
        trainer = trainer_with(scorer)
        for mode in (True, False):
            trainer.model.train(mode)
            try:
                score_step(trainer, [dict(batch) for batch in batches])
            except RuntimeError:
                assert scorer.reward is fail
            assert trainer.model.training is mode


def test_scorers_run_under_autocast_and_leave_gradients_alone():
    class Bfloat16Accelerator(LocalAccelerator):
        def autocast(self):
            return torch.autocast("cpu", torch.bfloat16)

    class Matmul(SumScorer):
        def features(self, trainer, inputs):
            assert torch.is_autocast_enabled("cpu")
            product = torch.ones(1, 1) @ trainer.model.depth[:1, :1].float()
            assert product.dtype == torch.bfloat16
            uids, features = super().features(trainer, inputs)
            return uids, features + 0 * product

    scorer = Matmul()
    batches, _ = planned_batches(rewarded([2], [0.0, 1.0]), scorers=[scorer])
    model = Logits()
    model.table.grad = torch.full_like(model.table, 0.5)
    score_step(LocalTrainer(model, [scorer], ScoringArgs(), Bfloat16Accelerator()), batches)
    assert scorer.calls
    assert not torch.is_autocast_enabled("cpu")
    assert torch.is_grad_enabled()
    assert (model.table.grad == 0.5).all()
    assert model.depth.grad is None


def test_metrics_without_a_number_do_not_wipe_the_window():
    # case 45 (TRL#4501, #6429)
    scorer = SumScorer()
    scorer.group_rewards = lambda features, extras: (np.full(len(features), np.nan), {"sum/odd": float("inf")})
    batches, _ = planned_batches(rewarded([2], [float("nan")] * 2), scorers=[scorer])
    scores = score_step(trainer_with(scorer), batches)
    assert scores.metrics.keys() == {"perf/score_s"}
    batches, _ = planned_batches(rewarded([2, 2], [1.0, 2.0, float("nan"), float("nan")]))
    metrics = score_step(trainer_with(), batches).metrics
    assert (metrics["reward"], metrics["reward_std"], metrics["rewards/reward"]) == (1.5, 0.5, 1.5)
    assert metrics["frac_reward_zero_std"] == (0.0, 1.0)


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
