"""Counted work against tiles counted one by one, and the choices that follow from it."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.forests import comb, forests, group, karied, positions_of
from treepack.kernels import levels, work
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs
from treepack.kernels.work import HeadShape, Rates, TileShape, Work

HEADS = HeadShape(32, 8, 128)


def plan_of(segments: object) -> TreePlan:
    return TreePlan.from_position_ids(positions_of(segments))


def touched_pairs(visible_QK: np.ndarray, tile: TileShape) -> int:
    """Pairs in the tiles of one sequence that hold a visible pair."""
    tiles = {(q // tile.q, k // tile.k) for q, k in zip(*np.nonzero(visible_QK))}
    return len(tiles) * tile.q * tile.k


@settings(max_examples=40)
@given(forests(max_segments=6), st.sampled_from([TileShape(16, 32), TileShape(64, 16), TileShape(1, 1)]))
def test_levels_by_tiles_counted_one_by_one(position_ids: Tensor, tile: TileShape) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    visible = visible_pairs(plan).numpy()
    calls = [levels.triangles(plan.segments), *levels.rectangles(plan.segments)]
    spans = [span for call in calls for span in zip(call.q_start, call.q_stop, call.k_start, call.k_stop)]
    expected = sum(touched_pairs(visible[q0:q1, k0:k1], tile) for q0, q1, k0, k1 in spans)
    counted = work.cascade_work(plan, tile)
    assert counted.pairs == expected
    assert counted.merged_rows == sum(q1 - q0 for q0, q1, k0, _ in spans if q0 != k0)
    # At tiles of one pair nothing is wasted: the calls cover each visible pair once.
    assert tile.q > 1 or counted.pairs == plan.num_pairs()


@settings(max_examples=40)
@given(
    forests(max_segments=6), st.sampled_from([None, 1, 5, 70]), st.sampled_from([TileShape(16, 32), TileShape(1, 1)])
)
def test_the_gather_by_tiles_counted_one_by_one(position_ids: Tensor, window: int | None, tile: TileShape) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    segments = plan.segments
    visible = visible_pairs(plan, window).numpy()
    index = levels.path_index(segments, window)
    cuts = np.cumsum(levels.path_lengths(segments, window))[:-1]
    paths = np.split(index, cuts) if len(segments) else []
    expected = sum(
        touched_pairs(visible[start:stop][:, path], tile)
        for start, stop, path in zip(segments.start, segments.stop, paths)
    )
    counted = work.gather_work(plan, window, tile)
    assert counted.pairs == expected
    assert counted.gathered_rows == len(index)
    assert tile.q > 1 or counted.pairs == plan.num_pairs(window)


def test_unshared_and_dense_pairs() -> None:
    plan = plan_of(group(1024, [256] * 12))
    assert work.unshared_work(plan, tile=TileShape(1, 1)).pairs == 12 * 1280 * 1281 // 2
    assert work.dense_work(plan, TileShape(1, 1)).pairs == 4096 * 4097 // 2
    assert work.sequence_lengths(plan.segments).tolist() == [1280] * 12


@settings(max_examples=30)
@given(forests(max_segments=6), st.sampled_from([None, 9]))
def test_our_kernels_visit_every_visible_pair(position_ids: Tensor, window: int | None) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    for count in (work.triton_query_work, work.triton_key_work):
        assert count(plan, TileShape(8, 16), window).pairs >= plan.num_pairs(window)
    assert work.triton_key_work(plan, TileShape(1, 1)).pairs == plan.num_pairs()


def test_waste_of_the_known_shapes() -> None:
    """GRPO groups waste next to nothing in two levels; a deep tree of short edges does (kernel-facts)."""
    grpo, deep = plan_of(group(2048, [1024] * 16)), plan_of(karied(4, 6, 32))
    assert work.cascade_work(grpo).waste(grpo.num_pairs()) < 1.07
    assert work.cascade_work(deep).waste(deep.num_pairs()) > 3


def test_the_choice_of_path() -> None:
    def path(segments: object, window: int | None = None) -> str:
        return work.flash_path(plan_of(segments), window=window, heads=HEADS)

    assert path(group(1024, [256] * 12)) == "cascade"
    assert path(group(8192, [1024] * 16)) == "cascade"
    assert path([(0, 500), (0, 700)]) == "cascade"
    # Two hundred calls of one token each cost more than the copies.
    assert path(comb(200, 1, 1)) == "gather"
    # No dense window fits a rectangle.
    assert path(group(1024, [256] * 12), window=128) == "gather"


def test_the_model_of_time_adds_up() -> None:
    rates = Rates(flops=1e12, bandwidth=1e9, call_s=0.5)
    heads = HeadShape(query=4, kv=2, dim=8)
    assert work.predicted_seconds(Work(10**9, calls=2), heads, rates) == pytest.approx(1 + 4 * 8 * 4 * 1e9 / 1e12)
    merged = work.predicted_seconds(Work(0, 0, merged_rows=1000), heads, rates)
    gathered = work.predicted_seconds(Work(0, 0, gathered_rows=1000), heads, rates)
    assert (merged, gathered) == pytest.approx((14 * 4 * 8 * 1e-6, 8 * 2 * 8 * 1e-6))
    training = work.predicted_seconds(Work(10**9, calls=2), heads, rates, training=True)
    assert training == pytest.approx(2 + 14 * 8 * 4 * 1e9 / 1e12)


def test_an_empty_row_is_no_work() -> None:
    plan = TreePlan.from_position_ids(torch.zeros(0, dtype=torch.int64))
    for count in (work.cascade_work, work.gather_work, work.unshared_work):
        assert count(plan).pairs == 0
    assert work.triton_query_work(plan, TileShape(8, 8)).pairs == 0
    assert work.flash_path(plan, window=None, heads=HEADS) == "cascade"
