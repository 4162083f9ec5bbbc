"""TreePlan: the whole mask of a packed row as two int32 numbers a token.

A row is a prefix forest in depth-first pre-order. Query i sees key j iff `j <= i < subtree_end[j]`, where
`subtree_end[j]` is the first i > j with `position_ids[i] <= position_ids[j]` (N if there is none), so
`position_ids` alone define the mask. A sliding window compares depths along the path:
`depth[i] - depth[j] < window`.

Legend: N tokens, S segments.
"""

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from treepack.kernels.schedule import TreeSchedule, build_schedule, query_stops

T = TypeVar("T")
IntArray = NDArray[np.int64]

_MAX_TOKENS = 2**31 - 1


@dataclass(frozen=True, eq=False)
class SegmentTable:
    """The maximal runs of tokens without a branch, in packed order, on the host.

    All tokens of a segment share one `subtree_end`, and each sees the whole segment up to itself.

    Attributes:
        start: (S,) int64, first token of each segment.
        stop: (S,) int64, one past its last token.
        subtree_end: (S,) int64, one past the last token of its last descendant.
        depth: (S,) int64, depth of its first token.
    """

    start: IntArray
    stop: IntArray
    subtree_end: IntArray
    depth: IntArray

    def __len__(self) -> int:
        return len(self.start)


