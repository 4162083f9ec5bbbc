"""Which keys each block of queries walks: lists of key ranges, built by tensor arithmetic on the plan's device.

The keys that a block of queries sees are the ancestors of its first token and the block's own tokens. In packed order
ancestors form few contiguous runs, so a block's list holds *ranges*, not blocks of keys: a chain is one range, whatever
its length. A kernel steps through a range from its first key, in tiles of `block_k` keys.

Nothing here depends on the forest's shape but one number, the length of the list. It is read once from the device,
or never when the caller gives a capacity.

Legend: N tokens, Q blocks of queries, R ranges, L list entries. A *chain* is a maximal stretch of the row in which each
token is the child of the one before it; within it `subtree_end` never rises.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class TreeSchedule:
    """The key ranges of every block of queries.

    Block b holds the tokens [b * block_q, (b + 1) * block_q). Its ranges are disjoint and cover every key that one of
    these sees within the window. All tiles of a *full* range are seen whole by the whole block; a *partial* range takes
    the mask, and keys past its end belong to another range or to nobody.

    Attributes:
        block_q: tokens of a block of queries.
        block_k: keys of a tile; the length of a full range is a multiple of it.
        range_ptr: (2Q + 1,) int32; block b has the full ranges [range_ptr[2b], range_ptr[2b + 1]) and the partial ones
            [range_ptr[2b + 1], range_ptr[2b + 2]).
        ranges: (R, 2) int32, first key and one past the last, as packed indices; R is what was allocated and
            range_ptr[-1] what is used.
        overflow: () bool; True where a given capacity was too small. Every block then walks its whole prefix of the
            row: slow, but still right.
    """

    block_q: int
    block_k: int
    range_ptr: Tensor
    ranges: Tensor
    overflow: Tensor


def build_schedule(
    subtree_end: Tensor,
    depth: Tensor,
    *,
    block_q: int,
    block_k: int,
    window: int | None = None,
    capacity: int | None = None,
) -> TreeSchedule:
    """List the key ranges of every block of `block_q` queries.

    Args:
        subtree_end: (N,) int32, N >= 1, as in `TreePlan`.
        depth: (N,) int32, likewise.
        block_q: tokens of a block of queries.
        block_k: keys of a tile.
        window: a query sees only the last `window` tokens of its path.
        capacity: list entries to allocate, at least ceil(N / block_q); then nothing is read from the device. None reads
            the number needed.

    Returns:
        The schedule, on the device of `subtree_end`.

    Raises:
        ValueError: `capacity` is below the number of blocks.
    """
    num_tokens = subtree_end.shape[0]
    num_blocks = -(-num_tokens // block_q)
    if capacity is not None and capacity < num_blocks:
        raise ValueError(f"capacity must be at least the {num_blocks} blocks of the row, got {capacity}")
    chains = _chains(subtree_end, depth)
    is_head_N = _heads(chains, block_k)
    block_start = torch.arange(0, num_blocks * block_q, block_q, device=depth.device)

    entries = _list_entries(chains, is_head_N, block_start, block_q, capacity)
    range_ptr, packed = _pack_ranges(entries, *_cut_ranges(chains, entries, block_start, block_q, block_k, window))
    if capacity is None:
        return TreeSchedule(block_q, block_k, range_ptr, packed, torch.zeros((), dtype=torch.bool, device=depth.device))
    overflow = entries.ptr[-1] > capacity
    whole_ptr = torch.arange(2 * num_blocks + 1, device=depth.device) // 2
    whole = torch.zeros_like(packed)
    whole[:num_blocks, 1] = (block_start + block_q).clamp(max=num_tokens)
    return TreeSchedule(
        block_q,
        block_k,
        torch.where(overflow, whole_ptr.int(), range_ptr),
        torch.where(overflow, whole, packed),
        overflow,
    )


def query_stops(subtree_end: Tensor, depth: Tensor, window: int | None) -> Tensor:
    """(N,) int32, one past the last query that sees each key: what bounds the walk of dK and dV.

    Every query from the key up to there is in the key's subtree. With a window some of them are too deep to see it.
    """
    if window is None:
        return subtree_end
    chains = _chains(subtree_end, depth)
    deepest = chains.level + window - 1
    last = chains.end - 1
    # Where the subtree's last path leaves the window, the last token at its edge is the last to see the key.
    cut = chains.last_at_level(deepest.clamp(max=len(last) - 1), chains.end)
    return (torch.where(chains.level[last] <= deepest, last, cut) + 1).int()


@dataclass(frozen=True, eq=False)
class _Chains:
    """Per token: subtree end, depth, the chain it lies on; and the tokens sorted by depth, all (N,) int64."""

    end: Tensor
    level: Tensor
    start: Tensor
    stop: Tensor
    sorted_levels: Tensor

    @property
    def num_tokens(self) -> int:
        return self.end.shape[0]

    def last_at_level(self, level: Tensor, before: Tensor) -> Tensor:
        """Index of the last token below `before` at depth `level`; -1 where `level` is negative."""
        rank = torch.searchsorted(self.sorted_levels, level * self.num_tokens + before) - 1
        token = self.sorted_levels[rank.clamp(min=0)] % self.num_tokens
        return torch.where(level < 0, -1, token)

    def first_unseen(self, start: Tensor, query: Tensor) -> Tensor:
        """First key on the chain from `start` whose subtree ends at `query` or before; else the chain's stop."""
        # Sorted, since within a chain the ends never rise.
        order = self.start * (self.num_tokens + 1) + self.num_tokens - self.end
        return torch.searchsorted(order, start * (self.num_tokens + 1) + self.num_tokens - query)


