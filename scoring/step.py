"""score_step: a step's samples are scored, their advantages written in, and what carries no gradient taken out."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from treepack.scoring.advantages import combine_rewards, group_advantages, last_rows
from treepack.scoring.agreement import agreed_rewards, check_same_step, described_step
from treepack.scoring.collator import names_of
from treepack.scoring.collectives import exit_on_error, raised_on_all_ranks
from treepack.scoring.scorer import TrainerScorer
from treepack.scoring.sequences import chunk_inputs
from treepack.scoring.step_tables import ExtraTable, Features, Float64, Int64, SampleTable, Scoring
from treepack.scoring.trainer import LossNormalization, ScoringTrainer

Metrics = dict[str, float | tuple[float, float]]

TRAINED = ""


@dataclass(frozen=True)
class StepScores:
    """What one optimizer step's samples got, in order of uid.

    Attributes:
        names: the C reward columns: the rollouts' own by sorted name, then the scorers'.
        uids: (B,) int64.
        groups: (B,) int64, the samples' group ids. Give them to `GroupProgress.trained` after the optimizer step.
        rewards: (B, C) float64, NaN = not applicable.
        advantages: (B,) float64; 0 for a sample without signal.
        trained_tokens: (B,) int64, loss terms left in the step.
        reasons: why a sample is not trained, "" where it is: "truncated" (under mask_truncated_completions),
            "unscorable" (no reward applies), "zero_advantage", "no_trained_token" (an empty completion mask).
        metrics: TRL's metric families; a (numerator, denominator) pair is a rate. What nothing in the step has a finite
            value for is left out: one NaN would wipe the logging window.
    """

    names: tuple[str, ...]
    uids: Int64
    groups: Int64
    rewards: Float64
    advantages: Float64
    trained_tokens: Int64
    reasons: tuple[str, ...]
    metrics: Metrics


def score_step(trainer: ScoringTrainer, batches: Sequence[dict[str, Any]]) -> StepScores | None:
    """Score one optimizer step's micro-batches in place.

    Runs each scorer on the process's rows of every micro-batch, gathers the features, computes group rewards and
    advantages on every rank alike, writes the advantages into the micro-batches, and takes samples without gradient
    (zero advantage, unscorable, truncated under `mask_truncated_completions`) out of the loss and of `global_n_tokens`,
    which is what dropping them before packing would have done. A row left without a loss term keeps one of advantage 0,
    outside `global_n_tokens`, so that the loss has a graph.

    Args:
        trainer: has accelerator, model, scorers and args as in `ScoringTrainer`. `trainer.model` is in eval mode while
            scorers run, under `accelerator.autocast()` and without gradient, and gets its mode back.
        batches: the micro-batches of one step as `ScoringCollator` made them, this process's rows in dim 0. Their
            "scoring" entry is consumed.

    Returns:
        The step's scores on the main process, None on the others.

    Raises:
        ValueError: a micro-batch without "scoring", a group that is not whole, or a scorer whose uids or rewards do not
            match the samples. On all ranks, saying which differ: ranks that disagree on the micro-batches, the scorers,
            the options, or a scorer's rewards.
        RuntimeError: another rank failed; the message is that rank's. Inside a sharded scorer's forward, where peers
            wait in a collective, the failing process logs its error and ends instead.
    """
    start = time.perf_counter()
    accelerator = trainer.accelerator
    with raised_on_all_ranks(accelerator, "reading the micro-batches"):
        _check_scoring(batches, len(trainer.scorers))
        description = described_step(trainer, batches)
    check_same_step(accelerator, description)
    scoring = [batch.pop("scoring") for batch in batches]
    table = SampleTable.gather(accelerator, scoring)
    extras = ExtraTable.gather(accelerator, scoring)
    names = names_of(scoring[0]["reward_names"]) + tuple(scorer.name for scorer in trainer.scorers)
    rewards = table.rewards
    metrics: Metrics = {}
    for index, scorer in enumerate(trainer.scorers):
        features = _features(trainer, scorer, index, scoring)
        with raised_on_all_ranks(accelerator, f"computing the group rewards of scorer {scorer.name!r}"):
            column, scorer_metrics = _group_rewards(scorer, features, table, extras.of_scorer(index))
        column = agreed_rewards(accelerator, scorer.name, table.uid, column)
        rewards = np.concatenate([rewards, column[:, None]], axis=1)
        metrics |= scorer_metrics

    weights = _column_weights(trainer.args.reward_weights, names)
    reward = combine_rewards(rewards, weights)
    advantages = group_advantages(
        rewards,
        table.group,
        table.rollout,
        weights=weights,
        estimator=trainer.args.advantage_estimator,
        scale=trainer.args.scale_rewards,
    )
    reasons = _reasons(table, reward, advantages, trainer.args.mask_truncated_completions)
    trained_tokens = np.where([reason == TRAINED for reason in reasons], table.tokens, 0)
    _write_back(accelerator.process_index, batches, table, advantages, trained_tokens, trainer.args.loss_normalization)
    if not accelerator.is_main_process:
        return None
    metrics |= _reward_metrics(names, rewards, reward, table)
    metrics["perf/score_s"] = time.perf_counter() - start
    metrics = {name: value for name, value in metrics.items() if _has_value(value)}
    return StepScores(names, table.uid, table.group, rewards, advantages, trained_tokens, reasons, metrics)


def _check_scoring(batches: Sequence[dict[str, Any]], num_scorers: int) -> None:
    lacking = [m for m, batch in enumerate(batches) if "scoring" not in batch]
    if not batches or lacking:
        raise ValueError(
            f"batches must be micro-batches of ScoringCollator, got none with 'scoring' at {lacking or 'all'}"
        )
    for m, batch in enumerate(batches):
        if len(batch["scoring"]["scorers"]) != num_scorers:
            raise ValueError(
                f"scorers must be those the micro-batches were collated with, got {num_scorers} for the "
                f"{len(batch['scoring']['scorers'])} of micro-batch {m}"
            )


@contextmanager
def _scoring_mode(trainer: ScoringTrainer) -> Iterator[None]:
    """Eval mode, autocast and no gradient: set, since TRL's first forward of a step finds another mode."""
    training = trainer.model.training
    trainer.model.eval()
    try:
        with torch.no_grad(), trainer.accelerator.autocast():
            yield
    finally:
        trainer.model.train(training)


