"""ScoringGRPOTrainer in one process: what it trains, logs, hands out and refuses."""

import math
import threading
import time

import numpy as np
import pytest
import torch
from transformers import TrainerCallback

from support.models import tiny_model
from support.trl_scored import scorers_of
from support.trl_training import (
    PROMPTS,
    VOCAB_SIZE,
    NoTransfer,
    QueuedRollouts,
    losses_of,
    reset_accelerate,
    save_policy,
    scoring_trainer,
    settings,
)
from treepack import LogProbScorer, TrainerScorer, group_advantages, register_attention
from treepack.scoring.planner import StepCapacityError
from treepack.scoring.recorder import recorded_steps
from treepack.scoring.scorer import collate_packed, scored_sequences
from treepack.scoring.trl_hooks import ScoringGRPOConfig, ScoringGRPOTrainer
from treepack.scoring.trl_layout import AsyncGRPOConfig, AsyncGRPOTrainer, RolloutSample, trainer_module

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


class Logged(TrainerCallback):
    """What integrations that `report_to` names receive."""

    def __init__(self):
        self.lines = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.lines.append(dict(logs))


def length(completions, **kwargs):
    return [float(len(completion)) for completion in completions]


class Length(TrainerScorer):
    """Reward: minus the sequence's length. Notes what it is asked."""

    name = "length"

    def __init__(self, fail_in=None):
        self.prepared, self.fail_in = [], fail_in

    def prepare(self, trainer):
        self.prepared.append(trainer.rollout_worker.calls[:])

    def collate(self, rows, index):
        return collate_packed([scored_sequences(row, index) for row in rows], token_budget=64)

    def features(self, trainer, inputs):
        if self.fail_in == "features":
            raise RuntimeError("no features today")
        offsets = inputs["offsets"][0, : int(inputs["sizes"][0, 3])]
        return inputs["uid"][0, : len(offsets) - 1], offsets.diff()[:, None].float()

    def group_rewards(self, sample_features, extra_features):
        return -sample_features[:, 0].double(), {"length/mean": float(sample_features.mean())}


def test_a_run_trains_logs_and_hands_out_scores(policy, tmp_path):
    scored, logged, scorer, worker = [], Logged(), Length(), QueuedRollouts(30)
    trainer = scoring_trainer(
        policy,
        tmp_path,
        worker,
        scorers=[scorer],
        on_rollouts_scored=[scored.append],
        callbacks=[logged],
        more={"record_dir": str(tmp_path / "steps"), "reward_weights": {"length": 0.25}},
    )
    before = {name: parameter.clone() for name, parameter in trainer.model.named_parameters()}
    trainer.train()
    assert all(not torch.equal(before[name], parameter) for name, parameter in trainer.model.named_parameters())
    assert scorer.prepared == [[]]  # once, and the worker had not been told anything yet
    assert worker.calls == [1, "start", 2, 3, 4, "stop"]

    assert len(scored) == 3
    assert all(scores.names == ("solved", "length") for scores in scored)
    reward = scored[0].rewards @ [1.0, 0.25]
    np.testing.assert_allclose(scored[0].advantages, group_advantages(reward, scored[0].groups), atol=1e-12)
    groups = np.concatenate([scores.groups for scores in scored])
    assert trainer.progress.state_dict() == {
        "watermark": groups.max() + 1,
        "consumed_past_watermark": [],
        "num_trained": len(set(groups)),
        "num_dropped": {},
    }
    assert len(recorded_steps(tmp_path / "steps")) == 3

    steps = [line for line in logged.lines if "loss" in line]
    assert len(steps) == 3
    for line, scores in zip(steps, scored, strict=True):
        assert line["rewards/length"] == pytest.approx(scores.rewards[:, 1].mean())
        assert line["batch/groups_per_step"] == len(set(scores.groups))
        assert line["batch/samples_per_step"] == pytest.approx(len(scores.uids))
        assert {"reward", "reward_std", "frac_reward_zero_std", "perf/score_s", "length/mean"} <= line.keys()
        assert {"sample/staleness_mean", "batch/groups_waiting", "perf/rollout_wait_s"} <= line.keys()
        assert {"batch/packing_ratio", "batch/row_fill_frac", "batch/trained_tokens_per_step"} <= line.keys()


def trl_rows(worker):
    """The same rows as TRL's worker gives them: advantages of the samples' own groups."""
    rewards = np.array([row.rewards["solved"] for row in worker.rows])
    advantages = group_advantages(rewards, np.array([row.group_id for row in worker.rows]))
    for row, advantage in zip(worker.rows, advantages, strict=True):
        row.advantage = float(advantage)
    fields = RolloutSample.__dataclass_fields__
    worker.rows = [RolloutSample(**{name: getattr(row, name) for name in fields}) for row in worker.rows]
    return worker


