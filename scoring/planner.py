"""StepPlanner: one optimizer step at a time, whole groups only, no empty row.

A step is `steps` micro-batches of `num_processes` rows, one row a rank. All its rows are open at once, so that a group
is placed as a whole; micro-batch m holds rows [m * num_processes, (m + 1) * num_processes).
"""

import logging
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from itertools import count
from typing import Any, Literal

from torch.utils.data import IterableDataset

from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FIRST_EXTRA_UID, Sample, check_sample, filler_of
from treepack.scoring.scorer import TrainerScorer

logger = logging.getLogger(__name__)

MicroBatch = list[ScoredRow]


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

    Samples go to a row that holds their group, else to any row, the least loaded first (`TreeRow.load`, ties to the
    lowest index), within `token_budget` unique and `token_budget` trained tokens a row, or `samples_per_row` samples.
    A group with a sample longer than the budget is dropped whole (or refused, `oversize="raise"`), and so is one that
    does not fit an empty step, not even with its longest samples placed first; both are logged and counted in `metrics`
    (`batch/dropped_oversize_total`, `batch/dropped_group_too_large_total`, in samples).

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
        placement: "least_loaded".
        groups_per_step: emit a step as soon as it holds this many groups.
        oversize: "drop" or "raise", see above.
        on_dropped: called with a dropped group's samples and the reason, "oversize" or "group_too_large".

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
        placement: Literal["least_loaded"] = "least_loaded",
        groups_per_step: int | None = None,
        oversize: Literal["drop", "raise"] = "drop",
        on_dropped: Callable[[list[Sample], str], None] | None = None,
    ) -> None:
        for name, value in (("num_processes", num_processes), ("steps", steps), ("groups_per_step", groups_per_step)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if token_budget <= 0 and samples_per_row < 1:
            raise ValueError(
                f"samples_per_row must be at least 1 where token_budget is <= 0, got {samples_per_row} "
                f"(token_budget {token_budget})"
            )
        if placement != "least_loaded":
            raise ValueError(f"placement must be 'least_loaded', got {placement!r}")
        if oversize not in ("drop", "raise"):
            raise ValueError(f"oversize must be 'drop' or 'raise', got {oversize!r}")
        names = [scorer.name for scorer in scorers]
        if len(set(names)) != len(names):
            raise ValueError(f"scorers must have distinct names, got {names}")
        self.dataset = dataset
        self.num_processes = num_processes
        self.steps = steps
        self.token_budget = token_budget
        self.samples_per_row = samples_per_row
        self.scorers = tuple(scorers)
        self.metrics = metrics
        self.share_prefixes = share_prefixes
        self.stop_token_ids = None if stop_token_ids is None else frozenset(stop_token_ids)
        self.groups_per_step = groups_per_step
        self.oversize = oversize
        self.on_dropped = on_dropped

    def __iter__(self) -> Iterator[MicroBatch]:
        rollout_numbers = count()
        step = _Step(self)
        for group in _whole_groups(self.dataset):
            if group is None:
                if step.num_samples >= len(step.rows):
                    yield from step.emit()
                    step = _Step(self)
                continue
            group = self._admit(group, rollout_numbers)
            if self._has_oversize(group):
                self._drop(group, "oversize")
                continue
            if not step.place(group):
                following = _Step(self)
                if not (following.place(group) or following.place(_longest_first(group))):
                    self._drop(group, "group_too_large")
                    continue
                if step.groups:
                    yield from step.emit()
                step = following
            if len(step.groups) == self.groups_per_step:
                yield from step.emit()
                step = _Step(self)
        if step.groups:
            yield from step.emit()

    def new_row(self) -> ScoredRow:
        """An empty row."""
        return ScoredRow(share_prefixes=self.share_prefixes)

    def has_room(self, row: ScoredRow, sample: Sample) -> bool:
        """Whether `row` stays within its bound with `sample` added."""
        if self.token_budget > 0:
            return row.fits(sample, self.token_budget)
        return len(row.samples) < self.samples_per_row

    def weight(self, row: ScoredRow) -> int:
        """What spreading evens out: attention load under a token budget, samples otherwise."""
        return row.load if self.token_budget > 0 else len(row.samples)

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
        if self.on_dropped is not None:
            self.on_dropped(group, reason)


class _Step:
    """The open rows of one optimizer step."""

    def __init__(self, planner: StepPlanner) -> None:
        self.planner = planner
        self.rows = [planner.new_row() for _ in range(planner.steps * planner.num_processes)]
        self.groups: dict[int, list[Sample]] = {}

    @property
    def num_samples(self) -> int:
        return sum(len(row.samples) for row in self.rows)

    def place(self, group: list[Sample]) -> bool:
        """Add the whole group, or nothing of it: False when it does not fit, or when its id is here already."""
        if group[0]["group_id"] in self.groups:
            return False
        before = [len(row.samples) for row in self.rows]
        for sample in group:
            row = self._row_for(sample)
            if row is None:
                for touched, num_samples in zip(self.rows, before, strict=True):
                    touched.truncate(num_samples)
                return False
            row.add(sample)
        self.groups[group[0]["group_id"]] = group
        return True

    def _row_for(self, sample: Sample) -> ScoredRow | None:
        """The row `sample` belongs in: one that holds its group, else any, the least loaded that has room."""
        by_load = sorted(self.rows, key=lambda row: row.load)
        for home in (True, False):
            for row in by_load:
                if (sample["group_id"] in row.groups) is home and self.planner.has_room(row, sample):
                    return row
        return None

    def emit(self) -> Iterator[MicroBatch]:
        self._spread()
        self._fill()
        self._attach_extras()
        self._name_rewards()
        width = self.planner.num_processes
        for start in range(0, len(self.rows), width):
            yield self.rows[start : start + width]

    def _spread(self) -> None:
        """Give each empty row the last samples of the heaviest rows, while that leaves it no heavier than they are."""
        for target in self.rows:
            if not target.samples:
                while self._move_to(target):
                    pass

    def _move_to(self, target: ScoredRow) -> bool:
        donors = [row for row in self.rows if len(row.samples) > 1 and row is not target]
        if not donors:
            return False
        donor = max(donors, key=self.planner.weight)
        sample = donor.samples[-1]
        if not self.planner.has_room(target, sample):
            return False
        donor.truncate(len(donor.samples) - 1)
        target.add(sample)
        if len(target.samples) > 1 and self.planner.weight(target) > self.planner.weight(donor):
            target.truncate(len(target.samples) - 1)
            donor.add(sample)
            return False
        return True

    def _fill(self) -> None:
        """Give each row that is still empty a copy of the shortest sample that trains nothing and is not scored."""
        empty = [row for row in self.rows if not row.samples]
        if not empty:
            return
        shortest = min(self._samples(), key=lambda sample: len(sample["input_ids"]))
        for row in empty:
            row.add(filler_of(shortest))
        self.planner.metrics.setdefault("batch/filler_rows_total", []).append(float(len(empty)))

    def _attach_extras(self) -> None:
        """Ask each scorer for each group's extras, and put a group's on the row that holds its lowest uid."""
        row_of = {sample["uid"]: row for row in self.rows for sample in row.samples}
        uids = count(FIRST_EXTRA_UID, -1)
        for group_id, group in self.groups.items():
            by_uid = sorted(group, key=lambda sample: sample["uid"])
            row = row_of[by_uid[0]["uid"]]
            for index, scorer in enumerate(self.planner.scorers):
                row.extras += [(index, group_id, next(uids), extra) for extra in scorer.group_extras(by_uid)]

    def _name_rewards(self) -> None:
        names = tuple(sorted({name for sample in self._samples() for name in sample["rewards"]}))
        taken = [scorer.name for scorer in self.planner.scorers if scorer.name in names]
        if taken:
            raise ValueError(f"scorers must not have the name of a reward column of the samples, got {taken}")
        for row in self.rows:
            row.reward_names = names

    def _samples(self) -> Iterator[Sample]:
        return (sample for group in self.groups.values() for sample in group)


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


def _longest_first(group: list[Sample]) -> list[Sample]:
    return sorted(group, key=lambda sample: -len(sample["input_ids"]))
