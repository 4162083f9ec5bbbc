"""What `treepack score` found out, as numbers: per row, per step, and for the whole job."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID
from treepack.scoring.step import TRAINED, StepScores


@dataclass(frozen=True)
class RowReport:
    """One packed row.

    Attributes:
        micro_batch: its micro-batch in the step, from 0.
        rank: the rank it goes to, from 0.
        samples: samples on it, fillers left out.
        raw_tokens: tokens of these samples.
        tokens: tokens forwarded, fillers included.
        trained_tokens: loss terms before any sample is taken out.
        raw_pairs: (query, key) pairs attention would visit without sharing.
        pairs: pairs it visits.
    """

    micro_batch: int
    rank: int
    samples: int
    raw_tokens: int
    tokens: int
    trained_tokens: int
    raw_pairs: int
    pairs: int


@dataclass(frozen=True)
class StepReport:
    """One optimizer step's plan.

    Attributes:
        step: its number, from 0.
        groups: groups in it.
        rows: its packed rows, micro-batch by micro-batch.
    """

    step: int
    groups: int
    rows: tuple[RowReport, ...]

    def total(self, field_name: str) -> int:
        """A row figure summed over the step."""
        return sum(getattr(row, field_name) for row in self.rows)

    def idle(self, field_name: str) -> int:
        """What the rows of each micro-batch fall short of its largest, summed over the step."""
        micro_batches = {row.micro_batch for row in self.rows}
        figures = [[getattr(row, field_name) for row in self.rows if row.micro_batch == m] for m in micro_batches]
        return sum(max(of_rows) * len(of_rows) - sum(of_rows) for of_rows in figures)


@dataclass(frozen=True)
class CompareReport:
    """The packed forward beside the same model run on each sequence alone.

    Attributes:
        unshared_attention: the attention implementation of the unshared forward.
        packed_s, unshared_s: CPU seconds of the two forwards.
        speed_ratio: unshared_s / packed_s.
        max_score_difference: largest absolute difference of a sample's score.
    """

    unshared_attention: str
    packed_s: float
    unshared_s: float
    speed_ratio: float
    max_score_difference: float


@dataclass
class Mean:
    """A running mean that leaves NaN out."""

    total: float = 0.0
    count: int = 0

    def add(self, values: NDArray[np.float64]) -> None:
        """Add values of any shape."""
        self.total += float(np.nansum(values))
        self.count += int(np.count_nonzero(~np.isnan(values)))

    @property
    def value(self) -> float | None:
        """The mean, None of nothing."""
        return _ratio(self.total, self.count)


@dataclass
class ScoreReport:
    """The whole job; `to_dict` is what report.json and --json hold.

    Attributes:
        rollouts: the file scored.
        options: the command's options.
        model: the scorer's model, None without one.
        steps: the finished optimizer steps.
        trained_samples, trained_tokens: samples left in the loss, and their loss terms.
        not_trained: samples that train nothing, by reason; those of dropped groups included.
        rewards: mean of each reward column over the samples it applies to, by name.
        reward: mean of the combined reward over the samples that have one.
        seconds: wall-clock seconds by phase.
        compare: filled under --compare.
        notes: what a reader of the figures should know.
        interrupted: whether the job was stopped before its end.
    """

    rollouts: str
    options: dict[str, Any]
    model: str | None
    steps: list[StepReport] = field(default_factory=list)
    trained_samples: int = 0
    trained_tokens: int = 0
    not_trained: Counter[str] = field(default_factory=Counter)
    rewards: dict[str, Mean] = field(default_factory=dict)
    reward: Mean = field(default_factory=Mean)
    seconds: dict[str, float] = field(default_factory=dict)
    compare: CompareReport | None = None
    notes: list[str] = field(default_factory=list)
    interrupted: bool = False

    def add_step(self, step: StepReport, scores: StepScores, reward: NDArray[np.float64]) -> None:
        """Add a finished step, given its scores and the samples' combined reward (B,)."""
        self.steps.append(step)
        self.trained_samples += sum(reason == TRAINED for reason in scores.reasons)
        self.trained_tokens += int(scores.trained_tokens.sum())
        self.not_trained.update(reason for reason in scores.reasons if reason != TRAINED)
        for name, column in zip(scores.names, scores.rewards.T):
            self.rewards.setdefault(name, Mean()).add(column)
        self.reward.add(reward)

    def total(self, field_name: str) -> int:
        """A row figure summed over the job."""
        return sum(step.total(field_name) for step in self.steps)

    @property
    def packing_ratio(self) -> float | None:
        """Raw tokens a forwarded one; None when nothing was forwarded."""
        return _ratio(self.total("raw_tokens"), self.total("tokens"))

    @property
    def attention_pair_ratio(self) -> float | None:
        """(query, key) pairs without sharing, a visited one; None when nothing was forwarded."""
        return _ratio(self.total("raw_pairs"), self.total("pairs"))

    @property
    def padding(self) -> float | None:
        """Share of a padded micro-batch's tokens that is padding."""
        return self._idle_share("tokens")

    @property
    def imbalance(self) -> float | None:
        """Share of attention work for which ranks wait for the slowest of their micro-batch."""
        return self._idle_share("pairs")

    def _idle_share(self, field_name: str) -> float | None:
        idle = sum(step.idle(field_name) for step in self.steps)
        return _ratio(idle, idle + self.total(field_name))

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values, the totals first and the steps' rows last."""
        return {
            "rollouts": self.rollouts,
            "model": self.model,
            "options": self.options,
            "interrupted": self.interrupted,
            "optimizer_steps": len(self.steps),
            "groups": sum(step.groups for step in self.steps),
            "samples": self.total("samples"),
            "raw_tokens": self.total("raw_tokens"),
            "unique_tokens": self.total("tokens"),
            "packing_ratio": self.packing_ratio,
            "attention_pair_ratio": self.attention_pair_ratio,
            "padding": self.padding,
            "imbalance": self.imbalance,
            "trained_samples": self.trained_samples,
            "trained_tokens": self.trained_tokens,
            "not_trained": dict(self.not_trained),
            "reward": self.reward.value,
            "rewards": {name: mean.value for name, mean in self.rewards.items()},
            "seconds": self.seconds,
            "compare": asdict(self.compare) if self.compare else None,
            "notes": self.notes,
            "steps": [asdict(step) for step in self.steps],
        }


def report_step(step: int, micro_batches: Sequence[Sequence[ScoredRow]]) -> StepReport:
    """The report of a planned step."""
    groups = {sample["group_id"] for rows in micro_batches for row in rows for sample in row.samples}
    rows = [
        _report_row(micro_batch, rank, row)
        for micro_batch, rows in enumerate(micro_batches)
        for rank, row in enumerate(rows)
    ]
    return StepReport(step, len(groups), tuple(rows))


def _report_row(micro_batch: int, rank: int, row: ScoredRow) -> RowReport:
    lengths = [len(sample["input_ids"]) for sample in row.samples if sample["uid"] != FILLER_UID]
    return RowReport(
        micro_batch=micro_batch,
        rank=rank,
        samples=len(lengths),
        raw_tokens=sum(lengths),
        tokens=row.num_tokens,
        trained_tokens=row.trained,
        raw_pairs=sum(length * (length + 1) // 2 for length in lengths),
        pairs=row.load,
    )


def _ratio(numerator: float, denominator: float) -> float | None:
    return numerator / denominator if denominator else None