@pytest.mark.parametrize("per_row", [4, 8])
def test_without_scorers_losses_are_trls(policy, tmp_path, monkeypatch, per_row):
    """TRL's own trainer, once `register_attention` has been called after its construction, beside treepack's."""
    shape = {
        "max_steps": 5,
        "gradient_accumulation_steps": 1,
        "token_budget": 0,
        "per_device_train_batch_size": per_row,
    }
    ours = scoring_trainer(policy, tmp_path / "ours", QueuedRollouts(16), more=shape)
    ours.train()

    reset_accelerate()
    with monkeypatch.context() as on_a_cpu:
        on_a_cpu.setattr(trainer_module, "get_peak_flops_per_device", lambda accelerator, dtype: None)
        theirs = AsyncGRPOTrainer(
            model=policy,
            reward_funcs=[len],
            args=AsyncGRPOConfig(**settings(tmp_path / "theirs", **shape)),
            train_dataset=PROMPTS,
            rollout_worker=trl_rows(QueuedRollouts(16)),
            weight_transfer=NoTransfer(),
        )
    register_attention()
    theirs.train()
    assert losses_of(theirs) == pytest.approx(losses_of(ours), abs=1e-6)
    assert max(map(abs, losses_of(ours))) > 0.05
    for name, parameter in theirs.model.named_parameters():
        torch.testing.assert_close(ours.model.get_parameter(name), parameter, atol=1e-4, rtol=0)


def test_reward_model_log_probs_and_ebft_score_together(policy, tmp_path):
    reward_model, ebft = scorers_of(policy, shard=False)
    scorers = [reward_model, LogProbScorer(ebft.model, token_budget=64), ebft]
    scored = []
    columns = {"reference_ids": np.array([7, 8, 9])}
    trainer = scoring_trainer(
        policy,
        tmp_path,
        QueuedRollouts(20, rewards=lambda group, i: None, columns=columns),
        scorers=scorers,
        on_rollouts_scored=[scored.append],
        more={"max_steps": 2},
    )
    trainer.train()
    assert all(scores.names == tuple(scorer.name for scorer in scorers) for scores in scored)
    assert all(np.isfinite(scores.rewards).all() for scores in scored)
    assert all(math.isfinite(loss) for loss in losses_of(trainer))
    assert "ebft/alignment" in trainer.state.log_history[0]
    assert trainer.model.training


def test_zero_variance_for_a_while_trains_nothing_and_is_counted(policy, tmp_path):
    worker = QueuedRollouts(30, rewards=lambda group, i: float(i % 2) if group >= 6 else 1.0)
    trainer = scoring_trainer(policy, tmp_path, worker, more={"groups_per_step": 3})
    seen = []
    trainer._on_rollouts_scored = (lambda scores: seen.append(trainer.model.get_input_embeddings().weight.clone()),)
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["frac_reward_zero_std"] for line in lines] == [1.0, 1.0, 0.0]
    assert [line["batch/trained_tokens_per_step"] > 0 for line in lines] == [False, False, True]
    assert losses_of(trainer)[:2] == [0.0, 0.0]
    assert torch.equal(seen[0], seen[2])
    assert trainer.progress.num_trained == 9


@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_gradient_scaler_takes_a_step_of_nothing(policy, tmp_path, max_grad_norm):
    """It refuses to step without having seen gradients: fp16's, which accelerate has on a GPU alone."""
    worker = QueuedRollouts(30, rewards=lambda group, i: float(i % 2) if group >= 3 else 1.0)
    more = {"groups_per_step": 3, "max_steps": 2, "max_grad_norm": max_grad_norm}
    trainer = scoring_trainer(policy, tmp_path, worker, more=more)
    trainer.accelerator.scaler = torch.amp.GradScaler("cpu")
    trainer.accelerator.native_amp = True
    trainer.accelerator.state._mixed_precision = "fp16"
    trainer.train()
    assert trainer.accelerator.scaler.get_scale() == 2.0**16
    assert losses_of(trainer)[0] == 0.0
    assert losses_of(trainer)[1] != 0.0


def test_truncated_samples_leave_the_loss(policy, tmp_path):
    worker = QueuedRollouts(20, finished=False)
    trainer = scoring_trainer(policy, tmp_path, worker, more={"max_steps": 1, "mask_truncated_completions": True})
    trainer.train()
    assert losses_of(trainer) == [0.0]
    assert trainer.state.log_history[0]["batch/trained_tokens_per_step"] == 0.0


