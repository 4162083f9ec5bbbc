"""What `score_step` and the scorers read of a trainer, and the smallest trainer that has it."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, get_args

import torch

from treepack.scoring.advantages import Estimator, Scale
from treepack.scoring.scorer import TrainerScorer

LossNormalization = Literal["microbatch", "step"]


class ScoringAccelerator(Protocol):
    """The part of `accelerate.Accelerator` that scoring uses."""

    @property
    def num_processes(self) -> int: ...
    @property
    def process_index(self) -> int: ...
    @property
    def is_main_process(self) -> bool: ...
    @property
    def device(self) -> torch.device: ...
    def autocast(self) -> AbstractContextManager[Any]: ...
    def gather(self, tensor: torch.Tensor, /) -> torch.Tensor: ...


class ScoringOptions(Protocol):
    """The training arguments that scoring reads; `ScoringArgs` documents them."""

    @property
    def advantage_estimator(self) -> Estimator: ...
    @property
    def scale_rewards(self) -> Scale: ...
    @property
    def reward_weights(self) -> Sequence[float] | Mapping[str, float] | None: ...
    @property
    def mask_truncated_completions(self) -> bool: ...
    @property
    def loss_normalization(self) -> LossNormalization: ...


class ScoringTrainer(Protocol):
    """A trainer as `score_step` and the scorers see it."""

    @property
    def accelerator(self) -> ScoringAccelerator: ...
    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def scorers(self) -> Sequence[TrainerScorer]: ...
    @property
    def args(self) -> ScoringOptions: ...


@dataclass(frozen=True, kw_only=True)
class ScoringArgs:
    """How rewards become advantages and advantages a loss.

    Attributes:
        advantage_estimator: "grpo" or "rloo", see `group_advantages`.
        scale_rewards: "group", "batch" or "none", see `group_advantages`.
        reward_weights: weight of each reward column: a mapping by name (1 for a column it does not name), or a sequence
            in the order of the columns: the rollouts' own by sorted name, then the scorers'. All 1 by default.
        mask_truncated_completions: take truncated samples out of the loss. They stay in their group's mean and
            standard deviation (TRL's choice).
        loss_normalization: "microbatch" divides by the tokens left in each micro-batch, which equals dropping the
            removed samples before packing under TRL's loss; "step" makes the loss one token mean over the step.
    """

    advantage_estimator: Estimator = "grpo"
    scale_rewards: Scale = "group"
    reward_weights: Sequence[float] | Mapping[str, float] | None = None
    mask_truncated_completions: bool = False
    loss_normalization: LossNormalization = "microbatch"

    def __post_init__(self) -> None:
        for name, allowed in (
            ("advantage_estimator", get_args(Estimator)),
            ("scale_rewards", get_args(Scale)),
            ("loss_normalization", get_args(LossNormalization)),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, got {getattr(self, name)!r}")


@dataclass(frozen=True)
class LocalAccelerator:
    """One process and one device, for scoring without accelerate."""

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    num_processes: int = 1
    process_index: int = 0
    is_main_process: bool = True

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor


@dataclass(frozen=True)
class LocalTrainer:
    """The smallest trainer `score_step` runs on: one process, which holds all rows of a micro-batch."""

    model: torch.nn.Module
    scorers: Sequence[TrainerScorer]
    args: ScoringOptions = field(default_factory=ScoringArgs)
    accelerator: ScoringAccelerator = field(default_factory=LocalAccelerator)
