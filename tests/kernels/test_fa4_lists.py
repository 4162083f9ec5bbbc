"""Block lists against the dense mask, by queries and by keys."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.forests import FORESTS, forests, group, positions_of
from treepack.kernels.fa4_lists import BlockLists, block_lists
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs

BLOCKS = [(128, 128), (128, 64), (16, 16), (16, 8), (8, 24)]


def read(count: Tensor, index: Tensor, columns: int) -> np.ndarray:
    """(rows, columns) bool; the entries of a row must ascend, so that none occurs twice."""
    assert count.dtype == index.dtype == torch.int32
    assert index.is_contiguous()
    found = np.zeros((len(count), columns), dtype=bool)
    for row, (length, entries) in enumerate(zip(count.tolist(), index.tolist())):
        assert entries[:length] == sorted(set(entries[:length]))
        found[row, entries[:length]] = True
    return found


def expected_blocks(visible: np.ndarray, block_q: int, block_k: int) -> tuple[np.ndarray, np.ndarray]:
    """Which pairs of blocks hold a visible pair, and which hold no invisible one; (Q, C) each."""
    num_tokens = len(visible)
    rows, columns = -(-num_tokens // block_q), -(-num_tokens // block_k)
    some, every = np.zeros((rows, columns), dtype=bool), np.zeros((rows, columns), dtype=bool)
    for row in range(rows):
        for column in range(columns):
            block = visible[row * block_q : (row + 1) * block_q, column * block_k : (column + 1) * block_k]
            some[row, column], every[row, column] = block.any(), block.all()
    return some, every


def check(position_ids: Tensor, blocks: tuple[int, int], window: int | None) -> None:
    block_q, block_k = blocks
    plan = TreePlan.from_position_ids(position_ids)
    some, every = expected_blocks(visible_pairs(plan, window).numpy(), block_q, block_k)
    by_queries, by_keys = block_lists(plan, block_q=block_q, block_k=block_k, window=window)

    def both(lists: BlockLists, columns: int) -> tuple[np.ndarray, np.ndarray]:
        return read(lists.partial_count, lists.partial_index, columns), read(
            lists.full_count, lists.full_index, columns
        )

    partial, full = both(by_queries, some.shape[1])
    assert not (partial & full).any()
    assert (every | ~full).all(), "a block listed as full holds an invisible pair"
    assert (partial | full | ~some).all(), "a visible block is in no list"
    if window is None:
        assert np.array_equal(partial | full, some)
        # The diagonal's blocks take the mask even where they happen to be seen whole.
        below = (np.arange(len(some))[:, None] * block_q) >= (np.arange(some.shape[1]) + 1) * block_k
        assert np.array_equal(full, every & below)
    partial_by_keys, full_by_keys = both(by_keys, some.shape[0])
    assert np.array_equal(partial_by_keys, partial.T)
    assert np.array_equal(full_by_keys, full.T)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize("blocks", BLOCKS, ids=str)
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "empty"])
def test_every_forest(name: str, blocks: tuple[int, int], window: int | None) -> None:
    check(positions_of(FORESTS[name]), blocks, window)


@settings(max_examples=100)
@given(forests().filter(len), st.sampled_from(BLOCKS), st.sampled_from([None, 1, 7, 100, 500]))
def test_any_forest(position_ids: Tensor, blocks: tuple[int, int], window: int | None) -> None:
    check(position_ids, blocks, window)


def test_a_group_is_mostly_full_blocks() -> None:
    """Prompt 1024, 8 x 512 in blocks of 128: 36 + 8 x (4 x 8 + 10) pairs, of which the diagonal's are partial."""
    plan = TreePlan.from_position_ids(positions_of(group(1024, [512] * 8)))
    by_queries, by_keys = block_lists(plan, block_q=128, block_k=128)
    for lists in (by_queries, by_keys):
        assert int(lists.partial_count.sum()) == 40
        assert int(lists.full_count.sum()) == 36 + 8 * 42 - 40


def test_lists_are_as_wide_as_their_longest_row() -> None:
    """Two hundred duplicates of two blocks each: a square of blocks would be 400 wide."""
    plan = TreePlan.from_position_ids(positions_of([(0, 32)] * 200))
    by_queries, by_keys = block_lists(plan, block_q=16, block_k=16)
    for lists in (by_queries, by_keys):
        assert lists.partial_index.shape == lists.full_index.shape == (400, 1)


def test_a_window_hides_far_blocks() -> None:
    plan = TreePlan.from_position_ids(torch.arange(2048))
    by_queries, _ = block_lists(plan, block_q=128, block_k=128, window=128)
    assert (by_queries.partial_count + by_queries.full_count).tolist() == [1, *[2] * 15]
