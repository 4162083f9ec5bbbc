"""Group advantages: what a sample's reward says about it beside the other rollouts of its prompt.

GRPO (Shao et al. 2024, arXiv 2402.03300) centres a reward on its group's mean and divides by the group's standard
deviation; RLOO (Ahmadian et al. 2024, arXiv 2402.14740) centres it on the mean of the other rollouts.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch

Estimator = Literal["grpo", "rloo"]
Scale = Literal["group", "batch", "none"]
Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
ArrayOrTensor = TypeVar("ArrayOrTensor", npt.NDArray[Any], torch.Tensor)

STD_EPS = 1e-8
"""Added to a standard deviation before dividing by it, as TRL's AsyncGRPOTrainer does."""

_ROUNDING = 64 * np.finfo(np.float64).eps
"""Rewards of a group that differ by less than this, relative to the largest, are equal up to float64 rounding."""


def combine_rewards(rewards: Float64, weights: Sequence[float] | Float64 | None = None) -> Float64:
    """One reward a sample: the weighted sum over the columns that apply to it.

    Args:
        rewards: (B, C) float64, NaN where a column does not apply to a sample.
        weights: C finite weights, one a column; all 1 by default.

    Returns:
        (B,) float64, NaN where no column applies.

    Raises:
        ValueError: `weights` has another length than C or a value that is not finite.
    """
    w = np.ones(rewards.shape[1]) if weights is None else np.asarray(weights, dtype=np.float64)
    if w.shape != (rewards.shape[1],) or not np.isfinite(w).all():
        raise ValueError(f"weights must be {rewards.shape[1]} finite numbers, one a reward column, got {weights!r}")
    applies = ~np.isnan(rewards)
    total = np.where(applies, rewards, 0.0) @ w
    return np.where(applies.any(axis=1), total, np.nan)


def group_advantages(
    rewards: ArrayOrTensor,
    group_ids: ArrayOrTensor | Sequence[int],
    rollout_ids: ArrayOrTensor | Sequence[int] | None = None,
    *,
    weights: Sequence[float] | None = None,
    estimator: Estimator = "grpo",
    scale: Scale = "group",
) -> ArrayOrTensor:
    """Advantage of each sample within its group.

    A rollout votes once in its group's mean and standard deviation, with the reward of its last row (the one that comes
    last in `rewards`), and all its rows carry its advantage. Columns are combined by `combine_rewards`; a rollout whose
    last row has no applicable column is unscorable: advantage 0, and no vote. A group needs two voting rollouts for a
    signal, and equal rewards give exactly 0. Truncated samples are not special here: masking them
    (`mask_truncated_completions`) takes them out of the loss, not out of their group's mean and standard deviation.

    Args:
        rewards: (B,) or (B, C), numpy array or tensor of any real dtype, NaN = not applicable.
        group_ids: (B,) integers; rows of one group need not be adjacent.
        rollout_ids: (B,) integers, unique within a group; by default every row is a rollout of its own.
        weights: C finite weights of the columns, all 1 by default.
        estimator: "grpo": r - mean; "rloo": r - mean of the other rollouts.
        scale: divide by the population standard deviation + 1e-8 of the "group", of all rollouts of the "batch", or
            by nothing ("none").

    Returns:
        (B,) float64 (computed in float64 whatever comes in), of the kind and on the device of `rewards`.

    Raises:
        ValueError: a shape, an option or an infinite reward.
    """
    if isinstance(rewards, torch.Tensor):
        out = group_advantages(
            rewards.detach().to("cpu", torch.float64).numpy(),
            _int64("group_ids", group_ids),
            None if rollout_ids is None else _int64("rollout_ids", rollout_ids),
            weights=weights,
            estimator=estimator,
            scale=scale,
        )
        return torch.from_numpy(out).to(rewards.device)
    if estimator not in get_args(Estimator):
        raise ValueError(f"estimator must be one of {get_args(Estimator)}, got {estimator!r}")
    if scale not in get_args(Scale):
        raise ValueError(f"scale must be one of {get_args(Scale)}, got {scale!r}")
    columns: Float64 = np.asarray(rewards, dtype=np.float64)
    if columns.ndim not in (1, 2):
        raise ValueError(f"rewards must be of shape (B,) or (B, C), got {columns.shape}")
    if np.isinf(columns).any():
        raise ValueError(
            f"rewards must be finite or NaN, got an infinite one in row {int(np.isinf(columns).nonzero()[0][0])}"
        )
    count = columns.shape[0]
    groups = _int64("group_ids", group_ids, count)
    rollouts = np.arange(count) if rollout_ids is None else _int64("rollout_ids", rollout_ids, count)

    per_row = combine_rewards(columns[:, None] if columns.ndim == 1 else columns, weights)
    of_row, last_row = last_rows(groups, rollouts)
    advantage = _rollout_advantages(per_row[last_row], groups[last_row], estimator, scale)
    return advantage[of_row]


def _int64(name: str, values: Any, count: int | None = None) -> Int64:
    array = values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu") or (count is not None and len(array) != count):
        wanted = "one integer a reward" if count is None else f"{count} integers, one a reward"
        raise ValueError(f"{name} must be {wanted}, got {array.dtype} of shape {array.shape}")
    return array.astype(np.int64)


def last_rows(groups: Int64, rollouts: Int64) -> tuple[Int64, Int64]:
    """Index of each row's rollout, and the last row of each rollout."""
    pairs = np.stack([groups, rollouts], axis=1)
    order = np.lexsort((rollouts, groups))  # stable: rows of a rollout stay in the order they came
    changes = (pairs[order[1:]] != pairs[order[:-1]]).any(axis=1)
    rank = np.concatenate([[0], np.cumsum(changes)]) if len(order) else np.empty(0, np.int64)
    of_row = np.empty(len(order), np.int64)
    of_row[order] = rank
    ends = np.flatnonzero(np.concatenate([changes, [True]])) if len(order) else np.empty(0, np.int64)
    return of_row, order[ends]


def _rollout_advantages(rewards: Float64, groups: Int64, estimator: Estimator, scale: Scale) -> Float64:
    """Advantages of rollouts that each vote once; 0 where NaN, alone or without spread."""
    advantages = np.zeros(len(rewards))
    votes = ~np.isnan(rewards)
    if not votes.any():
        return advantages
    r = rewards[votes]
    _, g = np.unique(groups[votes], return_inverse=True)
    n = np.bincount(g)
    centred = r - (np.bincount(g, r) / n)[g]
    std = np.sqrt(np.bincount(g, centred**2) / n)[g]
    if estimator == "rloo":
        centred = centred * (n / np.maximum(n - 1, 1))[g]
    if scale == "group":
        centred = centred / (std + STD_EPS)
    elif scale == "batch":
        centred = centred / (r.std() + STD_EPS)
    advantages[votes] = np.where(_has_spread(r, g, len(n)), centred, 0.0)
    return advantages


def _has_spread(rewards: Float64, groups: Int64, num_groups: int) -> npt.NDArray[np.bool_]:
    """Whether each reward's group holds different rewards: a mean of equal numbers is off by rounding, this is not."""
    low, high = np.full(num_groups, np.inf), np.full(num_groups, -np.inf)
    np.minimum.at(low, groups, rewards)
    np.maximum.at(high, groups, rewards)
    spread: npt.NDArray[np.bool_] = high - low > _ROUNDING * np.maximum(np.abs(low), np.abs(high))
    return spread[groups]
