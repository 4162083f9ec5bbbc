"""Packing on a GPU, the kernels (launched by `pack.py`): exact, without a sort, a hash or a table of pairs.

A sequence shares its first nodes with earlier sequences and owns the rest, its *tail*; its *parent* owns the last node
it shares, and a copy of its parent owns nothing (`treepack.scoring.forest` has the rule). In depth-first pre-order a
tail is whole, and the tails that branch off it follow, the deepest branch first and equal depths in insertion order. So
the row is known once every tail's start is:

- `match_kernel`: what each sequence shares, and its parent;
- `size_kernel`: the tokens of each tail and all that descends from it;
- `branch_kernel`: how far each tail starts behind its parent's, and whether it cuts a new segment there;
- `place_kernel`: each tail's start, a sum along its parents, and the segments' ends;
- `segment_kernel`: the segments in packed order, each placed by counting those that end before it;
- `write_kernel`, `kv_index_kernel`: the row, the positions of every sequence in it, TRL's gather index.

Every count lies on the grid's first axis, offsets have 64 bits, and the only atomics are integer sums and maxima, so
results repeat.

Legend: B sequences (a block of them in suffixes), T tokens of a sequence, P tokens of all sequences, C segment ends
(the tails' first, then the cuts').
"""

import triton
import triton.language as tl

# What follows a sequence's last token; tokens are never negative.
END = tl.constexpr(-1)


@triton.jit
def agreed_tokens(TOKENS, a, a_length, b, b_length, BLOCK_T: tl.constexpr):
    """Tokens on which the sequences at `a` and `b` agree from their start; one more where both end there."""
    step_T = tl.arange(0, BLOCK_T).to(tl.int64)
    at = tl.cast(0, tl.int64)
    agreed = a_length + 1
    while at < agreed:
        place_T = at + step_T
        a_T = tl.load(TOKENS + a + place_T, mask=place_T < a_length, other=END)
        b_T = tl.load(TOKENS + b + place_T, mask=place_T < b_length, other=END)
        agreed = tl.min(tl.where(a_T != b_T, tl.minimum(place_T, agreed), agreed), 0)
        at += BLOCK_T
    return agreed


@triton.jit
def next_candidate(TOKENS, OFFSETS, start, length, place, first, after, stop, BLOCK_B: tl.constexpr):
    """First sequence of the block at `first`, past `after`, that has at `place` what the one at `start` has; or `stop`.

    Only those sequences can agree with it on more than `place` tokens: one load each spares most of the comparisons.
    """
    other_B = first + tl.arange(0, BLOCK_B)
    exists_B = (other_B > after) & (other_B < stop)
    start_B = tl.load(OFFSETS + other_B, mask=exists_B, other=0)
    stop_B = tl.load(OFFSETS + other_B + 1, mask=exists_B, other=0)
    token_B = tl.load(TOKENS + start_B + place, mask=exists_B & (start_B + place < stop_B), other=END)
    token = tl.load(TOKENS + start + place, mask=place < length, other=END)
    return tl.min(tl.where(exists_B & (token_B == token), other_B, stop), 0)


@triton.jit
def match_kernel(TOKENS, OFFSETS, SHARED, PARENT, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr):
    """Write SHARED (nodes that earlier sequences own) and PARENT (the first that owns the last of them). Grid: (B,)."""
    sequence = tl.program_id(0)
    start = tl.load(OFFSETS + sequence)
    length = tl.load(OFFSETS + sequence + 1) - start
    shared = tl.cast(0, tl.int64)
    parent = -1
    first = 0
    while (first < sequence) & (shared < length):
        # To share one node more, `shared + 2` tokens must agree: a node is a token and what follows it.
        other = next_candidate(TOKENS, OFFSETS, start, length, shared + 1, first, first - 1, sequence, BLOCK_B)
        while (other < sequence) & (shared < length):
            other_start = tl.load(OFFSETS + other)
            other_length = tl.load(OFFSETS + other + 1) - other_start
            agreed = agreed_tokens(TOKENS, start, length, other_start, other_length, BLOCK_T)
            parent = tl.where(agreed - 1 > shared, other, parent)
            shared = tl.maximum(agreed - 1, shared)
            other = next_candidate(TOKENS, OFFSETS, start, length, shared + 1, first, other, sequence, BLOCK_B)
        first += BLOCK_B
    tl.store(SHARED + sequence, shared)
    tl.store(PARENT + sequence, parent)


@triton.jit
def tail_lengths(OFFSETS, SHARED, sequence, exists):
    """Tokens that each sequence owns; 0 for one that does not exist."""
    start = tl.load(OFFSETS + sequence, mask=exists, other=0)
    stop = tl.load(OFFSETS + sequence + 1, mask=exists, other=0)
    return stop - start - tl.load(SHARED + sequence, mask=exists, other=0)


