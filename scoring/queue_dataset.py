"""QueueDataset: the rollout queue as a planner's dataset."""

import queue
import time
from collections.abc import Callable, Iterator, MutableMapping
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from torch.utils.data import IterableDataset

from treepack.scoring.queue import GroupedQueue
from treepack.scoring.samples import Sample


class RolloutRow(Protocol):
    """A row of the rollout queue: TRL's `RolloutSample` with what `ScoringRolloutWorker` adds.

    Attributes:
        uid, group_id, rollout_id, group_size, model_version: as in `QueueRow`.
        input_ids, completion_mask, old_log_probs: (n,), see `treepack.scoring.samples`.
        advantage: NaN while pending.
        rewards: {column: float, NaN = not applicable}.
        metrics: {name: float}, averaged over the micro-batch.
        finished: whether the completion ended by itself.
        columns: dataset columns for scorers to read; they become keys of the sample.
        enqueued_at: `time.time()` at which it was put on the queue, or None.
    """

    uid: int
    group_id: int
    rollout_id: Any
    group_size: int
    model_version: int
    input_ids: npt.NDArray[np.int64]
    completion_mask: npt.NDArray[np.int64]
    old_log_probs: npt.NDArray[np.float32]
    advantage: float
    rewards: dict[str, float]
    metrics: dict[str, float]
    finished: bool
    columns: dict[str, Any]
    enqueued_at: float | None


class QueueDataset(IterableDataset[Sample | None]):
    """Samples of whole groups off a queue, without an end, and None whenever no group completes for a while.

    Args:
        rows: the queue.
        model_version: gives the trainer's current policy version.
        metrics: sink of TRL's queue metrics: `sample/rollout_queue_size`, `sample/time_in_queue_s`,
            `sample/staleness_mean` and `_max`.
        flush_after_s: seconds without a new group after which None is yielded, again and again while it lasts.

    Attributes:
        wait_s: seconds spent waiting for rows; the reader may reset it.

    Raises:
        ValueError: `flush_after_s` is not positive.
        Exception: while iterating, what `GroupedQueue.get` raises (its health check included).
    """

    def __init__(
        self,
        rows: GroupedQueue,
        *,
        model_version: Callable[[], int],
        metrics: MutableMapping[str, list[Any]],
        flush_after_s: float = 30.0,
    ) -> None:
        if not flush_after_s > 0:
            raise ValueError(f"flush_after_s must be above 0, got {flush_after_s}")
        self.wait_s = 0.0
        self._rows = rows
        self._model_version = model_version
        self._metrics = metrics
        self._flush_after_s = flush_after_s

    def __iter__(self) -> Iterator[Sample | None]:
        while True:
            start = time.perf_counter()
            try:
                row: Any = self._rows.get(timeout=self._flush_after_s)
            except queue.Empty:
                row = None
            self.wait_s += time.perf_counter() - start
            if row is None:
                yield None
            else:
                self._log(row)
                yield sample_of(row)

    def _log(self, row: RolloutRow) -> None:
        staleness = float(self._model_version() - row.model_version)
        values = {
            "sample/rollout_queue_size": float(self._rows.qsize()),
            "sample/staleness_mean": staleness,
            "sample/staleness_max": staleness,
        }
        if row.enqueued_at is not None:
            values["sample/time_in_queue_s"] = time.time() - row.enqueued_at
        for name, value in values.items():
            self._metrics.setdefault(name, []).append(value)


def sample_of(row: RolloutRow) -> Sample:
    """The planner's sample dict of a queue row; dataset columns do not replace what a row has of its own."""
    return {
        **row.columns,
        "uid": row.uid,
        "group_id": row.group_id,
        "rollout_id": row.rollout_id,
        "group_size": row.group_size,
        "input_ids": row.input_ids,
        "completion_mask": row.completion_mask,
        "old_log_probs": row.old_log_probs,
        "advantage": row.advantage,
        "rewards": row.rewards,
        "metrics": row.metrics,
        "finished": row.finished,
    }
