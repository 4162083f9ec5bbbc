"""Runs in which processes die, started by test_faults_of_processes.py: python faulty_runs.py FOLDER NAME..."""

import json
import os
import signal
import time
from contextlib import contextmanager

import pytest

from support.trl_end_to_end import run_named, served_training
from support.trl_rewards import lengths, raises

MID_STEP_S = 120
"""How long the step sleeps in which the test kills the run."""


@contextmanager
def training_whose_child_is_killed(folder):
    """By the kernel, say, for its memory: (trainer, when it was killed), the latter filled by the first scored step."""
    killed = []

    def kill(_scores):
        if not killed:
            killed.append(time.monotonic())
            os.kill(trainer.rollout_worker._process.pid, signal.SIGKILL)

    config = {"max_steps": 1000}
    with served_training(folder, reward_funcs=[lengths], on_rollouts_scored=[kill], config=config) as (trainer, _):
        yield trainer, killed


def child_is_killed(folder):
    with training_whose_child_is_killed(folder) as (trainer, killed):
        with pytest.raises(RuntimeError, match="the rollout child is gone without a word, exit code -9"):
            trainer.train()
        assert time.monotonic() - killed[0] < 30


def child_is_killed_uncaught(folder):
    with training_whose_child_is_killed(folder) as (trainer, _):
        trainer.train()


def reward_raises(folder):
    with served_training(folder, reward_funcs=[raises]) as (trainer, _):
        message = "the rollout child failed: RolloutFailedError: reward function 'raises' failed with ZeroDivisionError"
        with pytest.raises(RuntimeError, match=f"{message}: the reward's own mistake"):
            trainer.train()


def report_groups(scores):
    print(json.dumps(sorted(set(map(int, scores.groups)))), flush=True)


CHECKPOINTS = {"save_strategy": "steps", "save_steps": 1}


def stays_in_step_3(folder):
    """Two steps are trained and saved, the third never ends; prints their groups, then the child's process id."""
    steps = []

    def stay(_scores):
        steps.append(0)
        if len(steps) == 3:
            print(trainer.rollout_worker._process.pid, flush=True)
            time.sleep(MID_STEP_S)

    with served_training(
        folder,
        reward_funcs=[lengths],
        on_rollouts_scored=[report_groups, stay],
        config={**CHECKPOINTS, "max_steps": 10},
    ) as (trainer, _):
        trainer.train()


def goes_on(folder):
    """From the last checkpoint; prints the groups of two more steps."""
    with served_training(
        folder, reward_funcs=[lengths], on_rollouts_scored=[report_groups], config={**CHECKPOINTS, "max_steps": 4}
    ) as (trainer, _):
        trainer.train(resume_from_checkpoint=str(folder / "checkpoint-2"))
        assert trainer.progress.num_trained == 16


if __name__ == "__main__":
    run_named((child_is_killed, child_is_killed_uncaught, reward_raises, stays_in_step_3, goes_on))
