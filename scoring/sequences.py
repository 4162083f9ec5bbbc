"""Packing token sequences for a forward without a loss, as scorers do: prefixes shared, chunked to a token budget.

N: unique tokens, K: keys gathered over all segments, S: segments, B: sequences, P: tokens of all sequences together.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike

from treepack.scoring.forest import INT32_MAX, PrefixForest, Tokens

TokenSequence = ArrayLike | torch.Tensor
Tensors = dict[str, torch.Tensor]

_SIGNED = (torch.int64, torch.int32, torch.int16, torch.int8)
_UNSIGNED = (torch.uint64, torch.uint32, torch.uint16, torch.uint8)

CHUNK_KEY = re.compile(r"c(\d+)_(.+)")


def pack_sequences(
    sequences: Sequence[TokenSequence] | torch.Tensor,
    share_prefixes: bool = True,
    *,
    kv_index: bool = True,
    capacity: int | None = None,
) -> Tensors:
    """Tree-pack token sequences into one row, as `TreeRow.pack` would.

    Sequences on a GPU are packed there: one small tensor is read from it, the row's sizes, or none with a `capacity`.

    Args:
        sequences: B lists, numpy arrays or CPU tensors of token ids, (n,) integers >= 0 with n > 0 each; or B tensors
            on one GPU.
        share_prefixes: False packs each sequence as a chain of its own.
        kv_index: False leaves `tree_kv_index` empty. Its length is the sum of all root paths, and treepack's attention
            does not read it; TRL's does.
        capacity: only on a GPU and without `kv_index`: tokens to allocate for the row, so that nothing need be read.
            `input_ids` and `position_ids` are then (capacity,), zeros past the row's end, and the `tree_cu_seqlens` are
            (2 B + 1,), their last bound repeated. A row that does not fit has `sizes[0] > capacity`, and
            `unpack_sequences` refuses it; the sum of all lengths always suffices. Negative tokens go unnoticed.

    Returns:
        - `input_ids`, `position_ids` (N,) int64: the unique tokens and their depths (0-based).
        - `positions` (P,) int64: the packed index of each sequence's tokens, laid end to end.
        - `offsets` (B + 1,) int64: where each sequence starts in `positions`.
        - `tree_kv_index` (K,) int64, `tree_cu_seqlens_q`, `tree_cu_seqlens_k` (S + 1,) int32: as in `TreeRow.pack`.
        - `sizes` (4,) int64: lengths of `input_ids`, `tree_kv_index`, `tree_cu_seqlens_q` and `offsets`, so that a
          padded copy can be cut back (`unpack_sequences`).
        - `tree_max_seqlens` (2,) int64: the longest segment, the longest path.

        All on the sequences' device.

    Raises:
        ValueError: no sequences; one that is empty, not one-dimensional or has a negative token; sequences on several
            devices; more than 2^31 - 1 packed tokens; a `capacity` that is out of range or not for these arguments.
        TypeError: a sequence that does not hold integers.
        NotImplementedError: a tensor that is neither on the CPU nor on a CUDA or ROCm GPU.

    Source: `core.trainers.async_grpo.scoring.pack_sequences` (axolotl).
    """
    if len(sequences) and isinstance(sequences[0], torch.Tensor) and sequences[0].is_cuda:
        return _pack_on_gpu(sequences, share_prefixes, kv_index, capacity)
    if capacity is not None:
        raise ValueError(f"capacity must be None for sequences that are not on a GPU, got {capacity}")
    arrays = _token_arrays(sequences)
    layout = _forest(arrays, share_prefixes).layout()
    num_tokens, num_keys = layout.cu_seqlens_q[-1], layout.cu_seqlens_k[-1] if kv_index else 0
    input_ids, position_ids = np.empty(num_tokens, dtype=np.int64), np.empty(num_tokens, dtype=np.int64)
    tree_kv_index = np.empty(num_keys, dtype=np.int64)
    offsets = np.cumsum([0, *map(len, arrays)])
    positions = np.empty(offsets[-1], dtype=np.int64)
    layout.write_tokens(input_ids, position_ids)
    segment = 0
    for tail in layout.tails():
        if kv_index:
            segment = layout.write_kv_index(tail, segment, tree_kv_index)
        for index in (tail.owner, *tail.copies):
            positions[offsets[index] : offsets[index + 1]] = tail.path
    return {
        "input_ids": torch.from_numpy(input_ids),
        "position_ids": torch.from_numpy(position_ids),
        "positions": torch.from_numpy(positions),
        "offsets": torch.from_numpy(offsets),
        "tree_kv_index": torch.from_numpy(tree_kv_index),
        "sizes": torch.tensor([num_tokens, num_keys, len(layout.cu_seqlens_q), len(offsets)]),
        "tree_cu_seqlens_q": torch.tensor(layout.cu_seqlens_q, dtype=torch.int32),
        "tree_cu_seqlens_k": torch.tensor(layout.cu_seqlens_k, dtype=torch.int32),
        "tree_max_seqlens": torch.tensor(layout.max_seqlens),
    }


def unpack_sequences(inputs: Mapping[str, torch.Tensor]) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
    """Cut one rank's padded copy of a `pack_sequences` output back to what the model takes.

    Args:
        inputs: the keys of `pack_sequences`, each (L,) or (1, L) with padding at its end; on any device.

    Returns:
        `(model_inputs, positions, offsets)`. `model(**model_inputs)` runs: `input_ids` and `position_ids` (1, N),
        `tree_kv_index` (K,) unless empty, `tree_cu_seqlens_q` and `tree_cu_seqlens_k` (S + 1,), `tree_max_seqlen_q` and
        `tree_max_seqlen_k` (int), and `use_cache=False`. `positions` (P,) and `offsets` (B + 1,) as in
        `pack_sequences`.

    All are views. One small tensor is read from the inputs' device.

    Raises:
        ValueError: a tensor that holds more than one row; a row that did not fit its `capacity`.

    Source: `core.trainers.async_grpo.scoring.unpack_sequences` (axolotl).
    """
    flat = {name: _only_row(name, tensor) for name, tensor in inputs.items()}
    last_offset = flat["offsets"].take(flat["sizes"][3:] - 1)
    (num_tokens, num_keys, num_bounds, num_offsets, max_seqlen_q, max_seqlen_k, num_positions) = torch.cat(
        [flat["sizes"], flat["tree_max_seqlens"], last_offset]
    ).tolist()
    if num_tokens > len(flat["input_ids"]):
        raise ValueError(
            f"inputs must hold all {num_tokens} tokens of the row, got {len(flat['input_ids'])} (pack_sequences with a "
            "larger capacity)"
        )
    model_inputs: dict[str, Any] = {
        "input_ids": flat["input_ids"][None, :num_tokens],
        "position_ids": flat["position_ids"][None, :num_tokens],
        "tree_cu_seqlens_q": flat["tree_cu_seqlens_q"][:num_bounds],
        "tree_cu_seqlens_k": flat["tree_cu_seqlens_k"][:num_bounds],
        "tree_max_seqlen_q": max_seqlen_q,
        "tree_max_seqlen_k": max_seqlen_k,
        "use_cache": False,
    }
    if num_keys:
        model_inputs["tree_kv_index"] = flat["tree_kv_index"][:num_keys]
    return model_inputs, flat["positions"][:num_positions], flat["offsets"][:num_offsets]


def chunk_sequences(
    sequences: Sequence[TokenSequence] | torch.Tensor, token_budget: int, share_prefixes: bool
) -> list[list[int]]:
    """Split sequences, in order, into chunks that each pack to at most `token_budget` tokens.

    A sequence longer than the budget is a chunk of its own.

    Args:
        sequences: as in `pack_sequences`, but on the CPU, and there may be none.
        token_budget: unique tokens a chunk may hold, > 0.
        share_prefixes: whether the chunks will be packed with shared prefixes.

    Returns:
        The indices (0-based) of each chunk's sequences.

    Raises:
        ValueError, TypeError, NotImplementedError: as in `pack_sequences`; `token_budget` is not positive.

    Source: `core.trainers.async_grpo.scoring.chunk_sequences` (axolotl).
    """
    if token_budget <= 0:
        raise ValueError(f"token_budget must be positive, got {token_budget}")
    chunks: list[list[int]] = []
    forest = PrefixForest(share_prefixes=share_prefixes)
    for index, sequence in enumerate(_token_arrays(sequences) if len(sequences) else []):
        match = forest.match(sequence)
        if not chunks or forest.num_tokens + len(sequence) - match.shared > token_budget:
            chunks.append([])
            forest = PrefixForest(share_prefixes=share_prefixes)
            match = forest.match(sequence)
        forest.append(sequence, match)
        chunks[-1].append(index)
    return chunks


def chunk_inputs(inputs: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One scorer's micro-batch inputs, split into its chunks in numerical order, the `c{j}_` prefixes removed.

    Inputs without any prefixed key are one chunk.

    Raises:
        ValueError: only some keys are prefixed, or the chunks are not numbered 0, 1, 2, ...

    Source: `core.trainers.async_grpo.scoring.chunk_inputs` (axolotl).
    """
    chunks: dict[int, dict[str, Any]] = {}
    plain: dict[str, Any] = {}
    for key, value in inputs.items():
        if prefixed := CHUNK_KEY.fullmatch(key):
            chunks.setdefault(int(prefixed[1]), {})[prefixed[2]] = value
        else:
            plain[key] = value
    if not chunks:
        return [plain]
    if plain:
        raise ValueError(f"inputs must have a c{{j}}_ prefix on every key or on none, got {sorted(plain)} without")
    if sorted(chunks) != list(range(len(chunks))):
        raise ValueError(f"inputs must have chunks numbered from 0 without gaps, got {sorted(chunks)}")
    return [chunks[j] for j in range(len(chunks))]