def test_trained_tokens_are_counted_where_a_micro_batch_is_emptied(policy, tmp_path):
    """One sample of a step is left; "microbatch" halves what TRL's loss divides by, which TRL would log."""
    scored, worker = [], QueuedRollouts(8)
    for i, row in enumerate(worker.rows):
        row.finished = i % 4 == 0
    trainer = scoring_trainer(
        policy,
        tmp_path,
        worker,
        on_rollouts_scored=[scored.append],
        more={"groups_per_step": 1, "mask_truncated_completions": True, "loss_normalization": "microbatch"},
    )
    trainer.train()
    lines = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["batch/microbatches_per_step"] for line in lines] == [2.0] * 3
    assert [np.count_nonzero(scores.trained_tokens) for scores in scored] == [1] * 3
    assert [line["batch/trained_tokens_per_step"] for line in lines] == [s.trained_tokens.sum() for s in scored]


def test_stale_groups_are_dropped_whole_and_counted(policy, tmp_path):
    worker = QueuedRollouts(30)
    for row in worker.rows[:8]:
        row.model_version = -9
    trainer = scoring_trainer(policy, tmp_path, worker, more={"max_staleness": 5, "groups_per_step": 2})
    trainer.train()
    assert trainer.progress.state_dict()["num_dropped"] == {"stale": 2}
    assert trainer._trained_groups == set(range(2, 8))
    assert trainer.state.log_history[0]["batch/dropped_stale_total"] == 8.0


def test_a_dead_worker_ends_the_run_with_its_message(policy, tmp_path):
    trainer = scoring_trainer(policy, tmp_path, QueuedRollouts(2), more={"flush_after_s": 0.05})
    with pytest.raises(RuntimeError, match="the test's rollouts are used up"):
        trainer.train()


def test_a_stall_makes_a_step_of_what_is_there(policy, tmp_path):
    """Rows that would never fill a step are trained all the same."""

    class Trickle(QueuedRollouts):
        def start(self):
            self.thread = threading.Thread(target=self.feed, daemon=True)
            self.thread.start()

        def feed(self):
            for first in range(0, len(self.rows), 8):
                for row in self.rows[first : first + 8]:
                    self.rollout_buffer.put(row)
                time.sleep(0.2)

        def check_health(self, stale_after_s):
            if not self.thread.is_alive():
                super().check_health(stale_after_s)

    trainer = scoring_trainer(policy, tmp_path, Trickle(100), more={"token_budget": 10_000, "flush_after_s": 0.05})
    trainer.train()
    assert len(losses_of(trainer)) == 3
    assert trainer.progress.num_trained < 60


@pytest.mark.parametrize("at", ["features", "callback"])
def test_errors_of_scorers_and_callbacks_reach_the_caller(policy, tmp_path, at):
    def callback(scores):
        raise RuntimeError("no scores wanted")

    trainer = scoring_trainer(
        policy,
        tmp_path,
        QueuedRollouts(20),
        scorers=[Length(fail_in="features" if at == "features" else None)],
        on_rollouts_scored=[callback] if at == "callback" else [],
    )
    with pytest.raises(RuntimeError, match="no features today" if at == "features" else "no scores wanted"):
        trainer.train()
    assert trainer.progress.num_trained == 0


def test_the_budget_comes_from_the_server_where_none_is_given(policy, tmp_path):
    trainer = scoring_trainer(policy, tmp_path, QueuedRollouts(20), more={"token_budget": None, "max_steps": 1})

    class Server:
        def wait_for_server_ready(self):
            pass

        def get_max_model_len(self):
            return 48

    trainer.vllm_client = Server()
    trainer.train()
    assert trainer.args.token_budget == 48
    assert trainer.state.log_history[0]["batch/row_tokens_max"] <= 48


