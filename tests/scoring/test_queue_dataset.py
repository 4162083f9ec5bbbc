"""QueueDataset: rows of whole groups as samples, stalls as None, and the queue's metrics."""

import queue
from collections import defaultdict
from itertools import islice
from types import SimpleNamespace

import numpy as np
import pytest

from treepack import GroupedQueue
from treepack.scoring.queue_dataset import QueueDataset, sample_of
from treepack.scoring.samples import check_sample


def row(uid, group_id, *, version=1, **more):
    fields = {
        "uid": uid,
        "group_id": group_id,
        "rollout_id": f"r{uid}",
        "group_size": 2,
        "model_version": version,
        "input_ids": np.arange(4),
        "completion_mask": np.array([0, 0, 1, 1]),
        "old_log_probs": np.zeros(4, np.float32),
        "advantage": float("nan"),
        "rewards": {"solved": 1.0},
        "metrics": {},
        "finished": True,
        "columns": {},
        "enqueued_at": None,
    }
    return SimpleNamespace(**{**fields, **more})


def dataset_of(rows, **more):
    inner, metrics = queue.Queue(), defaultdict(list)
    for entry in rows:
        inner.put(entry)
    options = {"model_version": lambda: 3, "metrics": metrics, "flush_after_s": 0.01, **more}
    return QueueDataset(GroupedQueue(inner), **options), metrics


def test_whole_groups_then_a_stall_again_and_again():
    dataset, metrics = dataset_of([row(0, 0), row(1, 1), row(2, 0, version=2), row(3, 1), row(4, 2)])
    samples = list(islice(dataset, 6))
    assert [sample and sample["uid"] for sample in samples] == [0, 2, 1, 3, None, None]
    for sample in samples[:4]:
        check_sample(sample)
    assert metrics["sample/staleness_mean"] == [2.0, 1.0, 2.0, 2.0]
    assert metrics["sample/staleness_max"] == [2.0, 1.0, 2.0, 2.0]
    assert metrics["sample/rollout_queue_size"] == [4.0, 3.0, 2.0, 1.0]
    assert "sample/time_in_queue_s" not in metrics
    assert dataset.wait_s >= 0.02


def test_the_time_in_the_queue_is_logged_where_the_row_knows_it():
    dataset, metrics = dataset_of([row(0, 0, enqueued_at=0.0), row(1, 0, enqueued_at=0.0)])
    list(islice(dataset, 2))
    assert all(seconds > 1e9 for seconds in metrics["sample/time_in_queue_s"])


def test_columns_are_keys_of_the_sample_but_replace_none():
    sample = sample_of(row(0, 0, columns={"reference_ids": [1, 2], "uid": 99}))
    assert sample["reference_ids"] == [1, 2]
    assert sample["uid"] == 0


def test_a_dead_producer_is_told():
    def check_health():
        raise RuntimeError("the child is gone")

    dataset = QueueDataset(
        GroupedQueue(queue.Queue(), check_health=check_health), model_version=lambda: 0, metrics={}, flush_after_s=0.01
    )
    with pytest.raises(RuntimeError, match="the child is gone"):
        next(iter(dataset))


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_stall_takes_time(seconds):
    with pytest.raises(ValueError, match="flush_after_s must be above 0"):
        dataset_of([], flush_after_s=seconds)
