"""The unshared side of `treepack score --compare`: the same model on each sequence alone."""

import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from treepack.scoring.models import TimedScorer
from treepack.scoring.report import CompareReport
from treepack.scoring.sequences import chunk_inputs
from treepack.scoring.trainer import ScoringTrainer


class UnsharedForward:
    """Scores sequences one by one with a scorer's own model under transformers' own attention.

    Both sides are timed in CPU seconds and by turns, a step at a time, so that what else the machine does and how warm
    it is hits them alike.

    Args:
        scorer: the packed side.
        trainer: what the scorer's forward takes.
        on_scored: called after each sequence with the number scored, 1.
    """

    def __init__(self, scorer: TimedScorer, trainer: ScoringTrainer, on_scored: Callable[[int], None]):
        self._scorer = scorer
        self._trainer = trainer
        self._on_scored = on_scored
        self._attention = "sdpa" if scorer.model._supports_sdpa else "eager"
        self._unshared_s = 0.0
        self._packed_before_s = 0.0
        self._max_difference = 0.0

    def warm_up(self, inputs: dict[str, torch.Tensor], sequence: NDArray[np.int64]) -> None:
        """Run both sides once outside the timing: the packed one on a row's scorer inputs, the other on a sequence."""
        with torch.no_grad():
            self._scorer.features(self._trainer, chunk_inputs(inputs)[0])
        for _ in self._scores([sequence]):
            pass
        self._packed_before_s = self._scorer.cpu_s

    def add(self, sequences: Sequence[NDArray[np.int64]], packed_scores: NDArray[np.float64]) -> None:
        """Score `sequences`, whose packed forward gave `packed_scores` (B,)."""
        start = time.process_time()
        for score, packed_score in zip(self._scores(sequences), packed_scores):
            # `np.maximum` keeps a NaN, which `max` may lose.
            self._max_difference = float(np.maximum(self._max_difference, abs(score - packed_score)))
            self._on_scored(1)
        self._unshared_s += time.process_time() - start

    def report(self) -> CompareReport:
        """What was measured so far."""
        packed_s = self._scorer.cpu_s - self._packed_before_s
        return CompareReport(
            unshared_attention=self._attention,
            packed_s=packed_s,
            unshared_s=self._unshared_s,
            speed_ratio=self._unshared_s / packed_s,
            max_score_difference=self._max_difference,
        )

    def _scores(self, sequences: Sequence[NDArray[np.int64]]) -> Iterator[float]:
        model, head = self._scorer.model, self._scorer.head
        model.set_attn_implementation(self._attention)
        try:
            for sequence in sequences:
                with torch.no_grad():
                    output = model.base_model(input_ids=torch.from_numpy(sequence)[None], use_cache=False)
                    score = head(output.last_hidden_state[0, -1])[self._scorer.label].item()
                yield score
        finally:
            model.set_attn_implementation("treepack")
