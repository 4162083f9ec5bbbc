"""ScoringGRPOConfig: TRL's AsyncGRPOConfig and what planning, scoring and attention add to it."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from treepack.kernels.checks import Backend
from treepack.scoring.advantages import Estimator, Scale
from treepack.scoring.planner import Placement
from treepack.scoring.trainer import LossNormalization, ScoringArgs
from treepack.scoring.trl_layout import AsyncGRPOConfig

Oversize = Literal["drop", "raise"]

_NOT_CARRIED = ("prompt", "completion", "completion_ids")
"""Dataset columns that TRL's rollout loop does not keep beside a group."""


@dataclass
class ScoringGRPOConfig(AsyncGRPOConfig):  # type: ignore[misc]
    """Arguments of `ScoringGRPOTrainer`; fields may be given on a command line or in YAML (`TrlParser`), as TRL's.

    An optimizer step is `gradient_accumulation_steps` micro-batches of one row a rank; a row holds `token_budget`
    tokens or, where that is <= 0, `per_device_train_batch_size` samples.

    Attributes:
        advantage_estimator, scale_rewards, mask_truncated_completions, loss_normalization: as in `ScoringArgs`.
        reward_weights: as in `ScoringArgs`: a mapping by column name, or a sequence; on a command line as JSON.
        placement, share_prefixes, groups_per_step, oversize: as in `StepPlanner`.
        flush_after_s: seconds without a new whole group after which a step is made of what is at hand, as soon as that
            gives every row a sample.
        attention_backend: `tree_attention`'s `backend`, for the policy and all scorers; None picks by device.
        deterministic: `tree_attention`'s `deterministic`.
        record_dir: folder to which every step is written (see `StepRecorder`); None records nothing.
        sample_columns: dataset columns that samples carry for scorers to read, such as EBFT's "reference_ids".
        max_request_attempts, max_failed_generations: `ScoringRolloutWorker`'s `max_attempts` and `max_failures`.

    Raises:
        ValueError: a value that none of these takes.
        TypeError: `reward_weights` is neither a mapping nor a sequence of numbers, or `sample_columns` no list.
    """

    advantage_estimator: Estimator = field(
        default="grpo", metadata={"help": "How a group's rewards become advantages: 'grpo' or 'rloo' (leave-one-out)."}
    )
    scale_rewards: Scale = field(
        default="group",
        metadata={"help": "By which standard deviation advantages are divided: the group's, the batch's, or none."},
    )
    reward_weights: dict[str, float] | str | list[float] | None = field(
        default=None,
        metadata={
            "help": "Weight of each reward column: JSON, an object by name (1 for columns it does not name) or a list "
            "in the order of the columns (the rollouts' by sorted name, then the scorers'). All 1 by default."
        },
    )
    mask_truncated_completions: bool = field(
        default=False, metadata={"help": "Whether truncated samples are taken out of the loss."}
    )
    loss_normalization: LossNormalization = field(
        default="microbatch",
        metadata={"help": "Token mean over each micro-batch (as TRL), or over the whole optimizer step."},
    )
    placement: Placement = field(
        default="least_loaded",
        metadata={"help": "How samples are placed on rows: 'least_loaded', or 'balanced' (even cost, more sharing)."},
    )
    share_prefixes: bool = field(default=True, metadata={"help": "Whether samples of a row share their prefixes."})
    groups_per_step: int | None = field(
        default=None, metadata={"help": "Close an optimizer step at this many groups. By default when it is full."}
    )
    oversize: Oversize = field(
        default="drop",
        metadata={"help": "What becomes of a group with a sample longer than token_budget: 'drop' or 'raise'."},
    )
    flush_after_s: float = field(
        default=30.0,
        metadata={"help": "Seconds without a new whole group after which a step is made of what is at hand."},
    )
    attention_backend: Backend | None = field(
        default=None,
        metadata={"help": f"Attention backend: {', '.join(get_args(Backend))}. By device if unset."},
    )
    deterministic: bool = field(default=False, metadata={"help": "Whether attention must repeat bit for bit."})
    record_dir: str | None = field(default=None, metadata={"help": "Folder in which every step is recorded."})
    sample_columns: list[str] | None = field(
        default=None, metadata={"help": "Dataset columns that samples carry for scorers to read."}
    )
    max_request_attempts: int = field(
        default=30,
        metadata={"help": "Rounds, of up to three tries each, after which a request to the server has failed."},
    )
    max_failed_generations: int = field(
        default=64, metadata={"help": "Generations that may fail in a row before the run ends."}
    )

    def __post_init__(self) -> None:
        self.reward_weights = _reward_weights(self.reward_weights)
        ScoringArgs(
            advantage_estimator=self.advantage_estimator,
            scale_rewards=self.scale_rewards,
            loss_normalization=self.loss_normalization,
        )
        for name, allowed in (
            ("placement", get_args(Placement)),
            ("oversize", get_args(Oversize)),
            ("attention_backend", (None, *get_args(Backend))),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")
        for name in ("groups_per_step", "max_request_attempts", "max_failed_generations"):
            count = getattr(self, name)
            if count is not None and count < 1:
                raise ValueError(f"{name} must be at least 1, got {count}")
        if self.num_generations < 2:
            raise ValueError(
                f"num_generations must be at least 2, got {self.num_generations}: advantages compare a group's rollouts"
            )
        if not self.flush_after_s > 0:
            raise ValueError(f"flush_after_s must be above 0, got {self.flush_after_s}")
        _check_sample_columns(self.sample_columns)
        super().__post_init__()


def _reward_weights(given: Any) -> dict[str, float] | list[float] | None:
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except json.JSONDecodeError:
            raise ValueError(f"reward_weights must be JSON where it is a string, got {given!r}") from None
    if given is None:
        return None
    if not isinstance(given, Mapping | Sequence):
        raise TypeError(f"reward_weights must be a mapping by name or a sequence, got {type(given).__name__}")
    try:
        weights = [float(weight) for weight in (given.values() if isinstance(given, Mapping) else given)]
    except (TypeError, ValueError):
        raise TypeError(f"reward_weights must be numbers, got {given!r}") from None
    if not all(map(math.isfinite, weights)):
        raise ValueError(f"reward_weights must be finite, got {given!r}")
    return dict(zip(map(str, given), weights, strict=True)) if isinstance(given, Mapping) else weights


def _check_sample_columns(names: Any) -> None:
    if names is None:
        return
    if not isinstance(names, list | tuple):
        raise TypeError(f"sample_columns must be a list of column names, got {names!r}")
    if refused := [name for name in names if name in _NOT_CARRIED]:
        raise ValueError(f"sample_columns must be other columns than {_NOT_CARRIED}, got {refused}")
