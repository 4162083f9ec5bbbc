import gc
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from support.forests import FORESTS, forests, positions_of
from treepack.kernels import plan as plan_module
from treepack.kernels.plan import PlanMemo, TreePlan
from treepack.kernels.reference import visible_pairs
from treepack.kernels.schedule import build_schedule

on_many_forests = settings(max_examples=100)


def brute_force_end(positions: list[int]) -> list[int]:
    return [
        next((i for i in range(j + 1, len(positions)) if positions[i] <= positions[j]), len(positions))
        for j in range(len(positions))
    ]


def cu_seqlens_of(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    """TRL's two boundaries, from the segments."""
    table = TreePlan.from_position_ids(position_ids).segments
    lengths = table.stop - table.start
    return tuple(  # type: ignore[return-value]
        torch.from_numpy(np.concatenate([[0], np.cumsum(each)])).int() for each in (lengths, table.depth + lengths)
    )


@on_many_forests
@given(forests())
def test_subtree_end_is_the_next_token_at_the_same_depth_or_above(position_ids: Tensor) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    assert plan.subtree_end.tolist() == brute_force_end(position_ids.tolist())
    assert plan.depth.tolist() == position_ids.tolist()
    assert plan.subtree_end.dtype == plan.depth.dtype == torch.int32
    assert plan.num_tokens == len(position_ids)


@on_many_forests
@given(forests())
def test_segments_are_the_runs_without_a_branch(position_ids: Tensor) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    table, end = plan.segments, plan.subtree_end.tolist()
    covered = [token for start, stop in zip(table.start, table.stop) for token in range(start, stop)]
    assert covered == list(range(len(position_ids)))
    for start, stop, subtree_end, depth in zip(table.start, table.stop, table.subtree_end, table.depth):
        assert end[start:stop] == [subtree_end] * (stop - start)
        assert position_ids[start:stop].tolist() == list(range(depth, depth + stop - start))
    for stop, next_depth in zip(table.stop[:-1], table.depth[1:]):
        # Maximal: the next segment is no plain continuation of this one.
        assert next_depth != position_ids[stop - 1] + 1 or end[stop] != end[stop - 1]


@on_many_forests
@given(forests())
def test_cu_seqlens_give_the_same_plan(position_ids: Tensor) -> None:
    expected = TreePlan.from_position_ids(position_ids)
    plan = TreePlan.from_cu_seqlens(*cu_seqlens_of(position_ids))
    assert torch.equal(plan.subtree_end, expected.subtree_end)
    assert torch.equal(plan.depth, expected.depth)


@pytest.mark.parametrize("window", [None, 1, 3, 1000])
@pytest.mark.parametrize("name", FORESTS)
def test_num_pairs_counts_the_mask(name: str, window: int | None) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS[name]))
    assert plan.num_pairs(window) == int(visible_pairs(plan, window).sum())


def test_a_row_of_shape_1_n_and_any_integer_dtype() -> None:
    expected = TreePlan.from_position_ids(torch.tensor([0, 1, 2, 1, 0]))
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        plan = TreePlan.from_position_ids(torch.tensor([[0, 1, 2, 1, 0]], dtype=dtype))
        assert torch.equal(plan.subtree_end, expected.subtree_end)
        assert plan.depth.tolist() == [0, 1, 2, 1, 0]


def test_empty_segments_are_allowed_in_cu_seqlens() -> None:
    plan = TreePlan.from_cu_seqlens(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 2, 4, 6]))
    assert plan.depth.tolist() == [0, 1, 1]


def test_million_token_rows() -> None:
    count = 1 << 20
    chain = TreePlan.from_position_ids(torch.arange(count))
    assert bool((chain.subtree_end == count).all())
    assert len(chain.segments) == 1
    roots = TreePlan.from_position_ids(torch.zeros(count, dtype=torch.int64))
    assert torch.equal(roots.subtree_end, torch.arange(1, count + 1, dtype=torch.int32))
    assert len(roots.segments) == count


