"""A checkpoint says which groups are consumed; a resume trains each of the others once."""

import json

import pytest

from support.trl_training import QueuedRollouts, save_policy, scoring_trainer
from treepack.scoring.trl_hooks import PROGRESS_FILE, ScoringRolloutWorker

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning"),
    # transformers reads the RNG state of its own checkpoint so
    pytest.mark.filterwarnings("ignore:.*weights_only:FutureWarning"),
]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return save_policy(tmp_path_factory.mktemp("policy"))


def trained(scores):
    return sorted({int(group) for step in scores for group in step.groups})


def test_every_group_is_trained_once_over_a_resume(policy, tmp_path):
    """Groups come out of order, one is dropped as stale, and some are planned but not trained at the checkpoint."""
    order = [4, 0, 7, 1, 9, 2, 3, 11, 5, 6, 8, 10, *range(12, 40)]
    more = {"save_strategy": "steps", "save_steps": 2, "groups_per_step": 3, "max_staleness": 5}
    first, second = [], []
    worker = QueuedRollouts(40, groups=order)
    for row in worker.rows:
        if row.group_id == 1:
            row.model_version = -9
    trainer = scoring_trainer(
        policy, tmp_path, worker, on_rollouts_scored=[first.append], more={**more, "max_steps": 2}
    )
    trainer.train()
    assert trained(first) == [0, 2, 3, 4, 7, 9]
    state = json.loads((tmp_path / "checkpoint-2" / PROGRESS_FILE).read_text())
    assert state == {
        "watermark": 5,
        "consumed_past_watermark": [[7, 8], [9, 10]],
        "num_trained": 6,
        "num_dropped": {"stale": 1},
    }

    # A worker that knows nothing of the resume sends every group again.
    resumed = scoring_trainer(
        policy,
        tmp_path,
        QueuedRollouts(40, groups=order, version=2),
        on_rollouts_scored=[second.append],
        more={**more, "max_steps": 5},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert trained(second) == [5, 6, 8, 10, 11, 12, 13, 14, 15]
    assert len(second) == 3
    assert resumed.progress.state_dict()["watermark"] == 16
    assert resumed.progress.num_trained == 15
    assert resumed.state.global_step == 5


def test_the_worker_is_told_what_not_to_generate(policy, tmp_path):
    class Recorded(ScoringRolloutWorker):
        def __init__(self):
            self.skipped, self.rollouts = [], QueuedRollouts(20, groups=range(5, 25))
            self.rollout_buffer, self.metrics_queue = self.rollouts.rollout_buffer, self.rollouts.metrics_queue
            self._loop_kwargs = {}
            self.check_health, self.stop = self.rollouts.check_health, self.rollouts.stop

        def update_model_version(self, version):
            self.skipped.append(version)

        def start(self):
            self.skipped.append("start")
            self.rollouts.start()

        def skip_consumed(self, watermark, past_watermark):
            self.skipped.append((watermark, past_watermark))

    checkpoint = tmp_path / "checkpoint-1"
    run = scoring_trainer(
        policy, tmp_path, QueuedRollouts(20), more={"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    )
    run.train()
    state = {"watermark": 5, "consumed_past_watermark": [[7, 8]], "num_trained": 5, "num_dropped": {"stale": 1}}
    (checkpoint / PROGRESS_FILE).write_text(json.dumps(state))
    worker = Recorded()
    resumed = scoring_trainer(policy, tmp_path, worker, more={"max_steps": 2})
    resumed.train(resume_from_checkpoint=str(checkpoint))
    assert worker.skipped[:3] == [(5, [7]), 1, "start"]
    assert resumed._groups_before_resume == 5
    assert 7 not in resumed._trained_groups


def test_a_checkpoint_of_trls_own_starts_from_the_first_prompt(policy, tmp_path, caplog):
    more = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    scoring_trainer(policy, tmp_path, QueuedRollouts(20), more=more).train()
    (tmp_path / "checkpoint-1" / PROGRESS_FILE).unlink()
    resumed = scoring_trainer(policy, tmp_path, QueuedRollouts(20), more={"max_steps": 2})
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    assert f"{PROGRESS_FILE} is not there: rollouts start from the first prompt" in caplog.text
    assert 0 in resumed._trained_groups


def test_progress_that_cannot_be_read_is_named(policy, tmp_path):
    more = {"max_steps": 1, "save_strategy": "steps", "save_steps": 1}
    scoring_trainer(policy, tmp_path, QueuedRollouts(20), more=more).train()
    (tmp_path / "checkpoint-1" / PROGRESS_FILE).write_text("{oops")
    resumed = scoring_trainer(policy, tmp_path, QueuedRollouts(20), more={"max_steps": 2})
    with pytest.raises(ValueError, match=f"{PROGRESS_FILE} must hold a GroupProgress as JSON, got Expecting property"):
        resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


def test_epochs_count_groups_over_a_resume(policy, tmp_path):
    """One pass over 16 prompts: 6 groups before the checkpoint, 10 after it."""
    more = {"max_steps": -1, "num_train_epochs": 1, "groups_per_step": 2, "save_strategy": "steps", "save_steps": 3}
    scores = []
    whole = scoring_trainer(policy, tmp_path, QueuedRollouts(30), on_rollouts_scored=[scores.append], more=more)
    whole.train()
    assert trained(scores) == list(range(16))
    scores.clear()
    resumed = scoring_trainer(policy, tmp_path, QueuedRollouts(30), on_rollouts_scored=[scores.append], more=more)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert trained(scores) == list(range(6, 16))
