"""The CPU's tile schedule: which dense calls cover the visible pairs of a row.

Long segments are blocks of their own: their triangle and their descendants' rectangle need no mask. A primitive may
compute the whole square of a triangle, so long triangles are halved. Runs of short segments are packed into one block,
since a call per segment would cost more than the masked pairs it saves; only the block's open keys (those with
descendants beyond the block, at most one path's worth) go on. Everything is decided by comparing bounds, on the host,
once a plan.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from treepack.kernels.cascade import Rows, Tile
from treepack.kernels.plan import SegmentTable, TreePlan, plan_memo

Ints = NDArray[Any]


@dataclass(frozen=True)
class Tiling:
    """Bounds of the schedule, in tokens.

    Attributes:
        pack: most tokens of a block packed from short segments.
        chain: a segment of at least so many tokens is a block of its own; at most pack / 2.
        split: most tokens of such a block (None: any number).
        leaf: most tokens of such a block's triangles; a longer one is halved, the later half against the earlier being
            a rectangle (None: any number).
        rows: most queries of a rectangle (None: any number).
        window: sliding window, measured in depth (None: unbounded).
    """

    pack: int
    chain: int
    split: int | None = None
    leaf: int | None = None
    rows: int | None = None
    window: int | None = None


def tile_schedule(plan: TreePlan, tiling: Tiling) -> tuple[Tile, ...]:
    """Cover the plan's visible pairs exactly once, the causal tiles first (memoised on the plan's tensors)."""
    return plan_memo.get(plan.subtree_end, tiling, lambda: _tile_schedule(plan, tiling))


@dataclass(frozen=True)
class _Block:
    start: int
    stop: int
    is_chain: bool


def _tile_schedule(plan: TreePlan, tiling: Tiling) -> tuple[Tile, ...]:
    end, depth = plan.subtree_end.cpu().numpy(), plan.depth.cpu().numpy()
    blocks = list(_blocks(plan.segments, tiling))
    within = [tile for block in blocks for tile in _within(block, depth, tiling)]
    beyond = [tile for block in blocks for tile in _rectangles(block, end, depth, tiling)]
    return tuple(sorted((*within, *beyond), key=lambda tile: not tile.causal))


def _blocks(segments: SegmentTable, tiling: Tiling) -> Iterator[_Block]:
    start, depth = segments.start, segments.depth
    starts = start.tolist()
    num_tokens = int(segments.stop[-1]) if len(segments) else 0
    chains = np.flatnonzero(segments.stop - start >= tiling.chain)
    chain_starts, chain_stops = start[chains].tolist(), segments.stop[chains].tolist()
    at = next_chain = 0
    while at < num_tokens:
        if next_chain < len(chain_starts) and at == chain_starts[next_chain]:
            stop = chain_stops[next_chain]
            step = tiling.split or stop - at
            for piece in range(at, stop, step):
                yield _Block(piece, min(piece + step, stop), is_chain=True)
            next_chain += 1
        else:
            limit = chain_starts[next_chain] if next_chain < len(chain_starts) else num_tokens
            stop = _pack_stop(at, limit, starts, depth, tiling)
            yield _Block(at, stop, is_chain=False)
        at = stop


def _pack_stop(at: int, limit: int, starts: list[int], depth: Ints, tiling: Tiling) -> int:
    """Cut a packed block where the fewest paths stay open, in the second half of its range."""
    if limit - at <= tiling.pack:
        return limit
    # Short segments are at most half a block long, so one starts in the second half.
    first = bisect_left(starts, at + tiling.pack // 2)
    last = bisect_right(starts, at + tiling.pack)
    depths_from_last = depth[first:last][::-1]
    return starts[last - 1 - int(depths_from_last.argmin())]


def _within(block: _Block, depth: Ints, tiling: Tiling) -> Iterator[Tile]:
    """The block's keys against the block itself."""
    length = block.stop - block.start
    if not block.is_chain or tiling.leaf is None or length <= tiling.leaf:
        yield _triangle(block, tiling.window)
        return
    middle = block.start + (length + 1) // 2
    yield from _within(_Block(block.start, middle, is_chain=True), depth, tiling)
    yield from _within(_Block(middle, block.stop, is_chain=True), depth, tiling)
    yield from _cut_rows(middle, block.stop, np.arange(block.start, middle), False, depth, tiling)


def _triangle(block: _Block, window: int | None) -> Tile:
    rows = slice(block.start, block.stop)
    # Depths within a block differ by less than its length.
    windowed = window is not None and block.stop - block.start > window
    return Tile(rows, rows, causal=True, masked=windowed or not block.is_chain)


def _rectangles(block: _Block, end: Ints, depth: Ints, tiling: Tiling) -> Iterator[Tile]:
    """The block's keys against their descendants beyond the block."""
    keys = _open_keys(block, end)
    if not len(keys):
        return
    # Ends of nested subtrees fall as keys rise; ascending, each one drops the last keys.
    ends = np.unique(end[keys])
    begin = block.stop
    while begin < ends[-1]:
        keys = keys[end[keys] > begin]
        ends = ends[ends > begin]
        # A stretch that all keys see needs no mask; ends that follow each other closely share one that does.
        near = bisect_right(ends, begin + tiling.pack // 2)
        stop = int(ends[max(near - 1, 0)])
        masked = stop > ends[0]
        yield from _cut_rows(begin, stop, keys, masked, depth, tiling)
        begin = stop


def _open_keys(block: _Block, end: Ints) -> Ints:
    if not block.is_chain:
        return block.start + np.flatnonzero(end[block.start : block.stop] > block.stop)
    if end[block.start] == block.stop:
        return np.arange(0)
    return np.arange(block.start, block.stop)


def _cut_rows(start: int, stop: int, keys: Ints, masked: bool, depth: Ints, tiling: Tiling) -> Iterator[Tile]:
    queries = np.arange(start, stop)
    key_depth = depth[keys]
    if tiling.window is not None:
        queries = queries[depth[start:stop] < key_depth[-1] + tiling.window]
    step = tiling.rows or max(len(queries), 1)
    for first in range(0, len(queries), step):
        rows = queries[first : first + step]
        windowed = tiling.window is not None and depth[rows].max() >= key_depth[0] + tiling.window
        yield Tile(_as_rows(rows), _as_rows(keys), causal=False, masked=bool(masked or windowed))


def _as_rows(rows: Ints) -> Rows:
    """A slice where the rows are consecutive, so that no copy is made."""
    if int(rows[-1]) - int(rows[0]) + 1 == len(rows):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows)