def _features(trainer: ScoringTrainer, scorer: TrainerScorer, index: int, scoring: Scoring) -> Features:
    """Features of all sequences of the step: one `features` call a micro-batch, row and chunk, whatever it holds."""
    accelerator, doing = trainer.accelerator, f"computing the features of scorer {scorer.name!r}"
    guard = exit_on_error if scorer.sharded else raised_on_all_ranks
    uids: list[torch.Tensor] = []
    values: list[torch.Tensor] = []
    with guard(accelerator, doing), _scoring_mode(trainer):
        for entry in scoring:
            tensors = entry["scorers"][str(index)]
            for row in range(entry["uid"].shape[0]):
                for chunk in chunk_inputs({key: tensor[row : row + 1] for key, tensor in tensors.items()}):
                    uid, value = scorer.features(trainer, chunk)
                    _check_features(scorer, uid, value, values)
                    uids.append(uid)
                    values.append(value.detach().float())
    return Features.gather(accelerator, scorer.name, torch.cat(uids), torch.cat(values))


def _check_features(
    scorer: TrainerScorer, uid: torch.Tensor, value: torch.Tensor, earlier: Sequence[torch.Tensor]
) -> None:
    if value.ndim != 2 or uid.shape != value.shape[:1]:
        raise ValueError(
            f"scorer {scorer.name!r} must give uids (S,) and features (S, F), got {tuple(uid.shape)} and "
            f"{tuple(value.shape)}"
        )
    if earlier and value.shape[1] != earlier[0].shape[1]:
        raise ValueError(
            f"scorer {scorer.name!r} must give features of one width everywhere, got {earlier[0].shape[1]} and "
            f"{value.shape[1]}"
        )


def _group_rewards(
    scorer: TrainerScorer, features: Features, table: SampleTable, extras: ExtraTable
) -> tuple[Float64, dict[str, float]]:
    """The scorer's column (B,), and its metrics averaged over the groups that have them."""
    column = np.full(len(table.uid), np.nan)
    metrics: dict[str, list[float]] = {}
    for group in np.unique(table.group):
        members = np.flatnonzero(table.group == group)
        rewards, group_metrics = scorer.group_rewards(
            features.of(table.uid[members]), features.of(extras.uid[extras.group == group])
        )
        values = rewards.detach().cpu().numpy() if isinstance(rewards, torch.Tensor) else np.asarray(rewards)
        if values.shape != members.shape:
            raise ValueError(
                f"scorer {scorer.name!r} must give one reward a sample, got shape {values.shape} for the "
                f"{len(members)} samples of group {int(group)}"
            )
        column[members] = values
        for name, value in group_metrics.items():
            metrics.setdefault(name, []).append(float(value))
    if np.isinf(column).any():
        uid = int(table.uid[np.isinf(column)][0])
        raise ValueError(f"scorer {scorer.name!r} must give finite rewards or NaN, got an infinite one for uid {uid}")
    if scorer.rows == "mean":
        column = _mean_over_rows(column, table)
    return column, {name: _mean(np.asarray(values)) for name, values in metrics.items()}


def _mean_over_rows(column: Float64, table: SampleTable) -> Float64:
    """Every row of a rollout with the mean of its rows' rewards; NaN where none of them applies."""
    of_row, last = last_rows(table.group, table.rollout)
    known = ~np.isnan(column)
    count = np.bincount(of_row[known], minlength=len(last))
    total = np.bincount(of_row[known], column[known], minlength=len(last))
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)[of_row]


