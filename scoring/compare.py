"""The unshared side of `treepack score --compare`: the same model on each sequence alone."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from treepack.scoring.collectives import gather_rows
from treepack.scoring.models import TimedScorer
from treepack.scoring.report import CompareReport
from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID
from treepack.scoring.sequences import chunk_inputs
from treepack.scoring.step import StepScores
from treepack.scoring.step_tables import Features
from treepack.scoring.trainer import ScoringTrainer

Step = Sequence[Sequence[ScoredRow]]


class UnsharedForward:
    """Scores sequences one by one with a scorer's own model under transformers' own attention.

    Both sides are timed in CPU seconds and by turns, a step at a time, so that what else the machine does and how warm
    it is hits them alike. Each process runs its own ranks' sequences; times are summed over the processes.

    Args:
        scorer: the packed side.
        trainer: what the scorer's forward takes.
        on_scored: called after each sequence with the number of samples scored.
    """

    def __init__(self, scorer: TimedScorer, trainer: ScoringTrainer, on_scored: Callable[[int], None]):
        self._scorer = scorer
        self._trainer = trainer
        self._on_scored = on_scored
        self._attention = "sdpa" if scorer.inner.model._supports_sdpa else "eager"
        self._unshared_s = 0.0
        self._packed_before_s = 0.0
        self._seconds = (0.0, 0.0)
        self._max_difference = 0.0

    def warm_up(self, inputs: dict[str, torch.Tensor], row: ScoredRow) -> None:
        """Run both sides once outside the timing: the packed one on a row's scorer inputs, the other on a sequence."""
        with torch.no_grad():
            self._scorer.features(self._trainer, chunk_inputs(inputs)[0])
            with self._own_attention():
                self._features_alone(_alone(row)[0])
        self._packed_before_s = self._scorer.cpu_s

    def add(self, step: Step, scores: StepScores | None) -> None:
        """Score a step's sequences; every process calls it, with the step's scores on the main one."""
        accelerator = self._trainer.accelerator
        own = [row for rows in step for row in rows[accelerator.process_index :: accelerator.num_processes]]
        uids: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        with torch.no_grad(), self._own_attention():
            for sequence in (sequence for row in own for sequence in _alone(row)):
                start = time.process_time()
                uid, value = self._features_alone(sequence)
                self._unshared_s += time.process_time() - start
                uids.append(uid)
                values.append(value)
                self._on_scored(int((uid >= 0).sum()))
        features = Features.gather(accelerator, self._scorer.name, torch.cat(uids), torch.cat(values))
        seconds = torch.tensor([[self._scorer.cpu_s - self._packed_before_s, self._unshared_s]], dtype=torch.float64)
        packed_s, unshared_s = gather_rows(accelerator, seconds).sum(dim=0).tolist()
        self._seconds = packed_s, unshared_s
        if scores is not None:
            alone, packed = self._rewards(step, features, scores), scores.rewards[:, -1]
            difference = np.where(np.isnan(alone) & np.isnan(packed), 0.0, np.abs(alone - packed))
            # `np.maximum` keeps a NaN, which `max` may lose.
            self._max_difference = float(np.maximum(self._max_difference, difference.max()))

    def report(self) -> CompareReport:
        """What was measured so far."""
        packed_s, unshared_s = self._seconds
        return CompareReport(
            unshared_attention=self._attention,
            packed_s=packed_s,
            unshared_s=unshared_s,
            speed_ratio=unshared_s / packed_s,
            max_score_difference=self._max_difference,
        )

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        model = self._scorer.inner.model
        model.set_attn_implementation(self._attention)
        try:
            yield
        finally:
            model.set_attn_implementation("treepack")

    def _features_alone(self, row: ScoredRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of a row that holds one sequence."""
        (tensors,), _ = self._scorer.collate([row], 0)
        (inputs,) = chunk_inputs({key: tensor[None] for key, tensor in tensors.items()})
        return self._scorer.inner.features(self._trainer, inputs)

    def _rewards(self, step: Step, features: Features, scores: StepScores) -> NDArray[np.float64]:
        """The scorer's column (B,) from `features`."""
        extras: dict[int, list[int]] = {}
        for _, group_id, uid, _ in (extra for rows in step for row in rows for extra in row.extras):
            extras.setdefault(group_id, []).append(uid)
        column = np.empty(len(scores.uids))
        for group_id in np.unique(scores.groups).tolist():
            members = scores.groups == group_id
            rewards, _ = self._scorer.group_rewards(
                features.of(scores.uids[members]), features.of(np.array(extras.get(group_id, []), np.int64))
            )
            column[members] = np.asarray(rewards)
        return column


def _alone(row: ScoredRow) -> list[ScoredRow]:
    """A row for each sequence of `row` that is scored; an empty one, which scores a filler, where there is none."""
    alone = []
    for sample in row.samples:
        if sample["uid"] != FILLER_UID:
            alone.append(ScoredRow())
            alone[-1].add(sample)
    for extra in row.extras:
        alone.append(ScoredRow())
        alone[-1].extras.append(extra)
    return alone or [ScoredRow()]
