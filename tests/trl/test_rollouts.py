"""The rollout loop against a loopback server, in this process: what it puts on the queue, and what it leaves out."""

import asyncio
import json
import math
import queue

import numpy as np
import pytest
import torch

from support.trl_rollouts import LoopRun, loop_options, prompts, running, toy_server
from treepack.scoring.loopback_server import HttpError, LoopbackServer
from treepack.scoring.progress import GroupProgress
from treepack.scoring.queue import GroupedQueue, GroupShrunk
from treepack.scoring.train_demo_model import byte_tokenizer, tiny_model
from treepack.scoring.trl_layout import AsyncRolloutWorker, RolloutGroup, TrainingSequence
from treepack.scoring.trl_rollouts import RolloutFailedError, ScoringRolloutWorker


@pytest.fixture(scope="module")
def server():
    with toy_server() as running_server:
        yield running_server


def lengths(completions, **_):
    return [float(len(completion[0]["content"])) for completion in completions]


async def none_for_the_second(completions, **_):
    return [1.5, None, *([0.0] * (len(completions) - 2))]


def test_rows_leave_advantages_pending_and_carry_what_scoring_needs(server):
    with running(server.url) as run:
        rows = run.take(12)
    assert [row.uid for row in rows] == list(range(12))
    assert all(math.isnan(row.advantage) and math.isnan(row.metrics["reward"]) for row in rows)
    assert {row.group_size for row in rows} == {4}
    stop = byte_tokenizer().eos_token_id
    for row in rows:
        assert row.rewards == {} == row.columns
        assert row.finished == (row.input_ids[-1] == stop)
        assert row.finished or row.completion_mask.sum() == 6
    for start in range(0, 12, 4):
        group = rows[start : start + 4]
        assert len({row.group_id for row in group}) == 1
        assert len({row.rollout_id for row in group}) == 4
        assert len({tuple(row.input_ids) for row in group}) == 4, "seeds of requests are independent"


def test_old_log_probs_are_the_served_models(server):
    with running(server.url, temperature=0.7) as run:
        rows = run.take(4)
    model = tiny_model(byte_tokenizer(), seed=0).eval()
    for row in rows:
        ids = torch.from_numpy(row.input_ids)
        with torch.no_grad():
            log_probs = torch.log_softmax(model(input_ids=ids[None]).logits[0, :-1] / 0.7, dim=-1)
        expected = log_probs.gather(1, ids[1:, None])[:, 0].numpy() * row.completion_mask[1:]
        np.testing.assert_allclose(row.old_log_probs[1:], expected, atol=2e-6)
        assert row.old_log_probs[0] == 0


def test_reward_functions_give_columns_and_dataset_columns_travel(server):
    references = [[i, i + 1] for i in range(16)]
    with running(
        server.url,
        reward_funcs=[lengths, none_for_the_second],
        dataset=prompts(reference_ids=references),
        sample_columns=("reference_ids",),
    ) as run:
        groups, shrunk = run.take_groups(3)
    assert not shrunk
    for group_id, rows in groups.items():
        assert [set(row.rewards) for row in rows] == [{"lengths", "none_for_the_second"}] * 4
        assert [row.rewards["lengths"] for row in rows] == lengths([row.completion for row in rows])
        second = [row.rewards["none_for_the_second"] for row in rows]
        assert second[0] == 1.5
        assert math.isnan(second[1])
        assert all(row.columns == {"reference_ids": references[group_id]} for row in rows)
        assert not any(name.startswith("rewards/") for row in rows for name in row.metrics)


class Game:
    """An environment that owns its reward: the turns it was asked for."""

    def __init__(self):
        self.turns = 0

    def reset(self, **row):
        self.turns += 1
        return " again"

    def get_reward(self):
        return float(self.turns)


def test_an_environments_own_reward_is_a_column(server):
    """And the only one where nothing else gives a reward."""
    with running(server.url, environment_factory=Game, max_inflight_tasks=1) as run:
        rows = run.take(4)
    assert [row.rewards for row in rows] == [{"Game": float(turn)} for turn in (1, 2, 3, 4)]
    assert rows[0].prompt[-1]["content"] == "q0 again"


def test_failed_generations_take_their_environments_rewards_along():
    FailsOften.arrived = -1
    with (
        toy_server(FailsOften) as failing,
        running(failing.url, environment_factory=Game, reward_funcs=[lengths], max_inflight_tasks=1) as run,
    ):
        shrunk, *rows = run.take(4)
    assert shrunk == GroupShrunk(0, 3)  # the second request failed
    assert [row.rewards["Game"] for row in rows] == [1.0, 3.0, 4.0]
    assert [row.rewards["lengths"] for row in rows] == lengths([row.completion for row in rows])


def test_completions_can_be_logged(server, capsys):
    with running(server.url, log_completions=True, num_completions_to_print=1) as run:
        run.take(8)
    assert "nan" in capsys.readouterr().out  # rewards and advantages come later, on the trainer


def test_consumed_groups_are_not_generated_again(server):
    """Group g is made from prompt g modulo the dataset's length, over resumes and epochs."""
    dataset = prompts(5, number=list(range(5)))
    options = {"dataset": dataset, "sample_columns": ("number",), "max_inflight_tasks": 1}
    with running(server.url, dataset_start_index=8, consumed=[(0, 8), (9, 11)], **options) as run:
        groups, _ = run.take_groups(4)
    assert {group_id: rows[0].columns["number"] for group_id, rows in groups.items()} == {8: 3, 11: 1, 12: 2, 13: 3}