def _pack_on_gpu(
    sequences: Sequence[TokenSequence] | torch.Tensor, share_prefixes: bool, kv_index: bool, capacity: int | None
) -> Tensors:
    from treepack.kernels.pack import pack_tokens  # Triton takes seconds to load, and only a GPU needs it.

    if capacity is not None and not 1 <= capacity <= INT32_MAX:
        raise ValueError(f"capacity must be in 1..{INT32_MAX}, got {capacity}")
    if capacity is not None and kv_index:
        raise ValueError(f"kv_index must be False with a capacity, got True and {capacity}")
    tensors = [_token_tensor(sequence, sequences[0], index) for index, sequence in enumerate(sequences)]
    return pack_tokens(
        torch.cat([tensor.long() for tensor in tensors]),
        [len(tensor) for tensor in tensors],
        share_prefixes=share_prefixes,
        kv_index=kv_index,
        capacity=capacity,
    )


def _token_tensor(sequence: Any, first: Any, index: int) -> torch.Tensor:
    name = f"sequences[{index}]"
    if not isinstance(sequence, torch.Tensor) or sequence.device != first.device:
        got = f"one on {sequence.device}" if isinstance(sequence, torch.Tensor) else type(sequence).__name__
        raise ValueError(f"{name} must be a tensor on {first.device} like the first, got {got}")
    if sequence.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(sequence.shape)}")
    if not len(sequence):
        raise ValueError(f"{name} must not be empty")
    if sequence.dtype not in (*_SIGNED, *_UNSIGNED):
        raise TypeError(f"{name} must hold integers, got {sequence.dtype}")
    return sequence