def _chains(subtree_end: Tensor, depth: Tensor) -> _Chains:
    num_tokens = depth.shape[0]
    level = depth.long()
    token = torch.arange(num_tokens, device=depth.device)
    starts = torch.ones(num_tokens, dtype=torch.bool, device=depth.device)
    starts[1:] = level[1:] != level[:-1] + 1
    start = torch.where(starts, token, 0).cummax(0).values
    next_start = torch.where(starts, token, num_tokens).flip(0).cummin(0).values.flip(0)
    stop = torch.cat([next_start[1:], next_start.new_full((1,), num_tokens)])
    return _Chains(subtree_end.long(), level, start, stop, (level * num_tokens + token).sort().values)


def _heads(chains: _Chains, block_k: int) -> Tensor:
    """(N,) bool: the tokens at which a range starts.

    A short chain close behind its parent continues the range instead: that costs its gap's keys, masked, and saves the
    tile that a range of its own begins. Without it the tokens of a comb would each be a range.
    """
    token = torch.arange(chains.num_tokens, device=chains.level.device)
    gap = token - chains.last_at_level(chains.level - 1, token) - 1
    continues = (chains.level > 0) & (gap <= block_k // 2) & (chains.stop - token <= 2 * block_k)
    return (chains.start == token) & ~continues


@dataclass(frozen=True, eq=False)
class _Entries:
    """The list: one entry a (block, range head) pair, sorted by block, then by head.

    Attributes:
        ptr: (Q + 1,) first entry of each block.
        block: (L,) block of each entry.
        start: (L,) first key.
        stop: (L,) one past the last key.
    """

    ptr: Tensor
    block: Tensor
    start: Tensor
    stop: Tensor


def _list_entries(
    chains: _Chains, is_head_N: Tensor, block_start: Tensor, block_q: int, capacity: int | None
) -> _Entries:
    num_tokens, device = chains.num_tokens, chains.level.device
    # A head is open from its own token to its subtree's end: its rank is the number of heads open before it.
    steps = torch.zeros(num_tokens + 1, dtype=torch.int64, device=device)
    steps[:num_tokens] = is_head_N
    steps.index_add_(0, chains.end, -is_head_N.long())
    open_N = steps.cumsum(0)[:num_tokens]
    ptr = torch.cat([open_N.new_zeros(1), open_N[block_start].cumsum(0)])
    length = int(ptr[-1]) if capacity is None else capacity

    # It is open at the starts of a contiguous run of blocks, so a running count numbers all pairs.
    token = torch.arange(num_tokens, device=device)
    first_block = (token + block_q - 1) // block_q
    count = torch.where(is_head_N, (chains.end + block_q - 1) // block_q - first_block, 0)
    counted = count.cumsum(0)
    pair = torch.arange(length, device=device)
    head = torch.searchsorted(counted, pair, right=True).clamp(max=num_tokens - 1)
    block = (first_block[head] + pair - (counted[head] - count[head])).clamp(max=len(block_start) - 1)
    # Entries past the list, or past the capacity, all go to one slot of rubbish.
    slot = torch.where(pair < ptr[-1], ptr[block] + open_N[head] - 1, length).clamp(max=length)
    start = torch.zeros(length + 1, dtype=torch.int64, device=device).scatter_(0, slot, head)

    block = torch.searchsorted(ptr[1:], pair, right=True).clamp(max=len(block_start) - 1)
    is_last = pair + 1 == ptr[block + 1]
    parent = chains.last_at_level(chains.level[start[1:]] - 1, start[1:])
    block_stop = (block_start[block] + block_q).clamp(max=num_tokens)
    # A range ends with the next one's parent; the last takes in the block itself.
    return _Entries(ptr, block, start[:-1], torch.where(is_last, block_stop, parent + 1))


def _cut_ranges(
    chains: _Chains, entries: _Entries, block_start: Tensor, block_q: int, block_k: int, window: int | None
) -> tuple[Tensor, Tensor]:
    """Cut each entry into a full range (L, 2) and the partial ones around it (L, P, 2); the empty ones included."""
    q_start = block_start[entries.block]
    q_last = (q_start + block_q).clamp(max=chains.num_tokens) - 1
    start, stop = entries.start, entries.stop
    full_start = start
    if window is not None:
        opens, full_opens = (first[entries.block] for first in _window_starts(chains, block_start, block_q, window))
        start = torch.maximum(start, torch.minimum(opens, stop))
        full_start = torch.maximum(start, full_opens)
    full_limit = torch.minimum(torch.minimum(chains.first_unseen(entries.start, q_last), stop), q_start)
    full_length = (full_limit - full_start).clamp(min=0) // block_k * block_k
    full_start = torch.where(full_length > 0, full_start, start)
    full_stop = full_start + full_length
    partial = [torch.stack([full_stop, stop], 1)]
    if window is not None:
        partial.insert(0, torch.stack([start, full_start], 1))
    return torch.stack([full_start, full_stop], 1), torch.stack(partial, 1)


def _window_starts(chains: _Chains, block_start: Tensor, block_q: int, window: int) -> tuple[Tensor, Tensor]:
    """First ancestor of each block's first token within the window of any of its queries, and of all; both (Q,)."""
    missing = -chains.num_tokens % block_q
    # The last token again changes neither extreme.
    levels = torch.cat([chains.level, chains.level[-1:].expand(missing)]).view(-1, block_q)
    first_of_any = chains.last_at_level(levels.amin(1) - window + 1, block_start + 1)
    level = levels.amax(1) - window + 1
    first_of_all = chains.last_at_level(level, block_start + 1)
    return first_of_any, torch.where(level > chains.level[block_start], block_start, first_of_all)


def _pack_ranges(entries: _Entries, full: Tensor, partial: Tensor) -> tuple[Tensor, Tensor]:
    """Drop the empty ranges and lay the others out block by block, full before partial."""
    length, per_entry, _ = partial.shape
    has_full, has_partial = full[:, 1] > full[:, 0], (partial[..., 1] > partial[..., 0]).flatten()
    full_before, partial_before = (torch.cat([h.new_zeros(1).long(), h.cumsum(0)]) for h in (has_full, has_partial))
    # A capacity that was too small leaves the list's last blocks without entries.
    ptr = entries.ptr.clamp(max=length)
    range_ptr = torch.empty(2 * len(ptr) - 1, dtype=torch.int64, device=ptr.device)
    range_ptr[::2] = full_before[ptr] + partial_before[per_entry * ptr]
    range_ptr[1::2] = full_before[ptr[1:]] + partial_before[per_entry * ptr[:-1]]

    size = (1 + per_entry) * length
    full_slot = full_before[:-1] + partial_before[per_entry * ptr[entries.block]]
    partial_slot = full_before[ptr[entries.block + 1]].repeat_interleave(per_entry) + partial_before[:-1]
    packed = torch.zeros(size + 1, 2, dtype=torch.int32, device=ptr.device)
    packed[torch.where(has_full, full_slot, size)] = full.int()
    packed[torch.where(has_partial, partial_slot, size)] = partial.flatten(0, 1).int()
    return range_ptr.int(), packed[:size]