def test_the_worker_skips_what_progress_has_consumed(monkeypatch):
    progress = GroupProgress()
    progress.trained([0, 1, 2, 4])
    progress.dropped(6, "stale")
    monkeypatch.setattr(AsyncRolloutWorker, "start", lambda self: None)
    for dataset, start in ((prompts(), 3), (prompts().to_iterable_dataset(), 0)):
        worker = ScoringRolloutWorker(**loop_options("http://127.0.0.1:1", dataset=dataset))
        worker._loop_kwargs["dataset_start_index"] = 77  # what TRL's own bookkeeping says
        worker.skip_consumed(progress.watermark, progress.consumed_past_watermark)
        worker.start()
        assert worker._loop_kwargs["dataset_start_index"] == start
        assert worker._loop_kwargs["consumed"] == [(0, 3), (4, 5), (6, 7)]


def test_a_stream_is_read_past_what_was_consumed(server):
    stream = prompts().to_iterable_dataset()
    with running(server.url, dataset=stream, consumed=[(0, 3), (4, 5)], max_inflight_tasks=1) as run:
        groups, _ = run.take_groups(3)
    assert list(groups) == [3, 5, 6]
    assert groups[5][0].prompt[0]["content"] == "q5"


def test_forks_and_conversations_without_a_trained_token(server):
    run = LoopRun(server.url, reward_funcs=[lengths])

    def sequence(rollout_id, trained=1):
        return TrainingSequence([5, 6, 7], [0, 1, trained], [0.0, -1.0, -0.5], rollout_id)

    group = RolloutGroup(
        prompts=[[{"role": "user", "content": "q"}]] * 4,
        reward_kwargs={},
        completions=[[{"role": "assistant", "content": "a" * i}] for i in range(4)],
        completions_ids=[[6, 1], [6, 7], [], [7]],
        completions_sequences=[[sequence("a"), sequence("a")], [sequence("b")], [], [sequence("d")]],
        tool_call_counts=[2, 0, 0, 0],
        tool_failure_counts=[1, 0, 0, 0],
        model_version=3,
        group_id=7,
        env_rewards=[],
        rollout_rewards=[None] * 4,
    )
    samples = asyncio.run(run.loop._score_group(group))
    run.discard()
    assert [(s.uid, s.rollout_id, s.rewards["lengths"]) for s in samples] == [
        (0, "a", 0.0),
        (1, "a", 0.0),
        (2, "b", 1.0),
        (3, "d", 3.0),
    ]
    assert [s.finished for s in samples] == [True, True, False, False]
    assert {s.group_size for s in samples} == {4}
    assert samples[0].metrics["tools/failure_frequency"] == 0.5
    assert run.take(1) == [GroupShrunk(7, 4)]


class FailsOften(LoopbackServer):
    """Refuses the completions of chosen requests, by their order of arrival."""

    refused = frozenset({1, 4, 5, 6, 7, 8, 9, 10})
    arrived = -1

    def complete(self, payload):
        type(self).arrived += 1
        if self.arrived in self.refused:
            raise HttpError(500, "out of memory")
        return super().complete(payload)


def test_failed_generations_shrink_their_group():
    """One request of group 0, all of group 1 and all but one of group 2 fail."""
    FailsOften.arrived = -1
    with toy_server(FailsOften) as server, running(server.url, reward_funcs=[lengths], max_inflight_tasks=1) as run:
        inner = queue.Queue()
        taken = run.take(3 + 1 + 2 + 4 + 1)
        for item in taken:
            inner.put(item)
        assert run.metric_total("rollout/failed_generations_total") == 1
    shrunk = {item.group_id: item.group_size for item in taken if isinstance(item, GroupShrunk)}
    assert shrunk == {0: 3, 1: 0, 2: 1}
    progress = GroupProgress()
    grouped = GroupedQueue(inner, progress=progress)
    rows = [grouped.get_nowait() for _ in range(3 + 4)]
    assert [row.group_id for row in rows] == [0] * 3 + [3] * 4
    assert [row.group_size for row in rows] == [3] * 3 + [4] * 4
    assert progress.num_dropped == {"shrunk": 2}


def test_an_answer_that_is_no_json_is_told_with_its_server(monkeypatch):
    async def broken(*args):
        return json.loads("{oops")

    run = LoopRun("http://127.0.0.1:1")
    monkeypatch.setattr(run.loop, "_post", broken)
    with pytest.raises(RolloutFailedError, match=r"http://127.0.0.1:1/v1/completions must answer .*JSONDecodeError"):
        asyncio.run(run.loop._generate_one_turn([5]))
    run.discard()


def same_name(make):
    def reward(completions, **_):
        return [make] * len(completions)

    return reward


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_attempts": 0}, "max_attempts must be at least 1, got 0"),
        ({"max_failures": 0}, "max_failures must be at least 1, got 0"),
        ({"reward_funcs": [same_name(0), same_name(1)]}, "reward_funcs must have names of their own, got"),
        (
            {"sample_columns": ("answer",)},
            r"sample_columns must be columns of the dataset, \['prompt'\], got \['answer'\]",
        ),
    ],
)
def test_the_worker_refuses_what_cannot_work(options, message):
    with pytest.raises(ValueError, match=message):
        ScoringRolloutWorker(**loop_options("http://127.0.0.1:1", **options))


def test_a_worker_that_does_not_run_says_so():
    worker = ScoringRolloutWorker(**loop_options("http://127.0.0.1:1"))
    with pytest.raises(RuntimeError, match="the rollout child does not run"):
        worker.check_health(300.0)


def test_vllm_is_not_needed_and_the_check_is_restored():
    from treepack.scoring.trl_layout import worker_module

    asked = worker_module.is_vllm_available
    ScoringRolloutWorker(**loop_options("http://127.0.0.1:1"))
    assert worker_module.is_vllm_available is asked
    with pytest.raises(KeyError):
        ScoringRolloutWorker(reward_funcs=[])
    assert worker_module.is_vllm_available is asked
