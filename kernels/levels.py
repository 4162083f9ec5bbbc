"""Which dense attention calls cover a row, on the host: the levels of the cascade, and the paths of the gather.

Both are read off the plan's segments by array arithmetic. In pre-order a segment's descendants follow it contiguously,
and the segments with equally many ancestors have disjoint subtrees, so that one call of variable-length
attention serves a whole level of the forest.

Legend: S segments, B sequences of a call, L gathered rows.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.kernels.plan import SegmentTable

Ints = NDArray[Any]


@dataclass(frozen=True, eq=False)
class Spans:
    """The sequences of one call: consecutive queries, each of which sees the same consecutive keys.

    Attributes:
        q_start: (B,) first query of each, as a packed index; ascending and disjoint.
        q_stop: (B,) one past its last query.
        k_start: (B,) first key, likewise.
        k_stop: (B,) one past its last key.
    """

    q_start: Ints
    q_stop: Ints
    k_start: Ints
    k_stop: Ints

    @property
    def q_lengths(self) -> Ints:
        """(B,) queries of each sequence."""
        return self.q_stop - self.q_start

    @property
    def k_lengths(self) -> Ints:
        """(B,) keys of each sequence."""
        return self.k_stop - self.k_start


def triangles(segments: SegmentTable) -> Spans:
    """Each segment against itself, to be attended causally: the cascade's first call."""
    return Spans(segments.start, segments.stop, segments.start, segments.stop)


def rectangles(segments: SegmentTable) -> tuple[Spans, ...]:
    """All descendants of each segment against the whole of it: one call for each level, roots first."""
    inner = np.flatnonzero(segments.subtree_end > segments.stop)
    # Open segments at a start are the ancestors: those begun before, without those ended.
    level = inner - np.searchsorted(np.sort(segments.subtree_end), segments.start[inner], side="right")
    order = inner[np.argsort(level, kind="stable")]
    starts, stops, ends = segments.start[order], segments.stop[order], segments.subtree_end[order]
    cuts = np.cumsum(np.bincount(level))[:-1] if len(level) else np.arange(0)
    columns = (np.split(column, cuts) for column in (stops, ends, starts, stops))
    return tuple(Spans(*level_columns) for level_columns in zip(*columns)) if len(inner) else ()


def path_lengths(segments: SegmentTable, window: int | None) -> Ints:
    """(S,) keys that the gather copies for each segment: its ancestors that some query sees, then its own tokens."""
    ancestors = segments.depth if window is None else np.minimum(segments.depth, window - 1)
    lengths: Ints = ancestors + segments.stop - segments.start
    return lengths


def path_index(segments: SegmentTable, window: int | None) -> Ints:
    """(L,) int64, the packed indices of every segment's path one after the other, in lengths of `path_lengths`."""
    parents = segment_parents(segments.start, segments.stop, segments.depth)
    first_depth = segments.depth + segments.stop - segments.start - path_lengths(segments, window)
    owners, members = [], []
    owner = member = np.arange(len(segments))
    while len(owner):
        owners.append(owner)
        members.append(member)
        # A segment that starts at or above the first depth is the last of its path.
        rises = segments.depth[member] > first_depth[owner]
        owner, member = owner[rises], parents[member[rises]]
    owner, member = (np.concatenate(parts or [np.arange(0)]) for parts in (owners, members))
    order = np.lexsort((member, owner))
    owner, member = owner[order], member[order]
    skipped = np.maximum(first_depth[owner] - segments.depth[member], 0)
    return concatenated_ranges(segments.start[member] + skipped, segments.stop[member])


def concatenated_ranges(start: Ints, stop: Ints) -> Ints:
    """The integers of all ranges [start, stop), one range after the other."""
    lengths = stop - start
    ends = np.cumsum(lengths)
    shift = np.repeat(start - (ends - lengths), lengths)
    integers: Ints = np.arange(len(shift)) + shift
    return integers


def segment_parents(start: Ints, stop: Ints, depth: Ints) -> Ints:
    """(S,) int64, index of each segment's parent, -1 for roots; `start`, `stop` and `depth` as in `SegmentTable`."""
    index = np.arange(len(start))
    # The parent's last token is the latest one above, at the depth before.
    last_depth = depth + stop - start - 1
    keys = np.sort(last_depth * len(start) + index)
    rank = np.searchsorted(keys, (depth - 1) * len(start) + index) - 1
    parents: Ints = np.where(depth > 0, keys[np.maximum(rank, 0)] % len(start), -1)
    return parents
