"""The "balanced" placement: a step's samples in lexicographic order, cut into contiguous rows of even cost.

Neighbours in that order share the longest prefixes, so a contiguous range packs well, and its tokens and its cost
follow from prefix sums over neighbours' common prefixes alone. A greedy left-to-right fill is optimal among contiguous
cuts under a bound on a row's cost; the bound is bisected. Under the best bound, or one slightly above, rows are then
made to begin where little is repeated (between groups rather than within one), if the step as a whole gains by it.

A token costs `token_cost` + the keys it sees, in units of the attention FLOPs of one visible key.
"""

from bisect import bisect_left, bisect_right
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from treepack.scoring.forest import shared_nodes
from treepack.scoring.open_step import OpenStep, StepLimits
from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import Sample
from treepack.scoring.scorer import TrainerScorer

_PRECISION = 2000  # the bisected cost bound is within 1 / this of the best one
_SLACKS = (1.0, 1.01, 1.02)  # how much above it rows are let, where that saves repeated tokens

Range = tuple[int, int]


class _Ordered(NamedTuple):
    """A sample in its place, with what every look at it would compute again."""

    key: bytes
    sample: Sample
    length: int
    trained: int


class BalancedStep(OpenStep):
    """The samples of one step in lexicographic order of their tokens, with the prefix sums that a cut needs."""

    def __init__(
        self, limits: StepLimits, scorers: Sequence[TrainerScorer], metrics: MutableMapping[str, list[Any]]
    ) -> None:
        super().__init__(limits, scorers, metrics)
        self._ordered: list[_Ordered] = []
        self._shared: list[int] = []  # nodes each sample shares with the one before it
        self._length = self._trained = self._longest = 0  # tokens of all samples, trained ones, of the longest

    def _place(self, group: list[Sample]) -> bool:
        before = self._ordered.copy(), self._shared.copy(), self._length, self._trained, self._longest
        for sample in group:
            self._insert(sample)
        if self._surely_fits():
            return True
        self._sum_up()
        if self._fill_from_left(float("inf"), self._num_rows()) is not None:
            return True
        self._ordered, self._shared, self._length, self._trained, self._longest = before
        return False

    def _surely_fits(self) -> bool:
        """Whether totals alone tell that a fill from the left succeeds; most groups of a step need no other look.

        Each row but the last is closed by a sample that does not fit: more than budget - longest tokens, unique or
        trained, are on it, and at most `longest` of them repeat those of other rows.
        """
        rows, budget = self.limits.num_rows, self.limits.token_budget
        if len(self._ordered) <= rows:
            return True
        unique = self._length - sum(self._shared)
        return unique + self._trained + rows * self._longest <= (rows - 1) * (budget - self._longest)

    def _rows(self) -> list[ScoredRow]:
        """The costliest rows first, so that rows of similar cost share a micro-batch."""
        self._sum_up()
        rows = [self.limits.new_row() for _ in range(self.limits.num_rows)]
        for row, (start, stop) in zip(rows, self._cut()):
            for entry in self._ordered[start:stop]:
                row.add(entry.sample)
        return rows

    def _cut(self) -> list[Range]:
        """The rows by falling cost: of several cuts the one whose micro-batches take the shortest time."""
        num_rows = self._num_rows()
        tightest = self._tightest_cut(num_rows)
        bound = max(self._cost(row) for row in tightest) * (1 + 1e-9)
        cuts = [*(self._thriftiest_cut(bound * slack, num_rows) for slack in _SLACKS), tightest]
        return min((sorted(cut, key=self._cost, reverse=True) for cut in cuts), key=self._time)

    def _tightest_cut(self, num_rows: int) -> list[Range]:
        """The cut whose costliest row costs least."""
        best = self._fill_from_left(float("inf"), num_rows)
        assert best is not None
        low, high = self._cost_sums[-1] / num_rows, max(self._cost(row) for row in best)
        while high - low > low / _PRECISION:
            bound = (low + high) / 2
            rows = self._fill_from_left(bound, num_rows)
            if rows is None:
                low = bound
            else:
                best, high = rows, bound
        return best

    def _thriftiest_cut(self, bound: float, num_rows: int) -> list[Range]:
        """A cut under a bound that can be kept, with rows that begin where they repeat few tokens of the row before."""
        end = len(self._ordered)
        earliest = [end]  # where each row may stop, so that those after it still hold the rest
        for rows_before in range(num_rows - 1, 0, -1):
            stop = earliest[-1]
            start = bisect_left(range(stop), True, key=lambda at: self._furthest(at, bound) >= stop)
            earliest.append(max(start, rows_before))
        rows, start = [], 0
        for left, least in zip(range(num_rows - 1, -1, -1), reversed(earliest), strict=True):
            latest = min(end - left, self._furthest(start, bound))
            stop = end if not left else min(range(latest, max(least, start + 1) - 1, -1), key=self._shared.__getitem__)
            rows.append((start, stop))
            start = stop
        return rows

    def _time(self, rows: list[Range]) -> float:
        """What the micro-batches of rows in this order cost, each as much as its first row."""
        return sum(self._cost(row) for row in rows[:: self.limits.num_processes])

    def _num_rows(self) -> int:
        return min(self.limits.num_rows, len(self._ordered))

    def _insert(self, sample: Sample) -> None:
        ids = sample["input_ids"]
        key = ids.astype(">i8").tobytes()
        entry = _Ordered(key, sample, len(ids), int(np.count_nonzero(sample["completion_mask"])))
        index = bisect_right(self._ordered, entry.key, key=lambda other: other.key)
        self._ordered.insert(index, entry)
        self._length += entry.length
        self._trained += entry.trained
        self._longest = max(self._longest, entry.length)
        self._shared[index : index + 1] = [self._shared_with_previous(i) for i in (index, index + 1)][
            : len(self._ordered) - index
        ]

    def _shared_with_previous(self, index: int) -> int:
        if index == 0 or not self.limits.share_prefixes or index >= len(self._ordered):
            return 0
        return shared_nodes(self._ordered[index - 1].sample["input_ids"], self._ordered[index].sample["input_ids"])

    def _sum_up(self) -> None:
        length, trained, shared = np.array(
            [[0, 0, 0], *zip((e.length for e in self._ordered), (e.trained for e in self._ordered), self._shared)]
        ).T
        self._token_sums: list[int] = (length - shared).cumsum().tolist()
        self._trained_sums: list[int] = trained.cumsum().tolist()
        self._cost_sums: list[float] = (self._path_cost(length) - self._path_cost(shared)).cumsum().tolist()

    def _path_cost(self, depth: Any) -> Any:
        """The cost of a path of `depth` tokens, or of each of an array of depths."""
        return self.limits.token_cost * depth + depth * (depth + 1) / 2

    def _cost(self, row: Range) -> float:
        start, stop = row
        return self._cost_sums[stop] - self._cost_sums[start] + float(self._path_cost(self._shared[start]))

    def _fill_from_left(self, bound: float, num_rows: int) -> list[Range] | None:
        """`num_rows` non-empty rows that cost at most `bound` each, filled from the left, or None."""
        rows, start, end = [], 0, len(self._ordered)
        for left in range(num_rows - 1, -1, -1):
            stop = min(end - left, self._furthest(start, bound))
            if stop <= start:
                return None
            rows.append((start, stop))
            start = stop
        return rows if start == end else None

    def _furthest(self, start: int, bound: float) -> int:
        """Where a row that starts at `start` must stop at the latest."""
        shared = self._shared[start]
        by_cost = bisect_right(self._cost_sums, bound + self._cost_sums[start] - self._path_cost(shared)) - 1
        if self.limits.token_budget <= 0:
            return min(by_cost, start + self.limits.samples_per_row)
        by_tokens = bisect_right(self._token_sums, self.limits.token_budget + self._token_sums[start] - shared) - 1
        by_trained = bisect_right(self._trained_sums, self.limits.token_budget + self._trained_sums[start]) - 1
        return min(by_cost, by_tokens, by_trained)
