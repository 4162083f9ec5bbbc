"""Gathering rows by position on a GPU, and the sum that undoes it: the kernels (launched by `gather.py`).

Legend: N rows of the packed tensor, P gathered rows, H columns; a block of them in suffixes. U gathered rows that read
one and the same row.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_rows", "num_gathered"])
def gather_kernel(
    HIDDEN,
    POSITIONS,
    OUT,
    hidden_row,
    num_rows,
    num_gathered,
    COLUMNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_H: tl.constexpr,
):
    """Write HIDDEN[POSITIONS], and NaN for a position that is none of its rows. Grid: (blocks of P, blocks of H)."""
    place_P = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    column_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists_P = place_P < num_gathered
    exists_H = (column_H < COLUMNS)[None, :]
    row_P = tl.load(POSITIONS + place_P, mask=exists_P, other=0).to(tl.int64)
    inside_P = exists_P & (row_P >= 0) & (row_P < num_rows)
    pointer_PH = HIDDEN + row_P[:, None] * hidden_row + column_H[None, :]
    rows_PH = tl.load(pointer_PH, mask=inside_P[:, None] & exists_H, other=float("nan"))
    tl.store(OUT + place_P[:, None] * COLUMNS + column_H[None, :], rows_PH, mask=exists_P[:, None] & exists_H)


@triton.jit
def gather_sum_kernel(
    GRAD,
    ORDER,
    BOUNDS,
    OUT,
    grad_row,
    COLUMNS: tl.constexpr,
    BLOCK_U: tl.constexpr,
    BLOCK_H: tl.constexpr,
    SUM_DTYPE: tl.constexpr,
):
    """Write to row n of OUT the sum of the rows ORDER[BOUNDS[n]:BOUNDS[n + 1]] of GRAD. Grid: (N, blocks of H)."""
    row = tl.program_id(0).to(tl.int64)
    column_H = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    exists_H = column_H < COLUMNS
    stop = tl.load(BOUNDS + row + 1)
    sum_H = tl.zeros((BLOCK_H,), SUM_DTYPE)
    for first in range(tl.load(BOUNDS + row), stop, BLOCK_U):
        use_U = first + tl.arange(0, BLOCK_U)
        exists_U = use_U < stop
        place_U = tl.load(ORDER + use_U, mask=exists_U, other=0)
        pointer_UH = GRAD + place_U[:, None] * grad_row + column_H[None, :]
        grad_UH = tl.load(pointer_UH, mask=exists_U[:, None] & exists_H[None, :], other=0.0)
        sum_H += tl.sum(grad_UH.to(SUM_DTYPE), 0)
    tl.store(OUT + row * COLUMNS + column_H, sum_H.to(OUT.dtype.element_ty), mask=exists_H)
