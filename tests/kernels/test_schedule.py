"""The schedule of key ranges against the dense mask: coverage, disjointness, full tiles, size, waste, no reads."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from support.forests import FORESTS, comb, forests, group, karied, positions_of
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs
from treepack.kernels.schedule import TreeSchedule, build_schedule, query_stops

BLOCKS = [(1, 4), (5, 16), (16, 16), (18, 32), (32, 64), (128, 64)]
WINDOWS = [None, 1, 3, 50, 300]


def build(plan: TreePlan, **options: Any) -> TreeSchedule:
    return build_schedule(plan.subtree_end, plan.depth, **options)


def ranges_of(schedule: TreeSchedule, block: int) -> tuple[list[list[int]], list[list[int]]]:
    """The full and the partial ranges of a block."""
    full, partial, stop = schedule.range_ptr[2 * block : 2 * block + 3].tolist()
    return schedule.ranges[full:partial].tolist(), schedule.ranges[partial:stop].tolist()


def check_ranges(plan: TreePlan, schedule: TreeSchedule, window: int | None) -> None:
    visible = visible_pairs(plan, window).numpy()
    for block in range((len(schedule.range_ptr) - 1) // 2):
        rows = visible[block * schedule.block_q : (block + 1) * schedule.block_q]
        full, partial = ranges_of(schedule, block)
        covered = np.zeros(plan.num_tokens, dtype=int)
        for start, stop in full:
            assert stop > start
            assert (stop - start) % schedule.block_k == 0
            assert rows[:, start:stop].all()
        for start, stop in [*full, *partial]:
            assert 0 <= start < stop <= plan.num_tokens
            covered[start:stop] += 1
        assert covered.max() == 1, "a key lies in two ranges"
        assert covered[rows.any(0)].all(), "a visible key lies in none"


def used(schedule: TreeSchedule) -> torch.Tensor:
    return schedule.ranges[: int(schedule.range_ptr[-1])]


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "empty"])
def test_ranges_cover_what_is_visible_once(name: str, blocks: tuple[int, int], window: int | None) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS[name]))
    check_ranges(plan, build(plan, block_q=blocks[0], block_k=blocks[1], window=window), window)


@settings(max_examples=60)
@given(
    forests().filter(len),
    st.sampled_from(BLOCKS),
    st.sampled_from(WINDOWS),
    st.integers(0, 300),
)
def test_any_forest(position_ids: torch.Tensor, blocks: tuple[int, int], window: int | None, spare: int) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    block_q, block_k = blocks
    schedule = build(plan, block_q=block_q, block_k=block_k, window=window)
    check_ranges(plan, schedule, window)
    capacity = -(-len(position_ids) // block_q) + spare
    fixed = build(plan, block_q=block_q, block_k=block_k, window=window, capacity=capacity)
    check_ranges(plan, fixed, window)
    if not fixed.overflow:
        assert torch.equal(fixed.range_ptr, schedule.range_ptr)
        assert torch.equal(used(fixed), used(schedule))


@given(forests().filter(len), st.sampled_from(WINDOWS))
def test_query_stops(position_ids: torch.Tensor, window: int | None) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    visible = visible_pairs(plan, window)
    last = (visible.long() * torch.arange(1, len(position_ids) + 1)[:, None]).amax(0)
    assert torch.equal(query_stops(plan.subtree_end, plan.depth, window).long(), last)


def test_an_overflow_walks_whole_prefixes() -> None:
    plan = TreePlan.from_position_ids(positions_of(karied(3, 4, 9)))
    needed = used(build(plan, block_q=16, block_k=16))
    blocks = -(-plan.num_tokens // 16)
    schedule = build(plan, block_q=16, block_k=16, capacity=blocks)
    assert len(needed) > blocks
    assert schedule.overflow
    assert [ranges_of(schedule, block) for block in range(blocks)] == [
        ([], [[0, min(16 * block + 16, plan.num_tokens)]]) for block in range(blocks)
    ]


def test_a_capacity_below_the_number_of_blocks_is_refused() -> None:
    plan = TreePlan.from_position_ids(torch.arange(100))
    with pytest.raises(ValueError, match="capacity must be at least the 7 blocks of the row, got 6"):
        plan.schedule(16, 16, capacity=6)


class _NoReads(TorchDispatchMode):
    """Fails on what would make the host wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func._schema.name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::unique_dim"), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("window", [None, 20])
def test_nothing_is_read_from_the_device_with_a_capacity(window: int | None) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS["binary"]))
    with _NoReads():
        build(plan, block_q=16, block_k=16, window=window, capacity=500)
        query_stops(plan.subtree_end, plan.depth, window)
    with pytest.raises(AssertionError, match="_local_scalar_dense"), _NoReads():
        build(plan, block_q=16, block_k=16, window=window)


def test_a_schedule_is_built_once_a_plan() -> None:
    plan = TreePlan.from_position_ids(torch.arange(100))
    same = TreePlan(plan.subtree_end, plan.depth)
    assert plan.schedule(16, 16, capacity=50) is same.schedule(16, 16)
    assert plan.schedule(16, 16) is not plan.schedule(16, 16, 30)
    assert plan.query_stops(30) is same.query_stops(30)
    assert plan.query_stops() is plan.subtree_end


@pytest.mark.parametrize(
    ("segments", "most"),
    [([(0, 131072)], 2), ([(0, 1 << 20)], 2), (comb(30_000, 1, 1), 2), ([(0, 1)] * 66_000, 1)],
    ids=["131k chain", "1M chain", "one-token comb", "one-token roots"],
)
def test_lists_stay_linear(segments: list[tuple[int, int]], most: int) -> None:
    plan = TreePlan.from_position_ids(positions_of(segments))
    schedule = build(plan, block_q=32, block_k=64)
    assert int(schedule.range_ptr[-1]) <= most * -(-plan.num_tokens // 32)


@pytest.mark.parametrize(
    ("segments", "most"),
    [
        (group(8192, [1024] * 16), 1.01),
        (group(1024, [256] * 8) * 8, 1.05),
        (karied(4, 6, 32), 2.0),
        ([(0, 8192)], 1.01),
    ],
    ids=["group", "short group", "32-token edges", "chain"],
)
def test_tiles_waste_little(segments: list[tuple[int, int]], most: float) -> None:
    """Computed over visible pairs: 8 query heads a kv head, 128 rows, 64 keys."""
    plan = TreePlan.from_position_ids(positions_of(segments))
    ranges = used(build(plan, block_q=16, block_k=64)).long()
    tiles = int(((ranges[:, 1] - ranges[:, 0] + 63) // 64).sum())
    assert tiles * 16 * 64 <= most * plan.num_pairs()
