"""`treepack replay`: a recorded step is planned and scored again, and what comes out differently is shown."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.scoring.collator import ScoringCollator
from treepack.scoring.errors import OptionError
from treepack.scoring.models import ScorerKind, TimedScorer, load_scorer, scorer_name
from treepack.scoring.open_step import MicroBatch
from treepack.scoring.planner import StepPlanner
from treepack.scoring.recorder import RecordedStep, read_recorded_step, recorded_steps
from treepack.scoring.score_options import RECORD
from treepack.scoring.step import StepScores, score_step
from treepack.scoring.trainer import LocalTrainer, ScoringArgs

REWARD_TOLERANCE = 1e-4
"""How far a model's rewards may be off, and what follows from them: another machine sums in another order."""

RECORDED_TOLERANCE = 1e-9
"""The same where all rewards are as recorded: float64, but for the order of summation."""


@dataclass(frozen=True)
class Outcome:
    """What became of a sample.

    Attributes:
        place: (micro-batch, rank), from 0; None where it was not planned.
        reward: the column of the scorer that is run again; None without one, or where it does not apply.
        advantage: None where it was not planned.
        reason: why it is not trained, "" where it is.
    """

    place: tuple[int, int] | None
    reward: float | None
    advantage: float | None
    reason: str


@dataclass(frozen=True)
class Difference:
    """A sample that came out differently."""

    uid: int
    group_id: int
    recorded: Outcome
    replayed: Outcome


@dataclass(frozen=True)
class ReplayReport:
    """What became of one recorded step.

    Attributes:
        step: its number.
        samples: samples in it.
        moved: samples on another micro-batch or rank, or not planned any more.
        max_reward_difference: of the scorer's column; None where none is run again.
        max_advantage_difference: over the samples that are still planned.
        differences: the samples that moved, or whose reward, advantage or reason differs, in the planner's order.
    """

    step: int
    samples: int
    moved: int
    max_reward_difference: float | None
    max_advantage_difference: float
    differences: tuple[Difference, ...]

    def to_dict(self) -> dict[str, Any]:
        """The report as JSON values."""
        return asdict(self)


def replay_step(
    folder: Path,
    *,
    step: int | None = None,
    scorer: ScorerKind = "reward-model",
    model: Path | None = None,
    seed: int = 0,
) -> ReplayReport:
    """Plan and score a recorded step again.

    Args:
        folder: of a `StepRecorder`, or of a `treepack score --record`.
        step: its number; by default the last one.
        scorer: which reward column is computed again, where `model` is given. The others are as recorded.
        model: its model (see `load_scorer`).
        seed: of the weights that the model's file lacks.

    Raises:
        OptionError, RolloutError, ModelError: the folder, the step or the model cannot be used.
    """
    files = recorded_steps(folder) or recorded_steps(folder / RECORD)
    if not files:
        raise OptionError(f"{folder}: holds no recorded steps")
    number = max(files) if step is None else step
    if number not in files:
        raise OptionError(f"--step must be one of those recorded, {min(files)} to {max(files)}, got {number}")
    recorded = read_recorded_step(files[number])
    loaded = None if model is None else _load(recorded, scorer, model, seed)
    return _report(recorded, loaded, *_score_again(recorded, loaded))


def _load(recorded: RecordedStep, kind: ScorerKind, model: Path, seed: int) -> TimedScorer:
    name = scorer_name(kind)
    if name not in recorded.names[recorded.num_own_names :]:
        raise OptionError(
            f"--scorer must be one the step was scored with, {list(recorded.names[recorded.num_own_names :])}, "
            f"got {name!r}"
        )
    rollouts = recorded.rollouts
    return load_scorer(
        kind,
        model,
        vocab_size=rollouts.vocab_size,
        longest_row=int(np.diff(rollouts.offsets).max()),
        token_budget=max(recorded.settings.token_budget, int(np.diff(rollouts.offsets).max())),
        seed=seed,
    ).scorer


