"""Counted work: what each way of computing a row's attention executes, by pure functions of the plan.

Nothing is measured here. Counts are exact for the schedules that the code runs; seconds are a model of them, in which
tiles run at an assumed share of the matrix rate and copies at the memory's. They decide between the two paths of the
"flash" backend and are what `treepack doctor --shape` prints.

Legend: B sequences of a call, D head dim.
"""

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from treepack.kernels import levels
from treepack.kernels.plan import SegmentTable, TreePlan, plan_memo

Ints = NDArray[Any]
FlashPath = Literal["cascade", "gather"]


@dataclass(frozen=True)
class TileShape:
    """Size of an attention kernel's tile: `q` tokens (not packed heads) by `k` keys."""

    q: int
    k: int


FLASH_TILE = TileShape(128, 128)
"""Of FlashAttention's forward at head dims up to 128."""


@dataclass(frozen=True)
class Work:
    """What one pass over a row executes.

    Attributes:
        pairs: (query, key) pairs that a query head computes, the padding of its tiles included.
        calls: attention kernels launched one after the other.
        merged_rows: queries whose partial results were merged, summed over the calls.
        gathered_rows: keys copied to lie contiguously, summed over the segments.
    """

    pairs: int
    calls: int = 1
    merged_rows: int = 0
    gathered_rows: int = 0

    def waste(self, visible_pairs: int) -> float:
        """Computed pairs over visible ones; 1 is ideal."""
        return self.pairs / max(visible_pairs, 1)


@dataclass(frozen=True)
class HeadShape:
    """Heads of a layer, in 16-bit elements: query heads, kv heads, and columns of each."""

    query: int = 32
    kv: int = 8
    dim: int = 128


@dataclass(frozen=True)
class Rates:
    """What the model of time assumes of a device and an attention kernel.

    Attributes:
        flops: floating-point operations a second inside tiles.
        bandwidth: bytes a second of a copy.
        call_s: seconds that a further call costs, with the small kernels around it.
    """

    flops: float
    bandwidth: float
    call_s: float


# An H200 multiplies matrices at about 790 TFLOP/s and copies at 4.3 TB/s. Of that rate FlashAttention 2, which torch
# has built in, reaches about 0.47 forward (FlashAttention-3 paper, figure 5), Triton's pipelined loops about 0.57.
FLASH_RATES = Rates(flops=0.47 * 790e12, bandwidth=4.3e12, call_s=2e-5)
TRITON_RATES = Rates(flops=0.57 * 790e12, bandwidth=4.3e12, call_s=2e-5)


def predicted_seconds(work: Work, heads: HeadShape, rates: Rates, *, training: bool = False) -> float:
    """Model of one forward pass; with `training` of a backward pass too, which repeats its calls."""
    flops, merged_bytes, gathered_bytes = (4, 14, 8)
    if training:
        # Five products after two; float32 sums of dQ a level; copies again, and float32 sums of dK and dV from them.
        flops, merged_bytes, gathered_bytes = (14, 34, 56)
    moved = merged_bytes * heads.query * work.merged_rows + gathered_bytes * heads.kv * work.gathered_rows
    computed = flops * heads.query * work.pairs * heads.dim
    return computed / rates.flops + moved * heads.dim / rates.bandwidth + rates.call_s * work.calls * (1 + training)


def flash_path(plan: TreePlan, *, window: int | None, heads: HeadShape) -> FlashPath:
    """How the "flash" backend computes this row, with or without gradients: the path predicted to train faster.

    A depth window always takes the gather: a rectangle's queries lie at unequal depths, so that no single window of a
    dense kernel fits it.
    """
    if window is not None:
        return "gather"
    return plan_memo.get(plan.subtree_end, ("flash path", heads), lambda: _faster_path(plan, heads))


def _faster_path(plan: TreePlan, heads: HeadShape) -> FlashPath:
    cascade, gather = (
        predicted_seconds(count(plan), heads, FLASH_RATES, training=True) for count in (cascade_work, gather_work)
    )
    return "cascade" if cascade <= gather else "gather"


