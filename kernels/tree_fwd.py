"""Tree attention, forward, in Triton (launched by `gpu.py`).

One program computes one tile of query rows: BLOCK_M // PACK tokens times the PACK query heads that share a kv head, so
that each key is loaded once for all of them. It walks its block's key ranges (`schedule.py`): the full ones without a
mask, the partial ones with it. Tiles start where a range starts, not at multiples of their size.

The softmax is FlashAttention's (Dao et al., 2022) with base-2 exponentials. Sinks join the denominator at the very
end, so the log-sum-exp excludes them.

Legend: M rows of a query tile, N keys of a tile, D and E the column blocks of the head dim, V and W those of the value
dim (`triton_tiles.py`).
"""

import triton
import triton.language as tl

from treepack.kernels.triton_tiles import (
    LN_2,
    LOG2_E,
    launch_metadata,
    load_tile,
    log2_scores,
    packed_rows,
    store_tile,
    visible_pairs,
)


@triton.jit
def _attend_tile(
    out_MV,
    out_MW,
    total_M,
    peak_M,
    q_MD,
    q_ME,
    K,
    V,
    k_token,
    v_token,
    first_key,
    range_stop,
    query_M,
    query_level_M,
    END,
    DEPTH,
    score_scale,
    cap_log2,
    window,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VD: tl.constexpr,
    VE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    MASKED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Take one tile of keys into the running softmax: unnormalised output, its total, and the largest score so far."""
    local_N = tl.arange(0, BLOCK_N)
    in_range_N = first_key + local_N < range_stop
    K += tl.cast(first_key, tl.int64) * k_token
    V += tl.cast(first_key, tl.int64) * v_token
    k_ND = load_tile(K, local_N * k_token, in_range_N, 0, D, HEAD_DIM, MASKED)
    dots = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    if E > 0:
        k_NE = load_tile(K, local_N * k_token, in_range_N, D, E, HEAD_DIM, MASKED)
        dots = tl.dot(q_ME, tl.trans(k_NE), dots, input_precision=PRECISION)
    scores, _ = log2_scores(dots, score_scale, cap_log2, HAS_SOFTCAP)
    if MASKED:
        seen = visible_pairs(query_M, query_level_M, first_key + local_N, in_range_N, END, DEPTH, window, HAS_WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
    new_peak_M = tl.maximum(peak_M, tl.max(scores, 1))
    shift_M = new_peak_M
    if MASKED:
        # A row that has seen no key yet subtracts 0, so that its weights are 0 and not NaN.
        shift_M = tl.where(new_peak_M == float("-inf"), 0.0, new_peak_M)
    weights = tl.exp2(scores - shift_M[:, None])
    rescale_M = tl.exp2(peak_M - shift_M)
    total_M = total_M * rescale_M + tl.sum(weights, 1)
    v_NV = load_tile(V, local_N * v_token, in_range_N, 0, VD, VALUE_DIM, MASKED)
    weights = weights.to(v_NV.dtype)
    out_MV = tl.dot(weights, v_NV, out_MV * rescale_M[:, None], input_precision=PRECISION)
    if VE > 0:
        v_NW = load_tile(V, local_N * v_token, in_range_N, VD, VE, VALUE_DIM, MASKED)
        out_MW = tl.dot(weights, v_NW, out_MW * rescale_M[:, None], input_precision=PRECISION)
    return out_MV, out_MW, total_M, new_peak_M


@triton.jit(
    do_not_specialize=["num_tokens", "window"],
    launch_metadata=launch_metadata("DV", ("Q", "K", "V", "OUT", "LSE")),
)
def forward_kernel(
    Q,
    K,
    V,
    SINKS,
    OUT,
    LSE,
    END,
    DEPTH,
    RANGE_PTR,
    RANGES,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    out_token,
    out_head,
    num_tokens,
    window,
    score_scale,
    cap_log2,
    GROUP: tl.constexpr,
    PACK: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    VD: tl.constexpr,
    VE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Grid: (blocks of queries, kv heads x chunks of the group)."""
    # Later blocks have the longer paths: they start first.
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    chunks: tl.constexpr = (GROUP + PACK - 1) // PACK
    kv_head = tl.program_id(1) // chunks
    local_M, head_M, exists_M = packed_rows(tl.program_id(1) % chunks, GROUP, PACK, BLOCK_M)
    head_M = head_M + kv_head.to(tl.int64) * GROUP
    query_M = block * (BLOCK_M // PACK) + local_M
    exists_M = exists_M & (query_M < num_tokens)
    query_level_M = query_M
    if HAS_WINDOW:
        query_level_M = tl.load(DEPTH + query_M, mask=exists_M, other=0)
    q_offset_M = query_M.to(tl.int64) * q_token + head_M * q_head
    q_MD = load_tile(Q, q_offset_M, exists_M, 0, D, HEAD_DIM, True)
    q_ME = q_MD
    if E > 0:
        q_ME = load_tile(Q, q_offset_M, exists_M, D, E, HEAD_DIM, True)
    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head

    out_MV = tl.zeros([BLOCK_M, VD], tl.float32)
    out_MW = out_MV
    if VE > 0:
        out_MW = tl.zeros([BLOCK_M, VE], tl.float32)
    total_M = tl.zeros([BLOCK_M], tl.float32)
    peak_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    first_full = tl.load(RANGE_PTR + 2 * block)
    first_partial = tl.load(RANGE_PTR + 2 * block + 1)
    stop_partial = tl.load(RANGE_PTR + 2 * block + 2)
    for entry in range(first_full, first_partial):
        range_start = tl.load(RANGES + 2 * entry)
        range_stop = tl.load(RANGES + 2 * entry + 1)
        for first_key in range(range_start, range_stop, BLOCK_N):
            out_MV, out_MW, total_M, peak_M = _attend_tile(
                out_MV, out_MW, total_M, peak_M, q_MD, q_ME, K, V, k_token, v_token, first_key, range_stop,
                query_M, query_level_M, END, DEPTH, score_scale, cap_log2, window,
                HEAD_DIM, VALUE_DIM, D, E, VD, VE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False, PRECISION,
            )  # fmt: skip
    for entry in range(first_partial, stop_partial):
        range_start = tl.load(RANGES + 2 * entry)
        range_stop = tl.load(RANGES + 2 * entry + 1)
        for first_key in range(range_start, range_stop, BLOCK_N):
            out_MV, out_MW, total_M, peak_M = _attend_tile(
                out_MV, out_MW, total_M, peak_M, q_MD, q_ME, K, V, k_token, v_token, first_key, range_stop,
                query_M, query_level_M, END, DEPTH, score_scale, cap_log2, window,
                HEAD_DIM, VALUE_DIM, D, E, VD, VE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION,
            )  # fmt: skip

    # Missing rows have seen nothing; they are not stored.
    total_M = tl.where(exists_M, total_M, 1.0)
    tl.store(LSE + head_M * num_tokens + query_M, (peak_M + tl.log2(total_M)) * LN_2, mask=exists_M)
    norm_M = 1.0 / total_M
    if HAS_SINKS:
        sink_M = tl.load(SINKS + head_M, mask=exists_M, other=0.0).to(tl.float32) * LOG2_E
        # Relative to the larger of both, so that neither exponential overflows.
        top_M = tl.maximum(peak_M, sink_M)
        share_M = tl.exp2(peak_M - top_M)
        norm_M = share_M / (total_M * share_M + tl.exp2(sink_M - top_M))
    out_offset_M = query_M.to(tl.int64) * out_token + head_M * out_head
    store_tile(OUT, out_offset_M, exists_M, out_MV * norm_M[:, None], 0, VD, VALUE_DIM)
    if VE > 0:
        store_tile(OUT, out_offset_M, exists_M, out_MW * norm_M[:, None], VD, VE, VALUE_DIM)