def _forest(sequences: list[Tokens], share_prefixes: bool) -> PrefixForest:
    forest = PrefixForest(share_prefixes=share_prefixes)
    for sequence in sequences:
        forest.append(sequence, forest.match(sequence))
    return forest


def _token_arrays(sequences: Sequence[TokenSequence] | torch.Tensor) -> list[Tokens]:
    if not len(sequences):
        raise ValueError("sequences must hold at least one sequence, got none")
    return [_token_array(sequence, f"sequences[{index}]") for index, sequence in enumerate(sequences)]


def _token_array(sequence: TokenSequence, name: str) -> Tokens:
    if isinstance(sequence, torch.Tensor) and sequence.device.type != "cpu":
        raise NotImplementedError(f"{name} must be on the CPU, got a tensor on {sequence.device}")
    try:
        array = np.asarray(sequence)
    except ValueError as error:  # a ragged nest of lists
        raise ValueError(f"{name} must be one-dimensional, got a nested sequence of uneven lengths") from error
    if array.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {array.shape}")
    if not len(array):
        raise ValueError(f"{name} must not be empty")
    if array.dtype.kind not in "iu":
        raise TypeError(f"{name} must hold integers, got {array.dtype}")
    if array.dtype.kind == "i" and array.min() < 0:
        raise ValueError(f"{name} must hold tokens >= 0, got {array.min()}")
    return array


def _only_row(name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.ndim == 1:
        return tensor
    if tensor.ndim == 2 and tensor.shape[0] == 1:
        return tensor[0]
    raise ValueError(f"{name} must be (L,) or (1, L), one rank's slice, got shape {tuple(tensor.shape)}")
