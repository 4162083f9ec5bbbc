"""score_step in one process: what scorers are asked, and what becomes of their rewards."""

import numpy as np
import pytest
import torch

from support.samples import group, sample
from support.steps import Logits, SumScorer, planned_batches, rewarded, trainer_with
from treepack import score_step
from treepack.scoring.trainer import LocalAccelerator, LocalTrainer, ScoringArgs


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