def test_a_deep_comb_of_a_hundred_thousand_branches() -> None:
    teeth = 100_000
    plan = TreePlan.from_position_ids((torch.arange(2 * teeth) + 1) // 2)
    # Spine tokens stay open to the end, except the last tooth's spine, which has only the tooth left: also the end.
    assert bool((plan.subtree_end[0::2] == 2 * teeth).all())
    assert torch.equal(plan.subtree_end[1::2], torch.arange(2, 2 * teeth + 1, 2, dtype=torch.int32))


@pytest.mark.parametrize(
    ("position_ids", "error", "message"),
    [
        (torch.tensor([1, 2]), ValueError, "position_ids must start at 0, got 1"),
        (torch.tensor([0, 1, 3]), ValueError, "must rise by at most 1 .* got 3 after 1 at index 2"),
        (torch.tensor([0, -1]), ValueError, "position_ids must not be negative, got -1 at index 1"),
        (torch.tensor([-1, 0]), ValueError, "position_ids must not be negative, got -1 at index 0"),
        (torch.tensor([0.0, 1.0]), TypeError, "position_ids must have an integer dtype, got torch.float32"),
        (torch.tensor([True]), TypeError, "position_ids must have an integer dtype, got torch.bool"),
        (torch.zeros(2, 3, dtype=torch.int64), ValueError, r"position_ids must be \(N,\) or \(1, N\), got \(2, 3\)"),
        (torch.zeros(3, 1, 4, dtype=torch.int64), ValueError, r"got \(3, 1, 4\)"),
        ([0, 1], TypeError, "position_ids must be a tensor, got list"),
    ],
)
def test_position_ids_that_are_no_forest(position_ids: Tensor, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        TreePlan.from_position_ids(position_ids)


@pytest.mark.parametrize(
    ("queries", "keys", "error", "message"),
    [
        ([0, 3, 2], [0, 3, 4], ValueError, "tree_cu_seqlens_q must not decrease, got 2 after 3 at index 2"),
        ([0, 3, 4], [0, 3, 2], ValueError, "tree_cu_seqlens_k must not decrease, got 2 after 3 at index 2"),
        ([1, 3], [0, 2], ValueError, "tree_cu_seqlens_q must start at 0, got 1"),
        ([0, 3], [1, 4], ValueError, "tree_cu_seqlens_k must start at 0, got 1"),
        ([0, 3], [0, 3, 5], ValueError, "must have the same length, got 2 and 3"),
        ([], [], ValueError, r"tree_cu_seqlens_q must be \(S \+ 1,\), got \(0,\)"),
        ([[0, 3]], [0, 3], ValueError, r"tree_cu_seqlens_q must be \(S \+ 1,\), got \(1, 2\)"),
        # A path of 5 for 2 tokens needs 3 open tokens before them, and there are 2.
        ([0, 2, 4], [0, 2, 7], ValueError, "imply must rise by at most 1 .* got 3 after 1 at index 2"),
        # A path shorter than its own segment.
        ([0, 2, 4], [0, 2, 3], ValueError, "imply must not be negative, got -1 at index 2"),
        ([0, 2], [0, 3], ValueError, "imply must start at 0, got 1"),
        ([0.0, 2.0], [0, 2], TypeError, "tree_cu_seqlens_q must have an integer dtype"),
    ],
)
def test_boundaries_that_are_no_forest(queries: list, keys: list, error: type[Exception], message: str) -> None:
    dtype = None if queries else torch.int64
    with pytest.raises(error, match=message):
        TreePlan.from_cu_seqlens(torch.tensor(queries, dtype=dtype), torch.tensor(keys, dtype=dtype))


def test_boundaries_must_be_tensors() -> None:
    with pytest.raises(TypeError, match="tree_cu_seqlens_k must be a tensor, got list"):
        TreePlan.from_cu_seqlens(torch.tensor([0, 1]), [0, 1])  # type: ignore[arg-type]


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> int:
        self.calls += 1
        return self.calls


def test_memo_keeps_a_value_while_its_tensor_lives_unmodified() -> None:
    memo, build = PlanMemo(), Counter()
    key = torch.arange(4)
    assert [memo.get(key, "a", build) for _ in range(3)] == [1, 1, 1]
    assert memo.get(key, "b", build) == 2
    assert memo.get(key.clone(), "a", build) == 3
    key.add_(1)
    assert memo.get(key, "a", build) == 4
    assert memo.get(key, "b", build) == 5


def test_memo_forgets_a_tensor_that_died() -> None:
    memo, build = PlanMemo(), Counter()
    for expected in range(1, 20):
        key = torch.arange(4)  # likely at the address of the one before
        assert memo.get(key, "a", build) == expected
        del key
    gc.collect()
    assert len(memo._entries) == 0


def test_memo_compares_tensors_without_a_version() -> None:
    memo, build = PlanMemo(), Counter()
    with torch.inference_mode():
        key = torch.arange(4)
        assert [memo.get(key, "a", build) for _ in range(2)] == [1, 1]
        key[2] = 7
        assert [memo.get(key, "a", build) for _ in range(2)] == [2, 2]
    assert memo.get(key, "a", build) == 2


def test_memo_keeps_ordinary_tensors_under_inference_mode() -> None:
    memo, key = PlanMemo(), torch.arange(4)
    with torch.inference_mode():
        kept = memo.get(key, "a", lambda: key + 1)
    assert not kept.is_inference()
    assert memo.get(key, "a", lambda: key + 2) is kept


@pytest.mark.parametrize("built", ["before", "under inference mode", "from boundaries"])
def test_one_schedule_serves_all_layers_under_inference_mode(built: str, monkeypatch: pytest.MonkeyPatch) -> None:
    builds = []

    def counted(*args: Any, **options: Any) -> Any:
        builds.append(options["window"])
        return build_schedule(*args, **options)

    monkeypatch.setattr(plan_module, "build_schedule", counted)
    position_ids = torch.tensor([0, 1, 2, 1, 2, 0])
    with torch.inference_mode(built != "before"):
        if built == "from boundaries":
            plan = TreePlan.from_cu_seqlens(torch.tensor([0, 1, 3, 5, 6]), torch.tensor([0, 1, 4, 7, 8]))
        else:
            plan = TreePlan.from_position_ids(position_ids.clone())
    with torch.inference_mode():
        for window in (None, 3, None, 3, None):
            # As a layer has it: the ops hand on the plan's tensors.
            schedule = TreePlan(plan.subtree_end, plan.depth).schedule(16, 16, window)
    assert builds == [None, 3]
    assert schedule is plan.schedule(16, 16)
    assert len(builds) == 2


def test_a_plan_computes_its_segments_once() -> None:
    plan = TreePlan.from_position_ids(torch.tensor([0, 1, 1]))
    assert plan.segments is plan.segments