@dataclass(frozen=True, eq=False)
class TreePlan:
    """The prefix forest of one packed row; build it once and share it between all layers.

    Attributes:
        subtree_end: (N,) int32, one past the last descendant of each token, as a packed index.
        depth: (N,) int32, number of ancestors of each token.
    """

    subtree_end: Tensor
    depth: Tensor

    @classmethod
    def from_position_ids(cls, position_ids: Tensor) -> "TreePlan":
        """Read the forest off the position ids of a packed row.

        Args:
            position_ids: (N,) or (1, N), any integer dtype, 0-based depth of each token. Rows without sharing
                (padding-free packing) are the special case in which every sample starts again at 0.

        Returns:
            The plan, on the device of `position_ids`.

        Raises:
            TypeError: `position_ids` is not an integer tensor.
            ValueError: it has another shape, or is no depth-first forest: it must start at 0, never be
                negative, and rise by at most 1 from one token to the next.
        """
        if not isinstance(position_ids, Tensor):
            raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
        _check_integer("position_ids", position_ids)
        if position_ids.dim() == 2 and position_ids.shape[0] == 1:
            position_ids = position_ids[0]
        if position_ids.dim() != 1:
            raise ValueError(f"position_ids must be (N,) or (1, N), got {tuple(position_ids.shape)}")
        if position_ids.shape[0] > _MAX_TOKENS:
            raise ValueError(f"position_ids must hold at most 2^31 - 1 tokens, got {position_ids.shape[0]}")
        positions = position_ids.detach().long()
        _check_depth_first("position_ids", positions)
        return _plan_of(positions)

    @classmethod
    def from_cu_seqlens(cls, tree_cu_seqlens_q: Tensor, tree_cu_seqlens_k: Tensor) -> "TreePlan":
        """Read the forest off TRL's segment boundaries.

        Args:
            tree_cu_seqlens_q: (S + 1,) integer, boundaries of the segments in the packed row; the last one is N.
            tree_cu_seqlens_k: (S + 1,) integer, running sum of the root-to-segment path lengths (the segment
                itself included), as in `trl.experimental.async_grpo`.

        Returns:
            The plan, on the device of `tree_cu_seqlens_q`.

        Raises:
            TypeError: an argument is not an integer tensor.
            ValueError: the boundaries do not start at 0, decrease, differ in number, or give a segment a path
                that its predecessor in the row cannot have opened.
        """
        for name, boundaries in (
            ("tree_cu_seqlens_q", tree_cu_seqlens_q),
            ("tree_cu_seqlens_k", tree_cu_seqlens_k),
        ):
            _check_boundaries(name, boundaries)
        if tree_cu_seqlens_q.shape != tree_cu_seqlens_k.shape:
            raise ValueError(
                f"tree_cu_seqlens_q and tree_cu_seqlens_k must have the same length, "
                f"got {tree_cu_seqlens_q.shape[0]} and {tree_cu_seqlens_k.shape[0]}"
            )
        starts = tree_cu_seqlens_q.detach().long()
        lengths = starts.diff()
        first_depth = tree_cu_seqlens_k.detach().to(starts.device).long().diff() - lengths
        num_tokens = int(starts[-1])
        # Position = depth of the segment's first token + offset within the segment.
        shift = torch.repeat_interleave(first_depth - starts[:-1], lengths, output_size=num_tokens)
        positions = torch.arange(num_tokens, device=starts.device) + shift
        _check_depth_first("the depths that tree_cu_seqlens_q and tree_cu_seqlens_k imply", positions)
        return _plan_of(positions)

    @property
    def num_tokens(self) -> int:
        """N, the tokens of the row."""
        return self.depth.shape[0]

    @property
    def segments(self) -> SegmentTable:
        """The row's segments, on the host; computed once."""
        return segment_table(self.subtree_end, self.depth)

    def schedule(
        self, block_q: int, block_k: int, window: int | None = None, *, capacity: int | None = None
    ) -> TreeSchedule:
        """The key ranges that blocks of `block_q` queries walk in tiles of `block_k` keys, on the plan's device.

        Computed once, so a schedule built early with a `capacity` is the one that every layer then uses.

        Args:
            block_q: tokens of a block of queries.
            block_k: keys of a tile.
            window: a query sees only the last `window` tokens of its path.
            capacity: list entries to allocate, at least ceil(N / block_q). Nothing is then read from the device, and
                `overflow` of the result says whether they were too few. None reads the number needed.

        Raises:
            ValueError: `capacity` is below the number of blocks.
        """
        return plan_memo.get(
            self.subtree_end,
            ("schedule", block_q, block_k, window),
            lambda: build_schedule(
                self.subtree_end, self.depth, block_q=block_q, block_k=block_k, window=window, capacity=capacity
            ),
        )

    def query_stops(self, window: int | None = None) -> Tensor:
        """(N,) int32, one past the last query that sees each key within the window; computed once."""
        return plan_memo.get(
            self.subtree_end, ("query_stops", window), lambda: query_stops(self.subtree_end, self.depth, window)
        )

    def num_pairs(self, window: int | None = None) -> int:
        """Count the visible (query, key) pairs of one head, within `window` tokens of the path if given."""
        visible = self.depth.long() + 1
        if window is not None:
            visible = visible.clamp(max=window)
        return int(visible.sum())


class PlanMemo:
    """Values derived from a plan's tensors, each valid only while that very tensor lives unmodified.

    The custom ops receive a plan's tensors and not the plan, so this is where a schedule survives from one layer to
    the next. Keys are held weakly and checked by version (inference tensors, which have none, by content), hence
    nothing can go stale.
    """

    def __init__(self) -> None:
        self._entries: Any = WeakTensorKeyDictionary()

    def get(self, tensor: Tensor, key: Hashable, build: Callable[[], T]) -> T:
        """Return the value kept for `tensor` under `key`, built by `build` when it is not there.

        What is built under `torch.inference_mode` serves outside of it as well.
        """
        state, values = self._entries.get(tensor, (None, None))
        if values is None or not _is_unmodified(tensor, state):
            values = {}
            self._entries[tensor] = (tensor.clone() if tensor.is_inference() else tensor._version, values)
        if key not in values:
            with torch.inference_mode(False):
                values[key] = build()
        value: T = values[key]
        return value


def _is_unmodified(tensor: Tensor, state: Tensor | int) -> bool:
    return torch.equal(tensor, state) if isinstance(state, Tensor) else tensor._version == state


