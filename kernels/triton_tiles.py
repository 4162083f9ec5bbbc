"""What the Triton attention kernels share: tiles of up to two column blocks, packed query rows, scores, visibility.

A head dim that is no power of two is cut in two column blocks (80 = 64 + 16), the second padded and masked where need
be; with one block the second's width is 0 and its tiles are unused aliases of the first's.

Legend: M rows of a query tile (tokens x the query heads that share a kv head), N keys of a tile, D and E the two column
blocks of the head dim, V and W those of the value dim.
"""

from typing import Any

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def packed_rows(chunk, GROUP: tl.constexpr, PACK: tl.constexpr, BLOCK_M: tl.constexpr):
    """Token (counted from the tile's first) and head (from the group's) of each row of a tile, and whether it exists.

    Heads lie innermost. There are no rows past BLOCK_M // PACK tokens, nor past the group's heads.
    """
    row_M = tl.arange(0, BLOCK_M)
    local_M = row_M // PACK
    head_M = chunk * PACK + row_M % PACK
    exists_M = (local_M < BLOCK_M // PACK) & (head_M < GROUP)
    return local_M, head_M, exists_M


@triton.jit
def load_tile(
    base,
    offset_R,
    exists_R,
    FIRST: tl.constexpr,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(R, WIDTH) columns from FIRST on of the rows at `offset_R`; 0 past COLUMNS and, where MASKED, in missing rows."""
    column = FIRST + tl.arange(0, WIDTH)
    pointer = base + offset_R[:, None] + column[None, :]
    if FIRST + WIDTH > COLUMNS:
        inside = (column < COLUMNS)[None, :]
        if MASKED:
            inside = inside & exists_R[:, None]
        tile = tl.load(pointer, mask=inside, other=0.0)
    elif MASKED:
        tile = tl.load(pointer, mask=exists_R[:, None], other=0.0)
    else:
        tile = tl.load(pointer)
    return tile


@triton.jit
def store_tile(base, offset_R, exists_R, tile, FIRST: tl.constexpr, WIDTH: tl.constexpr, COLUMNS: tl.constexpr):
    """Write `tile`, rounded to the tensor's dtype, to the rows that exist and no column past COLUMNS."""
    column = FIRST + tl.arange(0, WIDTH)
    inside = exists_R[:, None]
    if FIRST + WIDTH > COLUMNS:
        inside = inside & (column < COLUMNS)[None, :]
    tl.store(base + offset_R[:, None] + column[None, :], tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def log2_scores(dots, score_scale, cap_log2, HAS_SOFTCAP: tl.constexpr):
    """Scores in units of log2 e, for exp2; with a softcap also its tanh, whose square the gradient takes.

    With a softcap `score_scale` is scale / softcap and `cap_log2` is softcap * log2(e); without, the former is
    scale * log2(e) and the latter unused.
    """
    if HAS_SOFTCAP:
        # exp2 saturates to 0 and inf at the ends, hence tanh to -1 and 1.
        tanh = 1.0 - 2.0 / (1.0 + tl.exp2(dots * (score_scale * 2.0 * LOG2_E)))
        scores = tanh * cap_log2
    else:
        tanh = dots
        scores = dots * score_scale
    return scores, tanh


@triton.jit
def visible_pairs(
    query_M,
    query_level_M,
    key_N,
    in_range_N,
    END,
    DEPTH,
    window,
    HAS_WINDOW: tl.constexpr,
):
    """Which queries see which keys of a range's tile."""
    # A key outside of the range ends before every query.
    end_N = tl.load(END + key_N, mask=in_range_N, other=0)
    visible = (key_N[None, :] <= query_M[:, None]) & (query_M[:, None] < end_N[None, :])
    if HAS_WINDOW:
        level_N = tl.load(DEPTH + key_N, mask=in_range_N, other=0)
        visible = visible & (query_level_M[:, None] - level_N[None, :] < window)
    return visible


def launch_metadata(matmul_columns: str, tensors: tuple[str, ...]) -> Any:
    """What a profiler shows of a launch; reads the device, but only while one listens.

    Args:
        matmul_columns: how often the head dim and the value dim enter a visible pair's products, as "DDVV".
        tensors: names of the arguments that are read or written, counted once each.
    """

    def describe(grid: Any, kernel: Any, args: dict[str, Any]) -> dict[str, Any]:
        visible = args["DEPTH"].long() + 1
        if args["HAS_WINDOW"]:
            visible = visible.clamp(max=args["window"])
        columns = sum(args["HEAD_DIM"] if letter == "D" else args["VALUE_DIM"] for letter in matmul_columns)
        q = args["Q"]
        return {
            "name": f"{kernel.name} N={q.shape[0]} H={q.shape[1]} D={args['HEAD_DIM']}:{args['VALUE_DIM']}",
            f"flops{8 * q.element_size()}": 2 * int(visible.sum()) * q.shape[1] * columns,
            "bytes": sum(args[name].numel() * args[name].element_size() for name in tensors),
        }

    return describe
