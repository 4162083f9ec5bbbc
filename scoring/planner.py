"""StepPlanner: one optimizer step at a time, whole groups only, no empty row.

A step is `steps` micro-batches of `num_processes` rows, one row a rank. All its rows are open at once, so that a group
is placed as a whole; micro-batch m holds rows [m * num_processes, (m + 1) * num_processes).
"""

import logging
import math
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from itertools import count
from typing import Any, Literal

from torch.utils.data import IterableDataset

from treepack.scoring.balanced import BalancedStep
from treepack.scoring.open_step import LeastLoadedStep, MicroBatch, OpenStep, StepLimits, longest_first
from treepack.scoring.progress import GroupProgress
from treepack.scoring.samples import Sample, check_sample
from treepack.scoring.scorer import TrainerScorer
from treepack.scoring.token_cost import DENSE_8B_TOKEN_COST

logger = logging.getLogger(__name__)

Placement = Literal["least_loaded", "balanced"]

_PLACEMENTS: dict[str, type[OpenStep]] = {"least_loaded": LeastLoadedStep, "balanced": BalancedStep}


class StepCapacityError(ValueError):
    """A group that no optimizer step can hold."""


def check_step_capacity(
    group_rows: int, steps: int, num_processes: int, token_budget: int, samples_per_row: int
) -> None:
    """Fail early when a group can never fit in one optimizer step.

    Args:
        group_rows: samples (rows of the rollout queue) of the largest group.
        steps: micro-batches of a step.
        num_processes: rows of a micro-batch.
        token_budget: tokens of a row, or <= 0 when a row is bounded by `samples_per_row`.
        samples_per_row: samples of a row where `token_budget` <= 0.

    Raises:
        StepCapacityError: `group_rows` exceeds rows x `samples_per_row`; or, under a token budget, rows x
            `token_budget`, since a sample trains at least one token. Groups that do not fit for their lengths cannot
            be known here: the planner drops and counts them.
    """
    rows = steps * num_processes
    unit, capacity = ("token_budget", token_budget) if token_budget > 0 else ("samples_per_row", samples_per_row)
    if group_rows > rows * capacity:
        raise StepCapacityError(
            f"group_rows must be at most {rows * capacity} (steps {steps} x num_processes {num_processes} x {unit} "
            f"{capacity}), got {group_rows}: such a group never fits in one optimizer step"
        )


