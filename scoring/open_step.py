"""The rows of one optimizer step while it is being planned, and how a placement fills them."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any

from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FIRST_EXTRA_UID, Sample, filler_of
from treepack.scoring.scorer import TrainerScorer

MicroBatch = list[ScoredRow]


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What every step of a planner must stay within; `StepPlanner` documents the fields."""

    num_processes: int
    steps: int
    token_budget: int
    samples_per_row: int
    share_prefixes: bool
    token_cost: float

    @property
    def num_rows(self) -> int:
        """Rows of a step."""
        return self.steps * self.num_processes

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


class OpenStep(ABC):
    """One optimizer step that takes whole groups until it is emitted.

    Attributes:
        groups: the samples of each group placed so far, by group_id.
    """

    def __init__(
        self, limits: StepLimits, scorers: Sequence[TrainerScorer], metrics: MutableMapping[str, list[Any]]
    ) -> None:
        self.limits = limits
        self.groups: dict[int, list[Sample]] = {}
        self._scorers = scorers
        self._metrics = metrics

    @property
    def num_samples(self) -> int:
        """Samples of all groups."""
        return sum(map(len, self.groups.values()))

    def place(self, group: list[Sample]) -> bool:
        """Add the whole group, or nothing of it: False when it does not fit, or when its id is here already."""
        group_id = group[0]["group_id"]
        if group_id in self.groups or not self._place(group):
            return False
        self.groups[group_id] = group
        return True

    def emit(self) -> Iterator[MicroBatch]:
        """The step's micro-batches, no row empty, with extras and reward names attached."""
        rows = self._rows()
        self._fill(rows)
        self._attach_extras(rows)
        self._name_rewards(rows)
        width = self.limits.num_processes
        for start in range(0, len(rows), width):
            yield rows[start : start + width]

    @abstractmethod
    def _place(self, group: list[Sample]) -> bool:
        """Add the whole group, or nothing of it."""

    @abstractmethod
    def _rows(self) -> list[ScoredRow]:
        """The step's rows; one may be empty only where there are fewer samples than rows."""

    def _fill(self, rows: list[ScoredRow]) -> None:
        """Give each row that is still empty a copy of the shortest sample that trains nothing and is not scored."""
        empty = [row for row in rows if not row.samples]
        if not empty:
            return
        shortest = min(self._samples(), key=lambda sample: len(sample["input_ids"]))
        for row in empty:
            row.add(filler_of(shortest))
        self._metrics.setdefault("batch/filler_rows_total", []).append(float(len(empty)))

    def _attach_extras(self, rows: list[ScoredRow]) -> None:
        """Ask each scorer for each group's extras, and put a group's on the row that holds its lowest uid."""
        row_of = {sample["uid"]: row for row in rows for sample in row.samples}
        uids = count(FIRST_EXTRA_UID, -1)
        for group_id, group in self.groups.items():
            by_uid = sorted(group, key=lambda sample: sample["uid"])
            row = row_of[by_uid[0]["uid"]]
            for index, scorer in enumerate(self._scorers):
                row.extras += [(index, group_id, next(uids), extra) for extra in scorer.group_extras(by_uid)]

    def _name_rewards(self, rows: list[ScoredRow]) -> None:
        names = tuple(sorted({name for sample in self._samples() for name in sample["rewards"]}))
        taken = [scorer.name for scorer in self._scorers if scorer.name in names]
        if taken:
            raise ValueError(f"scorers must not have the name of a reward column of the samples, got {taken}")
        for row in rows:
            row.reward_names = names

    def _samples(self) -> Iterator[Sample]:
        return (sample for group in self.groups.values() for sample in group)


class LeastLoadedStep(OpenStep):
    """Every sample goes to a row that holds its group, else to any row, the least loaded that has room."""

    def __init__(
        self, limits: StepLimits, scorers: Sequence[TrainerScorer], metrics: MutableMapping[str, list[Any]]
    ) -> None:
        super().__init__(limits, scorers, metrics)
        self.rows = [limits.new_row() for _ in range(limits.num_rows)]

    def _place(self, group: list[Sample]) -> bool:
        before = [len(row.samples) for row in self.rows]
        for sample in group:
            row = self._row_for(sample)
            if row is None:
                for touched, num_samples in zip(self.rows, before, strict=True):
                    touched.truncate(num_samples)
                return False
            row.add(sample)
        return True

    def _rows(self) -> list[ScoredRow]:
        self._spread()
        return self.rows

    def _row_for(self, sample: Sample) -> ScoredRow | None:
        """The row `sample` belongs in: one that holds its group, else any, the least loaded that has room."""
        by_load = sorted(self.rows, key=lambda row: row.load)
        for home in (True, False):
            for row in by_load:
                if (sample["group_id"] in row.groups) is home and self.limits.has_room(row, sample):
                    return row
        return None

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
        donor = max(donors, key=self.limits.weight)
        sample = donor.samples[-1]
        if not self.limits.has_room(target, sample):
            return False
        donor.truncate(len(donor.samples) - 1)
        target.add(sample)
        if len(target.samples) > 1 and self.limits.weight(target) > self.limits.weight(donor):
            target.truncate(len(target.samples) - 1)
            donor.add(sample)
            return False
        return True


def longest_first(group: list[Sample]) -> list[Sample]:
    """The group's samples by falling length, which fits where the order of arrival may not."""
    return sorted(group, key=lambda sample: -len(sample["input_ids"]))
