"""Tree attention, backward, in Triton (launched by `gpu.py`): three kernels, every sum in a fixed order.

`prepare_kernel` computes what every score's gradient subtracts. `key_kernel` (dK, dV) needs no list: the queries that
see a key lie between it and its subtree's end, so a tile of keys walks one contiguous stretch of the row, with all
query heads of the group inside. `query_kernel` (dQ) walks the forward's key ranges.

With P the weights normalised with the sinks and dP = dO V^T, the scores' gradient is P * (dP - delta), where
delta = sum_V dO * O - dlse * exp(norm - lse): `lse` excludes the sinks, `norm` is the log of the whole denominator.

Legend: M rows of a query tile, N keys of a tile, D and E the column blocks of the head dim, V and W those of the value
dim (`triton_tiles.py`).
"""

import triton
import triton.language as tl

from treepack.kernels.triton_tiles import (
    LOG2_E,
    launch_metadata,
    load_tile,
    log2_scores,
    packed_rows,
    store_tile,
    visible_pairs,
)


@triton.jit(do_not_specialize=["num_tokens"])
def prepare_kernel(
    OUT,
    GRAD_OUT,
    LSE,
    GRAD_LSE,
    SINKS,
    NORM,
    DELTA,
    SINK_SUMS,
    out_token,
    out_head,
    grad_token,
    grad_head,
    num_tokens,
    VALUE_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_GRAD_LSE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Write NORM (log2 of the denominator), DELTA, both (H, N), and sinks' gradients per block. Grid: (blocks, H)."""
    head = tl.program_id(1).to(tl.int64)
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    exists = token < num_tokens
    row = token.to(tl.int64)
    out = load_tile(OUT + head * out_head, row * out_token, exists, 0, WIDTH, VALUE_DIM, True)
    grad = load_tile(GRAD_OUT + head * grad_head, row * grad_token, exists, 0, WIDTH, VALUE_DIM, True)
    delta = tl.sum(out.to(tl.float32) * grad.to(tl.float32), 1)
    entry = head * num_tokens + token
    lse = tl.load(LSE + entry, mask=exists, other=0.0) * LOG2_E
    norm = lse
    if HAS_SINKS:
        sink = tl.load(SINKS + head).to(tl.float32) * LOG2_E
        top = tl.maximum(lse, sink)
        norm = top + tl.log2(tl.exp2(lse - top) + tl.exp2(sink - top))
        share = tl.where(exists, tl.exp2(sink - norm) * delta, 0.0)
        tl.store(SINK_SUMS + head * tl.num_programs(0) + tl.program_id(0), -tl.sum(share, 0))
    if HAS_GRAD_LSE:
        delta -= tl.load(GRAD_LSE + entry, mask=exists, other=0.0) * tl.exp2(norm - lse)
    tl.store(NORM + entry, norm, mask=exists)
    tl.store(DELTA + entry, delta, mask=exists)


@triton.jit(
    do_not_specialize=["num_tokens", "window"],
    launch_metadata=launch_metadata("DDVV", ("Q", "K", "V", "GRAD_OUT", "NORM", "DELTA", "GRAD_K", "GRAD_V")),
)
def key_kernel(
    Q,
    K,
    V,
    GRAD_OUT,
    NORM,
    DELTA,
    GRAD_K,
    GRAD_V,
    END,
    DEPTH,
    QUERY_STOP,
    q_token,
    q_head,
    k_token,
    k_head,
    v_token,
    v_head,
    grad_token,
    grad_head,
    dk_token,
    dk_head,
    dv_token,
    dv_head,
    num_tokens,
    window,
    scale,
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
    PRECISION: tl.constexpr,
):
    """Gradients of one tile of keys and values. Grid: (tiles of keys, kv heads)."""
    first_key = tl.program_id(0) * BLOCK_N
    kv_head = tl.program_id(1)
    key_N = first_key + tl.arange(0, BLOCK_N)
    exists_N = key_N < num_tokens
    key_row_N = key_N.to(tl.int64)
    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head
    k_ND = load_tile(K, key_row_N * k_token, exists_N, 0, D, HEAD_DIM, True)
    v_NV = load_tile(V, key_row_N * v_token, exists_N, 0, VD, VALUE_DIM, True)
    grad_k_ND = tl.zeros([BLOCK_N, D], tl.float32)
    grad_v_NV = tl.zeros([BLOCK_N, VD], tl.float32)
    k_NE, grad_k_NE, v_NW, grad_v_NW = k_ND, grad_k_ND, v_NV, grad_v_NV
    if E > 0:
        k_NE = load_tile(K, key_row_N * k_token, exists_N, D, E, HEAD_DIM, True)
        grad_k_NE = tl.zeros([BLOCK_N, E], tl.float32)
    if VE > 0:
        v_NW = load_tile(V, key_row_N * v_token, exists_N, VD, VE, VALUE_DIM, True)
        grad_v_NW = tl.zeros([BLOCK_N, VE], tl.float32)
    end_N = tl.load(END + key_N, mask=exists_N, other=0)
    query_stop = tl.max(tl.load(QUERY_STOP + key_N, mask=exists_N, other=0), 0)
    length_N = (end_N - key_N).to(tl.uint32, bitcast=True)
    level_N = end_N
    if HAS_WINDOW:
        level_N = tl.load(DEPTH + key_N, mask=exists_N, other=0)

    first_head = kv_head.to(tl.int64) * GROUP
    Q += first_head * q_head
    GRAD_OUT += first_head * grad_head
    NORM += first_head * num_tokens
    DELTA += first_head * num_tokens
    for chunk in range(0, (GROUP + PACK - 1) // PACK):
        local_M, head_M, in_group_M = packed_rows(chunk, GROUP, PACK, BLOCK_M)
        head_M = tl.where(in_group_M, head_M, 0)
        for first_query in range(first_key, query_stop, BLOCK_M // PACK):
            # A missing row reads another's values and sees no key. Masks of its loads would take the registers that
            # decide whether 64 keys fit one warpgroup.
            query_M = tl.where(in_group_M, first_query + local_M, -1)
            row_M = tl.minimum(first_query + local_M, num_tokens - 1)
            q_offset_M = row_M.to(tl.int64) * q_token + head_M * q_head
            grad_offset_M = row_M.to(tl.int64) * grad_token + head_M * grad_head
            q_MD = load_tile(Q, q_offset_M, in_group_M, 0, D, HEAD_DIM, False)
            grad_MV = load_tile(GRAD_OUT, grad_offset_M, in_group_M, 0, VD, VALUE_DIM, False)
            norm_M = tl.load(NORM + head_M * num_tokens + row_M)
            delta_M = tl.load(DELTA + head_M * num_tokens + row_M)
            dots = tl.dot(k_ND, tl.trans(q_MD), input_precision=PRECISION)
            if E > 0:
                q_ME = load_tile(Q, q_offset_M, in_group_M, D, E, HEAD_DIM, False)
                dots = tl.dot(k_NE, tl.trans(q_ME), dots, input_precision=PRECISION)
            scores, tanh = log2_scores(dots, score_scale, cap_log2, HAS_SOFTCAP)
            # key <= query < end in one comparison: what is negative is large without its sign.
            seen = (query_M[None, :] - key_N[:, None]).to(tl.uint32, bitcast=True) < length_N[:, None]
            if HAS_WINDOW:
                level_M = tl.load(DEPTH + row_M)
                seen = seen & (level_M[None, :] - level_N[:, None] < window)
            weights = tl.where(seen, tl.exp2(scores - norm_M[None, :]), 0.0)
            slopes = weights
            if HAS_SOFTCAP:
                slopes = weights * (1.0 - tanh * tanh)
            grad_v_NV = tl.dot(weights.to(grad_MV.dtype), grad_MV, grad_v_NV, input_precision=PRECISION)
            grad_weights = tl.dot(v_NV, tl.trans(grad_MV), input_precision=PRECISION)
            if VE > 0:
                grad_MW = load_tile(GRAD_OUT, grad_offset_M, in_group_M, VD, VE, VALUE_DIM, False)
                grad_v_NW = tl.dot(weights.to(grad_MW.dtype), grad_MW, grad_v_NW, input_precision=PRECISION)
                grad_weights = tl.dot(v_NW, tl.trans(grad_MW), grad_weights, input_precision=PRECISION)
            grad_scores = (slopes * (grad_weights - delta_M[None, :])).to(q_MD.dtype)
            grad_k_ND = tl.dot(grad_scores, q_MD, grad_k_ND, input_precision=PRECISION)
            if E > 0:
                grad_k_NE = tl.dot(grad_scores, q_ME, grad_k_NE, input_precision=PRECISION)

    GRAD_K += kv_head.to(tl.int64) * dk_head
    GRAD_V += kv_head.to(tl.int64) * dv_head
    store_tile(GRAD_K, key_row_N * dk_token, exists_N, grad_k_ND * scale, 0, D, HEAD_DIM)
    store_tile(GRAD_V, key_row_N * dv_token, exists_N, grad_v_NV, 0, VD, VALUE_DIM)
    if E > 0:
        store_tile(GRAD_K, key_row_N * dk_token, exists_N, grad_k_NE * scale, D, E, HEAD_DIM)
    if VE > 0:
        store_tile(GRAD_V, key_row_N * dv_token, exists_N, grad_v_NW, VD, VE, VALUE_DIM)


@triton.jit
def _query_tile(
    grad_q_MD,
    grad_q_ME,
    q_MD,
    q_ME,
    grad_MV,
    grad_MW,
    norm_M,
    delta_M,
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
    """Add one tile of keys to dQ."""
    local_N = tl.arange(0, BLOCK_N)
    in_range_N = first_key + local_N < range_stop
    K += tl.cast(first_key, tl.int64) * k_token
    V += tl.cast(first_key, tl.int64) * v_token
    k_ND = load_tile(K, local_N * k_token, in_range_N, 0, D, HEAD_DIM, MASKED)
    v_NV = load_tile(V, local_N * v_token, in_range_N, 0, VD, VALUE_DIM, MASKED)
    dots = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    grad_weights = tl.dot(grad_MV, tl.trans(v_NV), input_precision=PRECISION)
    if E > 0:
        k_NE = load_tile(K, local_N * k_token, in_range_N, D, E, HEAD_DIM, MASKED)
        dots = tl.dot(q_ME, tl.trans(k_NE), dots, input_precision=PRECISION)
    if VE > 0:
        v_NW = load_tile(V, local_N * v_token, in_range_N, VD, VE, VALUE_DIM, MASKED)
        grad_weights = tl.dot(grad_MW, tl.trans(v_NW), grad_weights, input_precision=PRECISION)
    scores, tanh = log2_scores(dots, score_scale, cap_log2, HAS_SOFTCAP)
    weights = tl.exp2(scores - norm_M[:, None])
    if MASKED:
        seen = visible_pairs(query_M, query_level_M, first_key + local_N, in_range_N, END, DEPTH, window, HAS_WINDOW)
        weights = tl.where(seen, weights, 0.0)
    grad_scores = weights * (grad_weights - delta_M[:, None])
    if HAS_SOFTCAP:
        grad_scores *= 1.0 - tanh * tanh
    grad_scores = grad_scores.to(k_ND.dtype)
    grad_q_MD = tl.dot(grad_scores, k_ND, grad_q_MD, input_precision=PRECISION)
    if E > 0:
        grad_q_ME = tl.dot(grad_scores, k_NE, grad_q_ME, input_precision=PRECISION)
    return grad_q_MD, grad_q_ME


@triton.jit(
    do_not_specialize=["num_tokens", "window"],
    launch_metadata=launch_metadata("DDV", ("Q", "K", "V", "GRAD_OUT", "NORM", "DELTA", "GRAD_Q")),
)
def query_kernel(
    Q,
    K,
    V,
    GRAD_OUT,
    NORM,
    DELTA,
    GRAD_Q,
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
    grad_token,
    grad_head,
    dq_token,
    dq_head,
    num_tokens,
    window,
    scale,
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
    PRECISION: tl.constexpr,
):
    """Gradient of one tile of query rows. Grid: (blocks of queries, kv heads x chunks of the group), as forward."""
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
    row_M = query_M.to(tl.int64)
    q_offset_M = row_M * q_token + head_M * q_head
    grad_offset_M = row_M * grad_token + head_M * grad_head
    q_MD = load_tile(Q, q_offset_M, exists_M, 0, D, HEAD_DIM, True)
    grad_MV = load_tile(GRAD_OUT, grad_offset_M, exists_M, 0, VD, VALUE_DIM, True)
    grad_q_MD = tl.zeros([BLOCK_M, D], tl.float32)
    q_ME, grad_MW, grad_q_ME = q_MD, grad_MV, grad_q_MD
    if E > 0:
        q_ME = load_tile(Q, q_offset_M, exists_M, D, E, HEAD_DIM, True)
        grad_q_ME = tl.zeros([BLOCK_M, E], tl.float32)
    if VE > 0:
        grad_MW = load_tile(GRAD_OUT, grad_offset_M, exists_M, VD, VE, VALUE_DIM, True)
    norm_M = tl.load(NORM + head_M * num_tokens + query_M, mask=exists_M, other=0.0)
    delta_M = tl.load(DELTA + head_M * num_tokens + query_M, mask=exists_M, other=0.0)
    K += kv_head.to(tl.int64) * k_head
    V += kv_head.to(tl.int64) * v_head

    first_full = tl.load(RANGE_PTR + 2 * block)
    first_partial = tl.load(RANGE_PTR + 2 * block + 1)
    stop_partial = tl.load(RANGE_PTR + 2 * block + 2)
    for entry in range(first_full, first_partial):
        range_start = tl.load(RANGES + 2 * entry)
        range_stop = tl.load(RANGES + 2 * entry + 1)
        for first_key in range(range_start, range_stop, BLOCK_N):
            grad_q_MD, grad_q_ME = _query_tile(
                grad_q_MD, grad_q_ME, q_MD, q_ME, grad_MV, grad_MW, norm_M, delta_M, K, V, k_token, v_token,
                first_key, range_stop, query_M, query_level_M, END, DEPTH, score_scale, cap_log2, window,
                HEAD_DIM, VALUE_DIM, D, E, VD, VE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, False, PRECISION,
            )  # fmt: skip
    for entry in range(first_partial, stop_partial):
        range_start = tl.load(RANGES + 2 * entry)
        range_stop = tl.load(RANGES + 2 * entry + 1)
        for first_key in range(range_start, range_stop, BLOCK_N):
            grad_q_MD, grad_q_ME = _query_tile(
                grad_q_MD, grad_q_ME, q_MD, q_ME, grad_MV, grad_MW, norm_M, delta_M, K, V, k_token, v_token,
                first_key, range_stop, query_M, query_level_M, END, DEPTH, score_scale, cap_log2, window,
                HEAD_DIM, VALUE_DIM, D, E, VD, VE, BLOCK_N, HAS_WINDOW, HAS_SOFTCAP, True, PRECISION,
            )  # fmt: skip

    dq_offset_M = row_M * dq_token + head_M * dq_head
    store_tile(GRAD_Q, dq_offset_M, exists_M, grad_q_MD * scale, 0, D, HEAD_DIM)
    if E > 0:
        store_tile(GRAD_Q, dq_offset_M, exists_M, grad_q_ME * scale, D, E, HEAD_DIM)