@triton.jit(do_not_specialize=["num_sequences"])
def size_kernel(OFFSETS, SHARED, PARENT, SIZE, num_sequences, BLOCK_B: tl.constexpr):
    """Add each tail's length to SIZE, zeros before, of its sequence and all its ancestors. Grid: (blocks of B,)."""
    sequence_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists_B = sequence_B < num_sequences
    tail_B = tail_lengths(OFFSETS, SHARED, sequence_B, exists_B)
    at_B = tl.where(exists_B, sequence_B, -1)
    while tl.max(at_B, 0) >= 0:
        tl.atomic_add(SIZE + at_B, tail_B, mask=at_B >= 0, sem="relaxed")
        at_B = tl.load(PARENT + at_B, mask=at_B >= 0, other=-1)


@triton.jit(do_not_specialize=["num_sequences"])
def branch_kernel(OFFSETS, SHARED, PARENT, SIZE, STEP, CUT, num_sequences, BLOCK_B: tl.constexpr):
    """Write STEP, a tail's start less its parent's, and CUT, the parent's tokens before the branch. Grid: (B,).

    CUT is -1 where no new segment ends there: at a root, at a copy, or where an earlier sequence branches off as well.
    """
    sequence = tl.program_id(0)
    shared = tl.load(SHARED + sequence)
    parent = tl.load(PARENT + sequence)
    before = tl.cast(0, tl.int64)
    twins = 0
    for first in range(0, num_sequences, BLOCK_B):
        other_B = first + tl.arange(0, BLOCK_B)
        exists_B = other_B < num_sequences
        siblings_B = exists_B & (tl.load(PARENT + other_B, mask=exists_B, other=-1) == parent)
        shared_B = tl.load(SHARED + other_B, mask=siblings_B, other=-1)
        size_B = tl.load(SIZE + other_B, mask=siblings_B, other=0)
        twins_B = siblings_B & (shared_B == shared) & (other_B < sequence)
        before += tl.sum(tl.where(twins_B | (shared_B > shared), size_B, 0), 0)
        twins += tl.sum(twins_B.to(tl.int32), 0)
    has_parent = parent >= 0
    before += tail_lengths(OFFSETS, SHARED, parent, has_parent)
    tl.store(STEP + sequence, before)
    cuts = has_parent & (twins == 0) & (tail_lengths(OFFSETS, SHARED, sequence, True) > 0)
    parent_shared = tl.load(SHARED + parent, mask=has_parent, other=0)
    tl.store(CUT + sequence, tl.where(cuts, shared - parent_shared, -1))


@triton.jit(do_not_specialize=["num_sequences"])
def place_kernel(
    OFFSETS, SHARED, PARENT, STEP, CUT, START, SEGMENT_STOP, PATH_LENGTH, num_sequences, BLOCK_B: tl.constexpr
):
    """Write each tail's START, and SEGMENT_STOP (-1 for none) and PATH_LENGTH of each end. Grid: (blocks of B,)."""
    sequence_B = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    exists_B = sequence_B < num_sequences
    start_B = tl.zeros((BLOCK_B,), tl.int64)
    at_B = tl.where(exists_B, sequence_B, -1)
    while tl.max(at_B, 0) >= 0:
        start_B += tl.load(STEP + at_B, mask=at_B >= 0, other=0)
        at_B = tl.load(PARENT + at_B, mask=at_B >= 0, other=-1)
    tl.store(START + sequence_B, start_B, mask=exists_B)

    shared_B = tl.load(SHARED + sequence_B, mask=exists_B, other=0)
    tail_B = tail_lengths(OFFSETS, SHARED, sequence_B, exists_B)
    tl.store(SEGMENT_STOP + sequence_B, tl.where(tail_B > 0, start_B + tail_B, -1), mask=exists_B)
    tl.store(PATH_LENGTH + sequence_B, shared_B + tail_B, mask=exists_B)

    cut_B = tl.load(CUT + sequence_B, mask=exists_B, other=-1)
    parent_start_B = start_B - tl.load(STEP + sequence_B, mask=exists_B, other=0)
    end_B = num_sequences + sequence_B
    tl.store(SEGMENT_STOP + end_B, tl.where(cut_B >= 0, parent_start_B + cut_B, -1), mask=exists_B)
    tl.store(PATH_LENGTH + end_B, shared_B, mask=exists_B)


