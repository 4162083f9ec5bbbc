"""A sample from the planner on: a plain dict, its reserved uids, and what is checked before it is planned.

Keys: uid int >= 0, rising in arrival order; group_id int; rollout_id; group_size, the rows of its group;
input_ids, completion_mask (1 = trained), old_log_probs, numpy arrays of one length; advantage (NaN while pending);
rewards {column: float, NaN = not applicable}; metrics {name: float}; optionally finished.
"""

import math
from numbers import Real
from typing import Any

import numpy as np

Sample = dict[str, Any]

FILLER_UID = -1
"""uid of what only keeps ranks in line: it trains nothing, and its features are discarded."""

FIRST_EXTRA_UID = -2
"""Group extras count down from here, anew each step."""

_SAMPLE_KEYS = (
    "uid",
    "group_id",
    "rollout_id",
    "group_size",
    "input_ids",
    "completion_mask",
    "old_log_probs",
    "advantage",
    "rewards",
    "metrics",
)


def filler_of(sample: Sample) -> Sample:
    """An independent copy of `sample` that trains no token and is not scored."""
    return {
        "uid": FILLER_UID,
        "group_id": sample["group_id"],
        "rollout_id": FILLER_UID,
        "group_size": sample["group_size"],
        "input_ids": sample["input_ids"].copy(),
        "completion_mask": np.zeros_like(sample["completion_mask"]),
        "old_log_probs": sample["old_log_probs"].copy(),
        "advantage": 0.0,
        "rewards": {},
        "metrics": {},
        "truncated": False,
    }


def check_sample(sample: Sample) -> None:
    """Refuse a sample the planner, the rows or the loss could not use.

    Raises:
        ValueError: what is missing or wrong, by key and uid.
    """
    missing = [key for key in _SAMPLE_KEYS if key not in sample]
    if missing:
        raise ValueError(
            f"a sample must have {', '.join(_SAMPLE_KEYS)}; sample uid {sample.get('uid')} lacks {missing}"
        )
    uid = sample["uid"]
    if uid < 0:
        raise ValueError(f"uid must be at least 0, got {uid} in group {sample['group_id']}")
    shape = sample["input_ids"].shape
    if len(shape) != 1 or shape[0] == 0:
        raise ValueError(f"input_ids must be a non-empty 1-D array, got shape {shape} in sample uid {uid}")
    for key in ("completion_mask", "old_log_probs"):
        if sample[key].shape != shape:
            raise ValueError(
                f"{key} must have the shape {shape} of input_ids, got {sample[key].shape} in sample uid {uid}"
            )
    log_probs = sample["old_log_probs"]
    with np.errstate(invalid="ignore", over="ignore"):
        all_finite = np.isfinite(log_probs.sum())  # many times as fast as a gather of the trained ones
    if not all_finite and not np.isfinite(log_probs[sample["completion_mask"] != 0]).all():
        raise ValueError(f"old_log_probs must be finite on trained tokens, got NaN or infinity in sample uid {uid}")
    for name, reward in sample["rewards"].items():
        if not isinstance(reward, Real) or math.isinf(reward):
            raise ValueError(f"rewards must be finite floats or NaN, got {name} {reward!r} in sample uid {uid}")