class TestConstruction:
    def test_a_group_that_never_fits(self, policy, tmp_path):
        with pytest.raises(StepCapacityError, match="group_rows must be at most 128 .*, got 129"):
            scoring_trainer(policy, tmp_path, QueuedRollouts(0), more={"num_generations": 129})
        too_few = {"token_budget": 0, "per_device_train_batch_size": 1}
        with pytest.raises(StepCapacityError, match="samples_per_row"):
            scoring_trainer(policy, tmp_path, QueuedRollouts(0), more=too_few)

    def test_arguments_of_the_wrong_kind(self, policy, tmp_path):
        with pytest.raises(TypeError, match="args must be a ScoringGRPOConfig, got AsyncGRPOConfig"):
            ScoringGRPOTrainer(policy, args=AsyncGRPOConfig(**settings(tmp_path)), scorers=[Length()])
        with pytest.raises(TypeError, match="scorers must be TrainerScorers, got a str"):
            scoring_trainer(policy, tmp_path, None, scorers=["length"])
        with pytest.raises(ValueError, match=r"scorers must have names of their own, got \['length', 'length'\]"):
            scoring_trainer(policy, tmp_path, None, scorers=[Length(), Length()])
        with pytest.raises(ValueError, match=r"other names than reward_funcs, got \['length'\] twice"):
            scoring_trainer(policy, tmp_path, None, scorers=[Length()], reward_funcs=[length])
        with pytest.raises(TypeError, match="scorers must be a sequence, got Length"):
            scoring_trainer(policy, tmp_path, None, scorers=Length())
        with pytest.raises(TypeError, match="on_rollouts_scored must be a sequence, got builtin_function_or_method"):
            scoring_trainer(policy, tmp_path, None, scorers=[Length()], on_rollouts_scored=print)
        with pytest.raises(TypeError, match=r"reward_funcs must be a function or a list of functions, got 'length'"):
            scoring_trainer(policy, tmp_path, None, reward_funcs=["length"])

    def test_an_iterator_gives_all_its_scorers(self, policy, tmp_path):
        scorers = [Length()]
        assert scoring_trainer(policy, tmp_path, QueuedRollouts(0), scorers=iter(scorers)).scorers == tuple(scorers)

    def test_a_scorers_model_that_packed_rows_are_wrong_for(self, policy, tmp_path):
        """Of a scorer of one's own; those that ship check their models themselves."""
        register_attention()
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
        scorer = Length()
        scorer.model = tiny_model("llama", rope_parameters=rope, attn_implementation="treepack")
        with pytest.raises(NotImplementedError, match="dynamic rope depends on the longest position"):
            scoring_trainer(policy, tmp_path, QueuedRollouts(0), scorers=[scorer])
        scorer.model = tiny_model("llama", rope_parameters=rope, attn_implementation="sdpa")  # runs samples alone
        scoring_trainer(policy, tmp_path, QueuedRollouts(0), scorers=[scorer])

    @pytest.mark.parametrize(
        ("weights", "message"),
        [
            ({"lenght": 2.0}, r"must name columns among \['reward_length', 'length'\], got \['lenght'\]"),
            ([1.0], r"must have one weight for each of \['reward_length', 'length'\], got \[1.0\]"),
        ],
    )
    def test_weights_that_fit_no_column(self, policy, tmp_path, weights, message):
        def reward_length(completions, **kwargs):
            return [float(len(completion)) for completion in completions]

        given = {"scorers": [Length()], "reward_funcs": reward_length, "more": {"reward_weights": weights}}
        with pytest.raises(ValueError, match=message):
            scoring_trainer(policy, tmp_path, None, **given)

    def test_weights_of_columns_that_show_in_the_rollouts_alone(self, policy, tmp_path, caplog):
        """A worker of one's own may have any; a name that none has is told, once."""
        more = {"max_steps": 2, "reward_weights": {"sloved": 2.0, "solved": 1.0}}
        scoring_trainer(policy, tmp_path, QueuedRollouts(20), more=more).train()
        told = [message for message in caplog.messages if "reward_weights" in message]
        assert told == ["reward_weights name ['sloved'], the first step's columns are ('solved',)"]

    def test_nothing_that_gives_a_reward(self, policy, tmp_path):
        with pytest.raises(ValueError, match="scorers or reward_funcs must be given"):
            scoring_trainer(policy, tmp_path, None)

    def test_the_worker_it_makes(self, policy, tmp_path):
        trainer = scoring_trainer(
            policy,
            tmp_path,
            None,
            scorers=[Length()],
            more={"sample_columns": ["number"], "max_request_attempts": 2, "max_failed_generations": 5},
        )
        arguments = trainer.rollout_worker._loop_kwargs
        assert (arguments["sample_columns"], arguments["max_attempts"]) == (("number",), 2)
        assert (arguments["max_failures"], arguments["reward_funcs"]) == (5, [])
        assert arguments["vocab_size"] == trainer.model.config.vocab_size == VOCAB_SIZE
        assert trainer.rollout_queue is trainer.rollout_worker.rollout_buffer

    def test_a_config_by_default(self, policy, monkeypatch, tmp_path):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(ScoringGRPOConfig, "__post_init__", lambda self: stop(self.output_dir))

        def stop(folder):
            raise InterruptedError(folder)

        with pytest.raises(InterruptedError, match=r"-ScoringGRPO$"):
            ScoringGRPOTrainer(policy, scorers=[Length()])
