"""Rows in lexicographic order of their tokens: neighbours there share the longest prefixes, so all sharing shows."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.rollouts import Rollouts

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class Fork:
    """A place where neighbours part: two branches of the prefix tree.

    Attributes:
        depth: tokens that both branches share; the first one that differs is at this index of the row.
        left, right: places in the sorted order of the rows of each branch, which all hold that token.
    """

    depth: int
    left: range
    right: range


class SortedRows:
    """The rows of a rollout file, sorted.

    Args:
        rollouts: the file.
        order: (R,) the rows to take, as indices, in lexicographic order of their tokens.

    Attributes:
        order: these.
        lengths: (R,) tokens of the row at each place.
        agreed: (R - 1,) tokens that each row and the next agree on.
    """

    def __init__(self, rollouts: Rollouts, order: Ints) -> None:
        self.rollouts = rollouts
        self.order = order
        self.lengths: Ints = np.diff(rollouts.offsets)[order]
        self.agreed: Ints = np.array(
            [common_prefix(self.ids(at), self.ids(at + 1)) for at in range(len(order) - 1)], np.int64
        )

    @classmethod
    def sort(cls, rollouts: Rollouts, rows: Ints) -> Self:
        """Sort the rows of these indices."""
        width = 4 if rollouts.input_ids.max() < 2**32 else 8
        stream = rollouts.input_ids.astype(f">u{width}").tobytes()  # big-endian bytes sort as their numbers do
        offsets = (width * rollouts.offsets).tolist()
        keys = {row: stream[offsets[row] : offsets[row + 1]] for row in rows.tolist()}
        return cls(rollouts, np.array(sorted(keys, key=keys.__getitem__), np.int64))

    def by_group(self) -> dict[int, Self]:
        """The rows of each group, sorted, by group_id, in order of first appearance in the file."""
        by_group = np.argsort(self.groups, kind="stable")
        starts = np.flatnonzero(np.diff(self.groups[by_group])) + 1
        groups = []
        for places in np.split(by_group, starts):
            group = type(self)(self.rollouts, self.order[places])
            group.trajectories, group.begun = self.trajectories[places], self.begun[places]
            groups.append(group)
        return {int(group.groups[0]): group for group in sorted(groups, key=lambda group: int(group.order.min()))}

    def __len__(self) -> int:
        return len(self.order)

    def ids(self, at: int) -> NDArray[np.integer[Any]]:
        """(n,) the tokens of the row at a place."""
        return self.rollouts.input_ids[self._tokens(at)]

    def mask(self, at: int) -> NDArray[np.uint8]:
        """(n,) 1 where the row at a place was sampled."""
        return self.rollouts.completion_mask[self._tokens(at)]

    def _tokens(self, at: int) -> slice:
        row = self.order[at]
        return slice(self.rollouts.offsets[row], self.rollouts.offsets[row + 1])

    @cached_property
    def groups(self) -> Ints:
        """(R,) the group at each place."""
        return self.rollouts.group_id[self.order]

    @cached_property
    def trajectories(self) -> Ints:
        """(R,) a number for each rollout of each group: the rows of one carry its history along."""
        _, rollout = np.unique(self.rollouts.rollout_id[self.order], return_inverse=True)
        _, number = np.unique(np.stack([self.groups, rollout]), axis=1, return_inverse=True)
        return np.asarray(number, np.int64).reshape(-1)

    @cached_property
    def begun(self) -> Ints:
        """(R,) where the first sampled token of any row of the same rollout stands; the row's length without one."""
        rollouts = self.rollouts
        sampled = np.flatnonzero(rollouts.completion_mask)
        following = np.append(sampled, rollouts.offsets[-1])[np.searchsorted(sampled, rollouts.offsets[:-1])]
        first = np.minimum(following, rollouts.offsets[1:]) - rollouts.offsets[:-1]
        begun = np.full(int(self.trajectories.max(initial=-1)) + 1, np.iinfo(np.int64).max)
        np.minimum.at(begun, self.trajectories, first[self.order])
        return np.asarray(begun[self.trajectories], np.int64)

    def shared_nodes(self) -> Ints:
        """(R,) nodes of the packed forest that each row shares with the one before it.

        As in `treepack.scoring.forest`: all where they are identical, else one less than they agree on.
        """
        identical = (self.agreed == self.lengths[1:]) & (self.agreed == self.lengths[:-1])
        shared = np.where(identical, self.agreed, np.maximum(self.agreed - 1, 0))
        return np.concatenate([[0], shared]) if len(self) else shared

    def forks(self) -> list[Fork]:
        """Every fork: neighbours that differ before either ends, each with the branches it parts."""
        agreed, count = self.agreed.tolist(), len(self)
        first = _nearest_smaller(agreed)  # of the places before, the last that agrees on no more
        last = [count - 2 - at for at in reversed(_nearest_smaller(agreed[::-1]))]
        differs = (self.agreed < self.lengths[:-1]) & (self.agreed < self.lengths[1:])
        return [
            Fork(agreed[at], range(first[at] + 1, at + 1), range(at + 1, last[at] + 1))
            for at in np.flatnonzero(differs).tolist()
        ]

    def sampled(self, branch: range, depth: int) -> bool:
        """Whether any row of a branch had its token at `depth` sampled: in the other rows it is history."""
        tokens = self.rollouts.offsets[self.order[branch.start : branch.stop]] + depth
        return bool(self.rollouts.completion_mask[tokens].any())

    def longest(self, branch: range) -> int:
        """The place of the longest row of a branch."""
        return branch.start + int(self.lengths[branch.start : branch.stop].argmax())


def common_prefix(a: NDArray[np.integer[Any]], b: NDArray[np.integer[Any]]) -> int:
    """Tokens that two rows agree on, from their first ones."""
    end = min(len(a), len(b))
    differs = a[:end] != b[:end]
    first = int(differs.argmax()) if end else 0
    return first if end and differs[first] else end


def _nearest_smaller(values: list[int]) -> list[int]:
    """For each value the index of the last one before it that is no larger, -1 where there is none."""
    nearest: list[int] = []
    stack: list[int] = []
    for index, value in enumerate(values):
        while stack and values[stack[-1]] > value:
            stack.pop()
        nearest.append(stack[-1] if stack else -1)
        stack.append(index)
    return nearest
