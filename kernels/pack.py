"""Packing sequences that lie on a GPU, there: what `treepack.scoring.forest` does on a CPU, bit for bit.

The layout of the row takes memory linear in the number of sequences; the tokens are read once to find what is shared
and once to be written. One small tensor is read from the device, the row's sizes, or none where a capacity is given.

Legend: B sequences, P tokens of all sequences, N unique tokens, S segments, K keys of all segments.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treepack.kernels.pack_kernels import (
    branch_kernel,
    kv_index_kernel,
    match_kernel,
    place_kernel,
    segment_kernel,
    size_kernel,
    write_kernel,
)

INT32_MAX = 2**31 - 1

# Fusion is pinned since Triton's default differs between versions, and it warns.
_OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": True}


@dataclass(frozen=True)
class PackTile:
    """Launch sizes.

    Attributes:
        sequences: looked at together.
        tokens: of a sequence, compared together.
        written: tokens that a program writes.
    """

    sequences: int = 128
    tokens: int = 1024
    written: int = 512


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where everything goes; on the device.

    Attributes:
        offsets: (B + 1,) int64, where each sequence starts among all tokens.
        shared: (B,) int64, nodes that earlier sequences own.
        parent: (B,) int32, the sequence that owns the last of these, -1 when there is none.
        start: (B,) int64, packed index of each tail's first token.
        cu_seqlens_q: (2B + 1,) int32, the segments' bounds, zeros past the last.
        cu_seqlens_k: (2B + 1,) int32, the same of their root paths.
        owner: (2B,) int32, the sequence whose tail each segment is part of.
        totals: (4,) int64: N, K, S + 1, the longest segment.
    """

    offsets: Tensor
    shared: Tensor
    parent: Tensor
    start: Tensor
    cu_seqlens_q: Tensor
    cu_seqlens_k: Tensor
    owner: Tensor
    totals: Tensor


def pack_tokens(
    tokens: Tensor,
    lengths: Sequence[int],
    *,
    share_prefixes: bool,
    kv_index: bool,
    capacity: int | None,
    tile: PackTile = PackTile(),
) -> dict[str, Tensor]:
    """Tree-pack sequences into one row.

    Args:
        tokens: (P,) int64, P >= 1, the sequences laid end to end.
        lengths: of the B sequences, each >= 1.
        share_prefixes: False packs each sequence as a chain of its own.
        kv_index: False leaves `tree_kv_index` empty.
        capacity: tokens to allocate for the row, None for as many as it has; only without `kv_index`.
        tile: launch sizes.

    Returns:
        As `treepack.pack_sequences`, on the device of `tokens`.

    Raises:
        ValueError: a negative token, or more than 2^31 - 1 packed tokens or keys; not found with a capacity.
    """
    assert capacity is None or not kv_index
    layout = _lay_out(tokens, _offsets(lengths, tokens.device), share_prefixes=share_prefixes, tile=tile)
    tree_kv_index = tokens.new_empty(0)
    if capacity is None:
        num_tokens, num_keys, num_bounds = _read_sizes(layout, tokens)
        input_ids, position_ids = (tokens.new_empty(num_tokens) for _ in range(2))
        cu_seqlens_q, cu_seqlens_k = layout.cu_seqlens_q[:num_bounds], layout.cu_seqlens_k[:num_bounds]
        if kv_index:
            tree_kv_index = _kv_index(layout, num_bounds - 1, num_keys, tile)
    else:
        # Zeros past a row's end are roots of one token each, which nothing else sees.
        input_ids, position_ids = (tokens.new_zeros(capacity) for _ in range(2))
        cu_seqlens_q, cu_seqlens_k = (cu.cummax(0).values for cu in (layout.cu_seqlens_q, layout.cu_seqlens_k))
    positions = _write_row(tokens, layout, input_ids, position_ids, tile)
    return {
        "input_ids": input_ids,
        "position_ids": position_ids,
        "positions": positions,
        "offsets": layout.offsets,
        "tree_kv_index": tree_kv_index,
        "sizes": _sizes(layout, kv_index),
        "tree_cu_seqlens_q": cu_seqlens_q,
        "tree_cu_seqlens_k": cu_seqlens_k,
        "tree_max_seqlens": torch.stack([layout.totals[3], torch.full_like(layout.totals[3], max(lengths))]),
    }