class StepPlanner(IterableDataset[MicroBatch]):
    """Plans one optimizer step at a time, keeping every group inside one step.

    Iterating yields micro-batches, each a list of `num_processes` non-empty `ScoredRow`s; `steps` of them in a row are
    an optimizer step. A step is emitted when the next group does not fit in it (that group opens the next step), when
    it holds `groups_per_step` groups, when the source stalls (yields None) and the samples at hand give every row one,
    and when the source ends. Rows left empty are filled by spreading samples; failing that, with an untrained, unscored
    copy of the step's shortest sample (uid -1).

    Under the placement "least_loaded" samples go to a row that holds their group, else to any row, the least loaded
    first (`TreeRow.load`, ties to the lowest index). Rows stay within `token_budget` unique and `token_budget` trained
    tokens, or `samples_per_row` samples. A group with a sample longer than the budget is dropped whole (or refused,
    `oversize="raise"`), and so is one that does not fit an empty step, not even with its longest samples placed first;
    both are logged and counted in `metrics` (`batch/dropped_oversize_total`, `batch/dropped_group_too_large_total`, in
    samples).

    Args:
        dataset: iterable of sample dicts, a group's samples in a run of `group_size` of them; None when it stalls.
            A sample has uid (int >= 0), group_id (int), rollout_id, group_size, input_ids (n,), completion_mask (n,),
            old_log_probs (n,), numpy arrays; advantage (NaN while pending); rewards {column: float, NaN = not
            applicable}; metrics {str: float}; optionally finished (bool).
        num_processes: rows of a micro-batch, one a rank.
        steps: micro-batches of an optimizer step (gradient_accumulation_steps).
        token_budget: tokens of a row, unique and trained each; <= 0 bounds rows by `samples_per_row` instead.
        samples_per_row: samples of a row, read only where `token_budget` <= 0.
        scorers: the trainer's scorers, in the order the trainer has them; their `group_extras` are called here.
        metrics: sink of counters, {name: list of floats}, as TRL's trainer has it.
        share_prefixes: whether a row shares prefixes (False: one chain a sample).
        stop_token_ids: a sample that does not end on one of these is truncated; by default one whose `finished` is
            False is.
        placement: "least_loaded", or "balanced": samples in lexicographic order of their tokens, cut into contiguous
            rows of even cost, the costliest rows together in a micro-batch.
        token_cost: what "balanced" prices a token at besides the keys it sees (see the function `token_cost`); by
            default that of a dense 8B model.
        groups_per_step: emit a step as soon as it holds this many groups.
        oversize: "drop" or "raise", see above.
        on_dropped: called with a dropped group's samples and the reason, "oversize" or "group_too_large".
        progress: told of the groups of each emitted step as planned, and of dropped ones. A planned group is not
            consumed: the trainer calls `progress.trained(scores.groups)` once the optimizer has stepped on it.

    Raises:
        ValueError: an argument out of range; while iterating: a malformed sample, or a group whose run is not
            `group_size` long.
    """

    def __init__(
        self,
        dataset: Iterable[Sample | None],
        *,
        num_processes: int,
        steps: int,
        token_budget: int,
        samples_per_row: int,
        scorers: Sequence[TrainerScorer],
        metrics: MutableMapping[str, list[Any]],
        share_prefixes: bool = True,
        stop_token_ids: Iterable[int] | None = None,
        placement: Placement = "least_loaded",
        token_cost: float = DENSE_8B_TOKEN_COST,
        groups_per_step: int | None = None,
        oversize: Literal["drop", "raise"] = "drop",
        on_dropped: Callable[[list[Sample], str], None] | None = None,
        progress: GroupProgress | None = None,
    ) -> None:
        for name, value in (("num_processes", num_processes), ("steps", steps), ("groups_per_step", groups_per_step)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if token_budget <= 0 and samples_per_row < 1:
            raise ValueError(
                f"samples_per_row must be at least 1 where token_budget is <= 0, got {samples_per_row} "
                f"(token_budget {token_budget})"
            )
        if placement not in _PLACEMENTS:
            raise ValueError(f"placement must be one of {tuple(_PLACEMENTS)}, got {placement!r}")
        if not (math.isfinite(token_cost) and token_cost >= 0):
            raise ValueError(f"token_cost must be finite and at least 0, got {token_cost}")
        if oversize not in ("drop", "raise"):
            raise ValueError(f"oversize must be 'drop' or 'raise', got {oversize!r}")
        names = [scorer.name for scorer in scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"scorers must have distinct names, got {names}")
        self.dataset = dataset
        self.num_processes = num_processes
        self.steps = steps
        self.token_budget = token_budget
        self._limits = StepLimits(
            num_processes=num_processes,
            steps=steps,
            token_budget=token_budget,
            samples_per_row=samples_per_row,
            share_prefixes=share_prefixes,
            token_cost=token_cost,
        )
        self._kind = _PLACEMENTS[placement]
        self.scorers = tuple(scorers)
        self.metrics = metrics
        self.stop_token_ids = None if stop_token_ids is None else frozenset(stop_token_ids)
        self.groups_per_step = groups_per_step
        self.oversize = oversize
        self.on_dropped = on_dropped
        self.progress = progress

    def __iter__(self) -> Iterator[MicroBatch]:
        rollout_numbers = count()
        step = self._open_step()
        for group in _whole_groups(self.dataset):
            if group is None:
                if step.num_samples >= self._limits.num_rows:
                    yield from self._emit(step)
                    step = self._open_step()
                continue
            group = self._admit(group, rollout_numbers)
            if self._has_oversize(group):
                self._drop(group, "oversize")
                continue
            if not step.place(group):
                following = self._open_step()
                if not (following.place(group) or following.place(longest_first(group))):
                    self._drop(group, "group_too_large")
                    continue
                if step.groups:
                    yield from self._emit(step)
                step = following
            if len(step.groups) == self.groups_per_step:
                yield from self._emit(step)
                step = self._open_step()
        if step.groups:
            yield from self._emit(step)

    def _open_step(self) -> OpenStep:
        return self._kind(self._limits, self.scorers, self.metrics)

    def _emit(self, step: OpenStep) -> Iterator[MicroBatch]:
        if self.progress is not None:
            self.progress.planned(step.groups)
        return step.emit()

    def _admit(self, group: list[Sample], rollout_numbers: Iterator[int]) -> list[Sample]:
        """Copies of the samples (the caller's dicts stay as they are) with an int rollout_id and truncated set."""
        numbers: dict[Any, int] = {}
        admitted = []
        for sample in group:
            check_sample(sample)
            if sample["rollout_id"] not in numbers:
                numbers[sample["rollout_id"]] = next(rollout_numbers)
            admitted.append(
                {**sample, "rollout_id": numbers[sample["rollout_id"]], "truncated": self._is_truncated(sample)}
            )
        return admitted

    def _is_truncated(self, sample: Sample) -> bool:
        if self.stop_token_ids is not None:
            return int(sample["input_ids"][-1]) not in self.stop_token_ids
        return not sample.get("finished", True)

    def _has_oversize(self, group: list[Sample]) -> bool:
        if self.token_budget <= 0:
            return False
        longest = max(group, key=lambda sample: len(sample["input_ids"]))
        length = len(longest["input_ids"])
        if length <= self.token_budget:
            return False
        if self.oversize == "raise":
            raise ValueError(
                f"input_ids must be at most token_budget ({self.token_budget}) tokens long, got {length} in sample uid "
                f"{longest['uid']} of group {longest['group_id']}"
            )
        return True

    def _drop(self, group: list[Sample], reason: str) -> None:
        logger.warning("dropping group %s of %d samples: %s", group[0]["group_id"], len(group), reason)
        self.metrics.setdefault(f"batch/dropped_{reason}_total", []).append(float(len(group)))
        if self.progress is not None:
            self.progress.dropped(group[0]["group_id"], reason)
        if self.on_dropped is not None:
            self.on_dropped(group, reason)


def _whole_groups(dataset: Iterable[Sample | None]) -> Iterator[list[Sample] | None]:
    """The runs of `group_size` samples of one group, and the stalls between them."""
    group: list[Sample] = []
    for sample in dataset:
        if group and (sample is None or sample["group_id"] != group[0]["group_id"]):
            break
        if sample is None:
            yield None
            continue
        group.append(sample)
        if len(group) == sample["group_size"]:
            yield group
            group = []
    if group:
        raise ValueError(
            f"dataset must yield a group's samples in a run of group_size, got {len(group)} of "
            f"{group[0]['group_size']} samples of group {group[0]['group_id']}"
        )
