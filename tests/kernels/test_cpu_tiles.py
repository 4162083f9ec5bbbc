"""The schedule covers every visible pair once, whatever the forest, and stays small."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.forests import FORESTS, forests, positions_of
from treepack.kernels.cascade import Rows
from treepack.kernels.cpu_tiles import Tiling, tile_schedule
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs

TILINGS = [
    Tiling(pack=128, chain=64),
    Tiling(pack=128, chain=64, leaf=256),
    Tiling(pack=16, chain=8, leaf=9),
    Tiling(pack=16, chain=8, split=40, leaf=9, rows=7, window=20),
    Tiling(pack=16, chain=8),
    Tiling(pack=2, chain=1),
    Tiling(pack=16, chain=8, split=16, rows=20, window=5),
    Tiling(pack=16, chain=8, split=16, rows=7, window=40),
    Tiling(pack=128, chain=64, split=256, rows=512),
]


def index(rows: Rows) -> Tensor:
    return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def count_pairs(plan: TreePlan, tiling: Tiling) -> Tensor:
    """How often each pair is computed."""
    visible = visible_pairs(plan, tiling.window)
    count = torch.zeros(visible.shape, dtype=torch.int64)
    for tile in tile_schedule(plan, tiling):
        rows, keys = index(tile.queries)[:, None], index(tile.keys)[None, :]
        admitted = torch.ones(rows.shape[0], keys.shape[1], dtype=torch.bool)
        if tile.causal:
            admitted &= keys <= rows
        if tile.masked:
            admitted &= visible[rows, keys]
        count[rows, keys] += admitted
    return count


def assert_covered_once(position_ids: Tensor, tiling: Tiling) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    assert torch.equal(count_pairs(plan, tiling), visible_pairs(plan, tiling.window).long())


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
@pytest.mark.parametrize("name", FORESTS)
def test_every_visible_pair_is_computed_once(name: str, tiling: Tiling) -> None:
    assert_covered_once(positions_of(FORESTS[name]), tiling)


@settings(max_examples=60)
@given(forests(), st.sampled_from(TILINGS))
def test_every_visible_pair_of_any_forest_is_computed_once(position_ids: Tensor, tiling: Tiling) -> None:
    assert_covered_once(position_ids, tiling)


@pytest.mark.parametrize("tiling", TILINGS, ids=str)
def test_causal_tiles_come_first_and_cover_every_token(tiling: Tiling) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS["prompts"]))
    tiles = tile_schedule(plan, tiling)
    triangles = [tile for tile in tiles if tile.causal]
    assert list(tiles[: len(triangles)]) == triangles
    assert torch.cat([index(tile.queries) for tile in triangles]).tolist() == list(range(plan.num_tokens))


def test_many_tiny_segments_share_tiles() -> None:
    plan = TreePlan.from_position_ids(torch.zeros(65_536, dtype=torch.int64))
    assert len(tile_schedule(plan, Tiling(pack=128, chain=64))) == 65_536 // 128


def test_a_deep_comb_of_one_token_branches_needs_no_tile_a_branch() -> None:
    plan = TreePlan.from_position_ids((torch.arange(100_000) + 1) // 2)
    # One triangle and one rectangle a block of at least 64 tokens.
    assert len(tile_schedule(plan, Tiling(pack=128, chain=64))) <= 2 * 100_000 / 64 + 2


def test_bounds_of_a_tile() -> None:
    plan = TreePlan.from_position_ids(torch.arange(5000))
    tiles = tile_schedule(plan, Tiling(pack=128, chain=64, split=256, rows=300, window=1000))
    assert max(len(index(tile.keys)) for tile in tiles) == 256
    assert max(len(index(tile.queries)) for tile in tiles if not tile.causal) == 300


def test_long_triangles_are_halved_into_rectangles_without_a_mask() -> None:
    plan = TreePlan.from_position_ids(torch.arange(1000))
    tiles = tile_schedule(plan, Tiling(pack=128, chain=64, leaf=256))
    assert [len(index(tile.queries)) for tile in tiles if tile.causal] == [250] * 4
    assert [len(index(tile.queries)) for tile in tiles if not tile.causal] == [250, 250, 500]
    assert not any(tile.masked for tile in tiles)


def test_the_schedule_is_kept_for_the_next_layer() -> None:
    plan = TreePlan.from_position_ids(torch.arange(10))
    tiling = Tiling(pack=128, chain=64)
    assert tile_schedule(plan, tiling) is tile_schedule(TreePlan(plan.subtree_end, plan.depth), tiling)
    assert tile_schedule(plan, tiling) is not tile_schedule(plan, Tiling(pack=64, chain=32))
