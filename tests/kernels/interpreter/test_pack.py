"""Packing by the GPU's kernels equals packing on the CPU, bit for bit (and that one equals TRL's)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.packing import ROWS, assert_same, flat, guarded_memory
from support.traces import load_trace, trace_paths
from support.tries import tries
from treepack import pack_sequences, unpack_sequences
from treepack.kernels.pack import PackTile, pack_tokens
from treepack.scoring.sequences import _pack_on_gpu

# So small that a handful of short sequences has many blocks.
TILE = PackTile(sequences=4, tokens=4, written=8)


def pack(sequences: list[list[int]], *, tile: PackTile = TILE, **options: Any) -> dict[str, Tensor]:
    options = {"share_prefixes": True, "kv_index": True, "capacity": None, **options}
    with guarded_memory():
        return pack_tokens(*flat(sequences), **options, tile=tile)


@settings(max_examples=12)
@given(tries(), st.booleans(), st.booleans(), st.sampled_from([TILE, PackTile(2, 2, 4), PackTile()]))
def test_any_trie(samples: list[Any], share_prefixes: bool, kv_index: bool, tile: PackTile) -> None:
    sequences = [sample["input_ids"].tolist() for sample in samples]
    found = pack(sequences, share_prefixes=share_prefixes, kv_index=kv_index, tile=tile)
    assert_same(found, pack_sequences(sequences, share_prefixes, kv_index=kv_index))


@pytest.mark.parametrize("name", ROWS)
def test_awkward_rows(name: str) -> None:
    sequences = ROWS[name]
    assert_same(pack(sequences), pack_sequences(sequences))


def test_shipped_tiles_on_long_sequences() -> None:
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1000, 2500)
    sequences = [np.r_[prompt[:cut], rng.integers(0, 1000, 300)].tolist() for cut in (2500, 1024, 1023, 2500, 2048)]
    sequences += [prompt.tolist(), prompt[:1025].tolist()]
    assert_same(pack(sequences, tile=PackTile()), pack_sequences(sequences))


@pytest.mark.parametrize("path", trace_paths(), ids=lambda path: path.stem)
def test_real_rollouts(path: Path) -> None:
    sequences = [sample["input_ids"].tolist() for group in load_trace(path, 2, 4) for sample in group]
    assert_same(pack(sequences, tile=PackTile(written=8192)), pack_sequences(sequences))


@pytest.mark.slow
def test_more_sequences_than_a_block_holds() -> None:
    rng = np.random.default_rng(1)
    sequences = [[7, 7, *rng.integers(0, 3, rng.integers(1, 5)).tolist()] for _ in range(140)]
    assert_same(pack(sequences, tile=PackTile()), pack_sequences(sequences))


@pytest.mark.parametrize(("name", "spare"), [("forks of forks", 0), ("strict prefixes", 1), ("one token", 20)])
def test_a_capacity_pads_the_row(name: str, spare: int) -> None:
    sequences = ROWS[name]
    expected = pack_sequences(sequences, kv_index=False)
    capacity = len(expected["input_ids"]) + spare
    found = pack(sequences, kv_index=False, capacity=capacity)
    for key in ("input_ids", "position_ids"):
        assert found[key].tolist() == expected[key].tolist() + [0] * spare
    for key in ("tree_cu_seqlens_q", "tree_cu_seqlens_k"):
        bounds = expected[key].tolist()
        assert found[key].tolist() == bounds + [bounds[-1]] * (2 * len(sequences) + 1 - len(bounds))
    for key in ("positions", "offsets", "sizes", "tree_max_seqlens"):
        assert torch.equal(found[key], expected[key]), key
    inputs, positions, offsets = unpack_sequences(found)
    assert torch.equal(inputs["input_ids"][0][positions], torch.cat([torch.tensor(ids) for ids in sequences]))
    assert torch.equal(offsets, expected["offsets"])


def test_a_capacity_that_is_too_small_is_seen_and_nothing_is_written_past_it() -> None:
    sequences = ROWS["forks of forks"]
    expected = pack_sequences(sequences, kv_index=False)
    for capacity in (1, len(expected["input_ids"]) - 1):
        found = pack(sequences, kv_index=False, capacity=capacity)
        assert torch.equal(found["input_ids"], expected["input_ids"][:capacity])
        assert torch.equal(found["sizes"], expected["sizes"])
        with pytest.raises(ValueError, match=f"must hold all {len(expected['input_ids'])} tokens .* got {capacity} "):
            unpack_sequences(found)


def test_changing_one_branch_leaves_the_others_where_they_are() -> None:
    """Case 17 (verl#6689): P -> {A -> R0, R1; B -> R2, R3}; other tokens in A move nothing of B."""
    prompt, b = [1, 2, 3], [7, 8, 9]

    def row(a: list[int]) -> dict[str, Tensor]:
        return pack([prompt + a + [20], prompt + a + [21], prompt + b + [22], prompt + b + [23, 24]])

    before, after = row([4, 5, 6]), row([4, 6, 5])
    offsets = before["offsets"].tolist()
    of_b = before["positions"][offsets[2] :]
    assert torch.equal(of_b, after["positions"][offsets[2] :])
    assert torch.equal(before["input_ids"][of_b], after["input_ids"][of_b])
    for key in ("position_ids", "tree_cu_seqlens_q", "tree_cu_seqlens_k", "tree_kv_index"):
        assert torch.equal(before[key], after[key]), key


def test_a_tree_whose_paths_dwarf_it_needs_no_index() -> None:
    """Case 18, smaller: turns with side branches; without `kv_index` nothing grows with the sum of the paths."""
    turns, turn = 10, 20
    spine = list(range(turns * turn))
    sequences = [spine[: (t + 1) * turn] + [9000 + t] * 4 for t in range(turns)] + [spine]
    found = pack(sequences, kv_index=False, tile=PackTile())
    assert_same(found, pack_sequences(sequences, kv_index=False))
    assert len(found["tree_kv_index"]) == 0
    assert int(found["tree_cu_seqlens_k"][-1]) > 5 * len(found["input_ids"])


@pytest.mark.parametrize(
    "sequences",
    [
        [torch.tensor([1, 2, 3]), torch.tensor([1, 2, 4], dtype=torch.uint8), torch.tensor([5], dtype=torch.int16)],
        torch.tensor([[1, 2, 3], [1, 2, 4]], dtype=torch.int32),
        torch.tensor([[1, 2, 3], [1, 2, 4], [1, 3, 3]]).t(),
    ],
    ids=["a list of several dtypes", "a matrix", "a transposed matrix"],
)
def test_the_public_function_on_a_gpu(sequences: Any) -> None:
    """What `pack_sequences` calls with tensors on a GPU, here on a CPU."""
    assert_same(_pack_on_gpu(sequences, True, True, None), pack_sequences(sequences))
    assert_same(_pack_on_gpu(sequences, False, False, None), pack_sequences(sequences, False, kv_index=False))


def test_negative_tokens_are_refused() -> None:
    with pytest.raises(ValueError, match="sequences must hold tokens >= 0, got -2"):
        pack([[1, 2], [1, -1, -2]])


def test_rows_too_long_for_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("treepack.kernels.pack.INT32_MAX", 5)
    assert len(pack([[1, 2, 3], [1, 2, 3]])["input_ids"]) == 3
    with pytest.raises(ValueError, match="a packed row must hold at most 5 tokens, got 6"):
        pack([[1, 2, 3], [4, 5, 6]])
    with pytest.raises(ValueError, match="the segments' paths in a packed row must hold at most 5 tokens, got 7"):
        pack([[1, 2, 3], [1, 2, 4]])