def _score_again(recorded: RecordedStep, scorer: TimedScorer | None) -> tuple[list[MicroBatch], StepScores | None]:
    """The micro-batches that the planner makes of the samples now, and the scores of the first step of them."""
    settings = recorded.settings
    if scorer is not None:
        rewards = {name: column for name, column in recorded.rollouts.rewards.items() if name != scorer.name}
        recorded = replace(recorded, rollouts=replace(recorded.rollouts, rewards=rewards))
    scorers = [] if scorer is None else [scorer]
    planner = StepPlanner(
        recorded.samples(),
        num_processes=recorded.ranks,
        steps=recorded.micro_batches,
        token_budget=settings.token_budget,
        samples_per_row=settings.samples_per_row,
        scorers=scorers,
        metrics={},
        share_prefixes=settings.share_prefixes,
        placement=settings.placement,
        token_cost=settings.token_cost,
    )
    step = list(planner)[: recorded.micro_batches]
    if not step:
        return step, None
    collator = ScoringCollator(0, recorded.ranks, token_budget=max(settings.token_budget, 0), scorers=scorers)
    trainer = LocalTrainer(
        torch.nn.Identity() if scorer is None else scorer.inner.model,
        scorers,
        ScoringArgs(
            advantage_estimator=settings.estimator,
            scale_rewards=settings.scale,
            reward_weights=_weights_by_name(recorded),
            mask_truncated_completions=settings.mask_truncated_completions,
        ),
    )
    return step, score_step(trainer, [collator([rows]) for rows in step])


def _weights_by_name(recorded: RecordedStep) -> dict[str, float] | None:
    """A replay has its columns in another order: the scorers' are among the rollouts' own."""
    weights = recorded.settings.reward_weights
    if weights is None:
        return None
    return dict(weights) if isinstance(weights, Mapping) else dict(zip(recorded.names, weights, strict=True))


def _report(
    recorded: RecordedStep, scorer: TimedScorer | None, step: list[MicroBatch], scores: StepScores | None
) -> ReplayReport:
    column = None if scorer is None else recorded.names.index(scorer.name)
    before = [
        Outcome(
            place=(micro_batch, rank),
            reward=None if column is None else _none_if_nan(recorded.rewards[i, column]),
            advantage=float(recorded.advantages[i]),
            reason=recorded.reasons[i],
        )
        for i, (micro_batch, rank) in enumerate(recorded.place.tolist())
    ]
    replayed = _outcomes(step, scores, scorer is not None)
    rollouts = recorded.rollouts
    after = [replayed.get(uid, Outcome(None, None, None, "not planned")) for uid in rollouts.uid.tolist()]
    tolerance = RECORDED_TOLERANCE if scorer is None else REWARD_TOLERANCE
    return ReplayReport(
        step=recorded.number,
        samples=len(rollouts),
        moved=sum(old.place != new.place for old, new in zip(before, after)),
        max_reward_difference=None if scorer is None else _largest(before, after, "reward"),
        max_advantage_difference=_largest(before, after, "advantage"),
        differences=tuple(
            Difference(uid, group_id, old, new)
            for uid, group_id, old, new in zip(rollouts.uid.tolist(), rollouts.group_id.tolist(), before, after)
            if not _same(old, new, tolerance)
        ),
    )


def _outcomes(step: list[MicroBatch], scores: StepScores | None, with_reward: bool) -> dict[int, Outcome]:
    """What became of each sample now, by uid; the scorer's column is the last one."""
    if scores is None:
        return {}
    place = {
        sample["uid"]: (micro_batch, rank)
        for micro_batch, rows in enumerate(step)
        for rank, row in enumerate(rows)
        for sample in row.samples
    }
    return {
        uid: Outcome(
            place=place[uid],
            reward=_none_if_nan(scores.rewards[i, -1]) if with_reward else None,
            advantage=float(scores.advantages[i]),
            reason=scores.reasons[i],
        )
        for i, uid in enumerate(scores.uids.tolist())
    }


def _same(old: Outcome, new: Outcome, tolerance: float) -> bool:
    return (
        (old.place, old.reason) == (new.place, new.reason)
        and (old.reward is None) == (new.reward is None)
        and _largest([old], [new], "reward") <= tolerance
        and _largest([old], [new], "advantage") <= tolerance
    )


def _largest(before: Sequence[Outcome], after: Sequence[Outcome], name: str) -> float:
    """The largest difference of a figure, where both sides have it."""
    pairs = ((getattr(old, name), getattr(new, name)) for old, new in zip(before, after))
    return max((abs(a - b) for a, b in pairs if a is not None and b is not None), default=0.0)


def _none_if_nan(value: float) -> float | None:
    return None if np.isnan(value) else float(value)