@triton.jit(do_not_specialize=["num_sequences"])
def segment_kernel(PARENT, SEGMENT_STOP, PATH_LENGTH, CU_Q, CU_K, OWNER, TOTALS, num_sequences, BLOCK_B: tl.constexpr):
    """Write the segments' bounds and owners in packed order, and TOTALS, zeros before. Grid: (C,).

    TOTALS: tokens, keys of all segments, bounds (segments + 1), the longest segment.
    """
    end = tl.program_id(0)
    stop = tl.load(SEGMENT_STOP + end)
    if stop >= 0:
        segment = tl.cast(0, tl.int64)
        keys = tl.load(PATH_LENGTH + end)
        start = tl.cast(0, tl.int64)
        for first in range(0, 2 * num_sequences, BLOCK_B):
            other_B = first + tl.arange(0, BLOCK_B)
            exists_B = other_B < 2 * num_sequences
            stop_B = tl.load(SEGMENT_STOP + other_B, mask=exists_B, other=-1)
            before_B = (stop_B >= 0) & (stop_B < stop)
            segment += tl.sum(before_B.to(tl.int64), 0)
            keys += tl.sum(tl.load(PATH_LENGTH + other_B, mask=before_B, other=0), 0)
            start = tl.maximum(start, tl.max(tl.where(before_B, stop_B, 0), 0))
        tl.store(CU_Q + segment + 1, stop.to(tl.int32))
        tl.store(CU_K + segment + 1, keys.to(tl.int32))
        is_cut = end >= num_sequences
        tl.store(OWNER + segment, tl.load(PARENT + end - num_sequences, mask=is_cut, other=end))
        tl.atomic_max(TOTALS, stop, sem="relaxed")
        tl.atomic_max(TOTALS + 1, keys, sem="relaxed")
        tl.atomic_max(TOTALS + 2, segment + 2, sem="relaxed")
        tl.atomic_max(TOTALS + 3, stop - start, sem="relaxed")


@triton.jit
def find_interval(BOUNDS, num_intervals, value):
    """The interval of the rising BOUNDS that each value lies in; the last for values past the end."""
    interval = (value * 0).to(tl.int32)
    remaining = num_intervals
    while remaining > 1:
        half = remaining // 2
        interval += tl.where(tl.load(BOUNDS + interval + half) <= value, half, 0)
        remaining -= half
    return interval


@triton.jit
def packed_index(SHARED, PARENT, START, sequence, depth):
    """Where in the row each sequence's token at `depth` lies, and whether the sequence itself owns it."""
    shared = tl.load(SHARED + sequence)
    owned = depth >= shared
    while tl.max((depth < shared).to(tl.int32), 0) > 0:
        sequence = tl.where(depth < shared, tl.load(PARENT + sequence), sequence)
        shared = tl.load(SHARED + sequence)
    return tl.load(START + sequence) + depth - shared, owned


@triton.jit(do_not_specialize=["num_sequences", "capacity"])
def write_kernel(
    TOKENS,
    OFFSETS,
    SHARED,
    PARENT,
    START,
    INPUT_IDS,
    POSITION_IDS,
    POSITIONS,
    num_sequences,
    capacity,
    BLOCK_P: tl.constexpr,
):
    """Write every token's packed index, and each owned token and its depth up to `capacity`. Grid: (blocks of P,)."""
    flat_P = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    exists_P = flat_P < tl.load(OFFSETS + num_sequences)
    sequence_P = find_interval(OFFSETS, num_sequences, flat_P)
    depth_P = flat_P - tl.load(OFFSETS + sequence_P)
    index_P, owned_P = packed_index(SHARED, PARENT, START, sequence_P, depth_P)
    tl.store(POSITIONS + flat_P, index_P, mask=exists_P)
    written_P = exists_P & owned_P & (index_P < capacity)
    tl.store(INPUT_IDS + index_P, tl.load(TOKENS + flat_P, mask=written_P, other=0), mask=written_P)
    tl.store(POSITION_IDS + index_P, depth_P, mask=written_P)


@triton.jit(do_not_specialize=["num_segments"])
def kv_index_kernel(SHARED, PARENT, START, OWNER, CU_K, KV_INDEX, num_segments, BLOCK_P: tl.constexpr):
    """Write the root path of every segment, end to end. Grid: (blocks of keys,)."""
    flat_P = tl.program_id(0).to(tl.int64) * BLOCK_P + tl.arange(0, BLOCK_P)
    segment_P = find_interval(CU_K, num_segments, flat_P)
    depth_P = flat_P - tl.load(CU_K + segment_P)
    index_P, _ = packed_index(SHARED, PARENT, START, tl.load(OWNER + segment_P), depth_P)
    tl.store(KV_INDEX + flat_P, index_P, mask=flat_P < tl.load(CU_K + num_segments))
