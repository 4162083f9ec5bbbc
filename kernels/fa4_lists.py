"""Which blocks of keys each block of queries visits, as the lists that FlashAttention 4's block sparsity takes.

A block of keys is seen by consecutive blocks of queries, from its own to the last one that its longest subtree
reaches, and seen whole by those below it that its shortest subtree covers (`plan.py`). Everything is decided by
comparing bounds and is linear in the lists' length.

Legend: N tokens, Q blocks of queries, C blocks of keys (columns), P visited pairs of blocks.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treepack.kernels.plan import TreePlan, plan_memo


@dataclass(frozen=True, eq=False)
class BlockLists:
    """For each block of one side, the blocks of the other side that it visits, ascending.

    Attributes:
        partial_count: (rows,) int32, blocks of which some pairs are invisible, hence masked.
        partial_index: (rows, widest) int32, these blocks; only the first `partial_count` entries of a row count.
        full_count: (rows,) int32, blocks seen whole.
        full_index: (rows, widest) int32, likewise.
    """

    partial_count: Tensor
    partial_index: Tensor
    full_count: Tensor
    full_index: Tensor


def block_lists(
    plan: TreePlan, *, block_q: int, block_k: int, window: int | None = None
) -> tuple[BlockLists, BlockLists]:
    """List the visited pairs of blocks by queries (for the forward) and by keys (for the backward).

    Args:
        plan: the row's forest, N >= 1.
        block_q: tokens of a block of queries.
        block_k: tokens of a block of keys.
        window: a query sees only the last `window` tokens of its path; the bounds on depths then let a few blocks
            through, as partial ones, of which no pair is visible.

    Returns:
        Lists with Q rows and lists with C rows, on the plan's device; computed once.
    """
    key = "block lists", block_q, block_k, window
    return plan_memo.get(plan.subtree_end, key, lambda: _build_lists(plan, block_q, block_k, window))


def _build_lists(plan: TreePlan, block_q: int, block_k: int, window: int | None) -> tuple[BlockLists, BlockLists]:
    num_tokens = plan.num_tokens
    rows, columns = -(-num_tokens // block_q), -(-num_tokens // block_k)
    shortest_C, longest_C = _block_extremes(plan.subtree_end, block_k)
    column_C = torch.arange(columns, device=plan.depth.device)
    first_C = column_C * block_k // block_q
    count_C = (longest_C + block_q - 1) // block_q - first_C
    column_P = column_C.repeat_interleave(count_C)
    row_P = first_C[column_P] + _offsets(count_C)
    q_stop_P = (row_P * block_q + block_q).clamp(max=num_tokens)
    full_P = (row_P * block_q >= (column_P + 1) * block_k) & (q_stop_P <= shortest_C[column_P])
    if window is not None:
        (low_q, high_q), (low_k, high_k) = (_block_extremes(plan.depth, block) for block in (block_q, block_k))
        full_P &= high_q[row_P] - low_k[column_P] < window
        near_P = low_q[row_P] - high_k[column_P] < window
        row_P, column_P, full_P = row_P[near_P], column_P[near_P], full_P[near_P]
    by_queries = row_P.argsort(stable=True)
    return (
        _lists(row_P[by_queries], column_P[by_queries], full_P[by_queries], rows),
        _lists(column_P, row_P, full_P, columns),
    )


def _lists(row_P: Tensor, column_P: Tensor, full_P: Tensor, rows: int) -> BlockLists:
    partial, full = (_rectangle(row_P[chosen], column_P[chosen], rows) for chosen in (~full_P, full_P))
    return BlockLists(*partial, *full)


def _rectangle(row_P: Tensor, column_P: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Counts (rows,) and entries (rows, widest), from pairs sorted by row; at least one entry wide."""
    count = torch.bincount(row_P, minlength=rows)
    entries = torch.zeros(rows, max(int(count.max()), 1), dtype=torch.int32, device=row_P.device)
    entries[row_P, _offsets(count)] = column_P.int()
    return count.int(), entries


def _offsets(count: Tensor) -> Tensor:
    """0, 1, ..., count[0] - 1, 0, 1, ..., count[1] - 1, and so on."""
    start = count.cumsum(0) - count
    return torch.arange(int(count.sum()), device=count.device) - start.repeat_interleave(count)


def _block_extremes(values_N: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Smallest and largest value in each block, int64."""
    # The last value again changes neither.
    missing = -len(values_N) % block
    blocks = torch.cat([values_N, values_N[-1:].expand(missing)]).long().view(-1, block)
    return blocks.amin(1), blocks.amax(1)