def cascade_work(plan: TreePlan, tile: TileShape = FLASH_TILE) -> Work:
    """Segments against themselves, then each level's segments against all their descendants, merged."""
    segments = plan.segments
    triangles = levels.triangles(segments)
    rectangles = levels.rectangles(segments)
    pairs = _causal_pairs(triangles.q_lengths, triangles.k_lengths, tile)
    pairs += sum(_dense_pairs(level, tile) for level in rectangles)
    merged = sum(int(level.q_lengths.sum()) for level in rectangles)
    return Work(pairs, calls=1 + len(rectangles), merged_rows=merged)


def gather_work(plan: TreePlan, window: int | None = None, tile: TileShape = FLASH_TILE) -> Work:
    """Each segment against a copy of its path, or of the path's last `window` tokens."""
    segments = plan.segments
    k_lengths = levels.path_lengths(segments, window)
    pairs = _causal_pairs(segments.stop - segments.start, k_lengths, tile, window)
    return Work(pairs, gathered_rows=int(k_lengths.sum()))


def unshared_work(plan: TreePlan, window: int | None = None, tile: TileShape = FLASH_TILE) -> Work:
    """Every root-to-leaf sequence on its own, as without packing."""
    lengths = sequence_lengths(plan.segments)
    return Work(_causal_pairs(lengths, lengths, tile, window))


def dense_work(plan: TreePlan, tile: TileShape = FLASH_TILE) -> Work:
    """The whole row as one causal sequence, the mask applied inside, no tile skipped for it."""
    length = np.array([plan.num_tokens])
    return Work(_causal_pairs(length, length, tile))


def triton_query_work(plan: TreePlan, tile: TileShape, window: int | None = None) -> Work:
    """Our kernels of the output and of dQ: the tiles of `plan.schedule`, each range from its first key on."""
    if plan.num_tokens == 0:
        return Work(0)
    schedule = plan.schedule(tile.q, tile.k, window)
    ranges = schedule.ranges[: int(schedule.range_ptr[-1])]
    tiles = _ceil_div(ranges[:, 1] - ranges[:, 0], tile.k)
    return Work(int(tiles.sum()) * tile.q * tile.k)


def triton_key_work(plan: TreePlan, tile: TileShape, window: int | None = None) -> Work:
    """Our kernel of dK and dV: each block of keys against the queries up to the last that sees one of them."""
    stops = plan.query_stops(window).long()
    missing = -len(stops) % tile.k
    last_stops = torch.cat([stops, stops.new_zeros(missing)]).view(-1, tile.k).amax(1)
    first_keys = torch.arange(len(last_stops), device=stops.device) * tile.k
    tiles = _ceil_div(last_stops - first_keys, tile.q)
    return Work(int(tiles.sum()) * tile.q * tile.k)


def sequence_lengths(segments: SegmentTable) -> Ints:
    """Tokens of every root-to-leaf sequence, in packed order."""
    leaf = segments.subtree_end == segments.stop
    lengths: Ints = (segments.depth + segments.stop - segments.start)[leaf]
    return lengths


def _dense_pairs(spans: levels.Spans, tile: TileShape) -> int:
    tiles = _ceil_div(spans.q_lengths, tile.q) * _ceil_div(spans.k_lengths, tile.k)
    return int(tiles.sum()) * tile.q * tile.k


def _causal_pairs(q_lengths: Ints, k_lengths: Ints, tile: TileShape, window: int | None = None) -> int:
    """Sequences whose last query sees their last key (B,), each query one key less than the next."""
    counts = _ceil_div(q_lengths, tile.q)
    first = levels.concatenated_ranges(np.zeros_like(counts), counts) * tile.q
    q_length, k_length = np.repeat(q_lengths, counts), np.repeat(k_lengths, counts)
    before = k_length - q_length
    stop = before + np.minimum(first + tile.q, q_length)
    start = np.zeros_like(stop) if window is None else np.maximum(before + first - window + 1, 0)
    tiles = _ceil_div(stop, tile.k) - start // tile.k
    return int(tiles.sum()) * tile.q * tile.k


def _ceil_div(number: Any, divisor: int) -> Any:
    return -(-number // divisor)