def _sizes(layout: _Layout, kv_index: bool) -> Tensor:
    num_tokens, num_keys, num_bounds, _ = layout.totals
    num_offsets = torch.full_like(num_bounds, len(layout.offsets))
    return torch.stack([num_tokens, num_keys * kv_index, num_bounds, num_offsets])


def _offsets(lengths: Sequence[int], device: torch.device) -> Tensor:
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    # From pinned memory, or the copy would wait for everything under way.
    return offsets.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else offsets.to(device)


def _lay_out(tokens: Tensor, offsets: Tensor, *, share_prefixes: bool, tile: PackTile) -> _Layout:
    num_sequences = len(offsets) - 1
    grid, block_grid = (num_sequences,), (-(-num_sequences // tile.sequences),)
    shared, size = (torch.zeros_like(offsets[1:]) for _ in range(2))
    parent = torch.full_like(shared, -1, dtype=torch.int32)
    step, cut, start = (torch.empty_like(shared) for _ in range(3))
    segment_stop, path_length = (shared.new_empty(2 * num_sequences) for _ in range(2))
    cu_seqlens_q, cu_seqlens_k = (parent.new_zeros(2 * num_sequences + 1) for _ in range(2))
    owner = parent.new_empty(2 * num_sequences)
    totals = shared.new_zeros(4)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        if share_prefixes:
            match_kernel[grid](tokens, offsets, shared, parent, BLOCK_B=tile.sequences, BLOCK_T=tile.tokens, **_OPTIONS)
        size_kernel[block_grid](offsets, shared, parent, size, num_sequences, BLOCK_B=tile.sequences, **_OPTIONS)
        branch_kernel[grid](offsets, shared, parent, size, step, cut, num_sequences, BLOCK_B=tile.sequences, **_OPTIONS)
        place_kernel[block_grid](
            offsets,
            shared,
            parent,
            step,
            cut,
            start,
            segment_stop,
            path_length,
            num_sequences,
            BLOCK_B=tile.sequences,
            **_OPTIONS,
        )
        segment_kernel[(2 * num_sequences,)](
            parent,
            segment_stop,
            path_length,
            cu_seqlens_q,
            cu_seqlens_k,
            owner,
            totals,
            num_sequences,
            BLOCK_B=tile.sequences,
            **_OPTIONS,
        )
    return _Layout(offsets, shared, parent, start, cu_seqlens_q, cu_seqlens_k, owner, totals)


def _read_sizes(layout: _Layout, tokens: Tensor) -> tuple[int, int, int]:
    """N, K and S + 1, and whether they and the tokens are valid: the one read of the device."""
    num_tokens, num_keys, num_bounds, _, least = torch.cat([layout.totals, tokens.amin(0, keepdim=True)]).tolist()
    if least < 0:
        raise ValueError(f"sequences must hold tokens >= 0, got {least}")
    if num_tokens > INT32_MAX:
        raise ValueError(f"a packed row must hold at most {INT32_MAX} tokens, got {num_tokens}")
    if num_keys > INT32_MAX:
        raise ValueError(f"the segments' paths in a packed row must hold at most {INT32_MAX} tokens, got {num_keys}")
    return num_tokens, num_keys, num_bounds


def _write_row(tokens: Tensor, layout: _Layout, input_ids: Tensor, position_ids: Tensor, tile: PackTile) -> Tensor:
    """Fill `input_ids` and `position_ids`, as far as they go; returns `positions` (P,)."""
    positions = torch.empty_like(tokens)
    with torch.cuda.device_of(tokens):  # type: ignore[no-untyped-call]
        write_kernel[(-(-len(tokens) // tile.written),)](
            tokens,
            layout.offsets,
            layout.shared,
            layout.parent,
            layout.start,
            input_ids,
            position_ids,
            positions,
            len(layout.shared),
            len(input_ids),
            BLOCK_P=tile.written,
            **_OPTIONS,
        )
    return positions


def _kv_index(layout: _Layout, num_segments: int, num_keys: int, tile: PackTile) -> Tensor:
    tree_kv_index = layout.start.new_empty(num_keys)
    with torch.cuda.device_of(tree_kv_index):  # type: ignore[no-untyped-call]
        kv_index_kernel[(-(-num_keys // tile.written),)](
            layout.shared,
            layout.parent,
            layout.start,
            layout.owner,
            layout.cu_seqlens_k,
            tree_kv_index,
            num_segments,
            BLOCK_P=tile.written,
            **_OPTIONS,
        )
    return tree_kv_index