plan_memo = PlanMemo()


def segment_table(subtree_end: Tensor, depth: Tensor) -> SegmentTable:
    """Cut the row at every branch and every end of a path (memoised on `subtree_end`)."""
    return plan_memo.get(subtree_end, "segments", lambda: _segment_table(subtree_end, depth))


def _segment_table(subtree_end: Tensor, depth: Tensor) -> SegmentTable:
    end, level = subtree_end.cpu().numpy(), depth.cpu().numpy()
    num_tokens = len(end)
    begins = np.ones(num_tokens, dtype=bool)
    begins[1:] = (end[1:] != end[:-1]) | (level[1:] != level[:-1] + 1)
    start = np.flatnonzero(begins)
    stop = np.append(start[1:], num_tokens)[: len(start)]
    return SegmentTable(start, stop, end[start].astype(np.int64), level[start].astype(np.int64))


def _plan_of(positions: Tensor) -> TreePlan:
    # One plan serves all layers and passes, and what `PlanMemo` keeps of it is cheap to check for ordinary tensors.
    with torch.inference_mode(False):
        return TreePlan(_subtree_end(positions), positions.int())


def _subtree_end(positions: Tensor) -> Tensor:
    """Find the first later token at the same depth or above, for every token at once.

    The step from token i - 1 to token i closes the open tokens at depths position[i] .. position[i - 1], and the row's
    end closes what is left: N closings in all. At one depth openings and closings alternate, so the k-th
    token of a depth is closed by its k-th closing, and two stable sorts by depth pair them.
    """
    num_tokens = positions.shape[0]
    device = positions.device
    after = torch.cat([positions[1:], positions.new_zeros(min(num_tokens, 1))])
    closed = positions + 1 - after
    closer = torch.repeat_interleave(torch.arange(1, num_tokens + 1, device=device), closed, output_size=num_tokens)
    closings_before = closed.cumsum(0) - closed
    closed_depth = torch.arange(num_tokens, device=device) + (after - closings_before)[closer - 1]
    # int32 keys sort faster, and depths fit.
    opened_order = positions.int().sort(stable=True).indices
    closed_order = closed_depth.int().sort(stable=True).indices
    end = torch.empty(num_tokens, dtype=torch.int32, device=device)
    end[opened_order] = closer[closed_order].int()
    return end


def _check_integer(name: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} must have an integer dtype, got {tensor.dtype}")


def _check_boundaries(name: str, boundaries: Tensor) -> None:
    if not isinstance(boundaries, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(boundaries).__name__}")
    _check_integer(name, boundaries)
    if boundaries.dim() != 1 or boundaries.shape[0] == 0:
        raise ValueError(f"{name} must be (S + 1,), got {tuple(boundaries.shape)}")
    if int(boundaries[0]) != 0:
        raise ValueError(f"{name} must start at 0, got {int(boundaries[0])}")
    falls = (boundaries[1:] < boundaries[:-1]).nonzero()
    if len(falls):
        at = int(falls[0, 0]) + 1
        raise ValueError(
            f"{name} must not decrease, got {int(boundaries[at])} after {int(boundaries[at - 1])} at index {at}"
        )


def _check_depth_first(name: str, positions: Tensor) -> None:
    """Check that each token hangs from the path of the one before it; one read of the device when it does."""
    previous = torch.cat([positions.new_full((min(len(positions), 1),), -1), positions[:-1]])
    wrong = (positions < 0) | (positions > previous + 1)
    if not bool(wrong.any()):
        return
    at = int(wrong.nonzero()[0, 0])
    got = int(positions[at])
    if got < 0:
        raise ValueError(f"{name} must not be negative, got {got} at index {at}")
    if at == 0:
        raise ValueError(f"{name} must start at 0, got {got}")
    raise ValueError(
        f"{name} must rise by at most 1 from one token to the next, "
        f"got {got} after {int(positions[at - 1])} at index {at}"
    )