def _column_weights(
    weights: Sequence[float] | Mapping[str, float] | None, names: tuple[str, ...]
) -> list[float] | None:
    if weights is None:
        return None
    if isinstance(weights, Mapping):
        return [float(weights.get(name, 1.0)) for name in names]
    if len(weights) != len(names):
        raise ValueError(f"reward_weights must have one weight for each of {list(names)}, got {list(weights)}")
    return [float(weight) for weight in weights]


def _reasons(
    table: SampleTable, reward: Float64, advantages: Float64, mask_truncated_completions: bool
) -> tuple[str, ...]:
    unscorable = np.isnan(reward) & (advantages == 0)
    conditions = [
        table.tokens == 0,
        table.truncated & mask_truncated_completions,
        unscorable,
        advantages == 0,
    ]
    reasons = ["no_trained_token", "truncated", "unscorable", "zero_advantage"]
    return tuple(str(reason) for reason in np.select(conditions, reasons, default=TRAINED))


def _write_back(
    process_index: int,
    batches: Sequence[dict[str, Any]],
    table: SampleTable,
    advantages: Float64,
    trained_tokens: Int64,
    normalization: LossNormalization,
) -> None:
    process, micro_batch, row_of, column_of = table.place.T
    for m, batch in enumerate(batches):
        num_rows, _ = batch["segment_id"].shape
        for row in range(num_rows):
            here = (process == process_index) & (micro_batch == m) & (row_of == row)
            # Columns of padding and fillers stay 0 and untrained.
            num_columns = max(int(batch["segment_id"][row].max()), int(column_of[here].max(initial=0))) + 1
            advantage, trained = np.zeros(num_columns, np.float32), np.zeros(num_columns, bool)
            advantage[column_of[here]] = advantages[here]
            trained[column_of[here]] = trained_tokens[here] > 0
            _write_row(batch, row, torch.from_numpy(advantage), torch.from_numpy(trained))
    of_batch = np.bincount(micro_batch, trained_tokens, minlength=len(batches)).astype(np.float64)
    for batch, num_tokens in zip(batches, _normalizers(of_batch, normalization), strict=True):
        batch["global_n_tokens"].fill_(num_tokens)


def _write_row(batch: dict[str, Any], row: int, advantage: torch.Tensor, trained: torch.Tensor) -> None:
    """Write advantages (by segment_id) into one row's loss terms and take out those of samples that train nothing."""
    token_index, segment_id = batch["token_index"][row], batch["segment_id"][row]
    live = (token_index >= 0) & trained.to(segment_id.device)[segment_id]
    batch["advantages"][row] = torch.where(live, advantage.to(segment_id.device)[segment_id], 0.0)
    token_index[~live] = -1
    labels = batch["shift_labels"][row]
    targets = torch.zeros_like(labels, dtype=torch.bool)
    targets[token_index[live]] = True
    labels[~targets] = -100
    if not live.any():
        token_index[0], segment_id[0], batch["old_log_probs"][row, 0] = 0, 0, 0.0


def _normalizers(tokens: Float64, normalization: LossNormalization) -> Float64:
    """`global_n_tokens` of each micro-batch, given its loss terms.

    TRL's loss divides a micro-batch's sum by it and by the number G of micro-batches. "step" wants the sum over the
    step divided by the step's tokens; "microbatch" a mean over the micro-batches that hold any. The result travels as
    float32, TRL's dtype: exact where no micro-batch is emptied, else within its rounding. TRL takes less than one token
    a rank for one: what falls below is weighted less.
    """
    if normalization == "step":
        return np.full(len(tokens), tokens.sum() / len(tokens))
    return tokens * (np.count_nonzero(tokens) / len(tokens))


def _reward_metrics(names: tuple[str, ...], rewards: Float64, reward: Float64, table: SampleTable) -> Metrics:
    """TRL's reward metrics, over rollouts (each votes once, with its last row)."""
    _, last = last_rows(table.group, table.rollout)
    scored = last[~np.isnan(reward[last])]
    groups = [reward[scored[table.group[scored] == group]] for group in np.unique(table.group[scored])]
    flat = sum(members.max() == members.min() for members in groups)
    return {
        "reward": _mean(reward[last]),
        "reward_std": _mean(np.array([members.std() for members in groups])),
        "frac_reward_zero_std": (float(flat), float(len(groups))),
        **{f"rewards/{name}": _mean(rewards[last, i]) for i, name in enumerate(names)},
    }


def _has_value(value: float | tuple[float, float]) -> bool:
    """Whether there is a number to log; a rate of nothing is none."""
    return value[1] != 0 if isinstance(value, tuple) else math.isfinite(value)


def _mean(values: Float64) -> float:
    """Mean of the finite values; NaN where there is none."""
    known = values[np.isfinite(values)]
    return float(known.mean()) if len(known) else float("nan")
