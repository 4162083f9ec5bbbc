"""Token sequences packed for a forward without a loss: equal to TRL's packing, cut back whole, chunked to a budget."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from trl.experimental.async_grpo.packing import TreeRow as TRLRow

from support.models import tiny_model
from support.tries import make_sample, tries
from treepack import chunk_inputs, chunk_sequences, pack_sequences, register_attention, unpack_sequences
from treepack.scoring import forest
from treepack.scoring.sequences import _pack_on_gpu

SHARED_KEYS = (
    "input_ids",
    "position_ids",
    "tree_kv_index",
    "tree_cu_seqlens_q",
    "tree_cu_seqlens_k",
    "tree_max_seqlens",
)
KEYS = {*SHARED_KEYS, "positions", "offsets", "sizes"}


def trl_pack(sequences):
    row = TRLRow()
    for ids in sequences:
        row.add(make_sample(ids))
    return row.pack()


def sequences_of(samples):
    return [sample["input_ids"] for sample in samples]


def assert_positions_lead_back(packed, sequences):
    offsets = packed["offsets"].tolist()
    assert offsets == np.cumsum([0, *map(len, sequences)]).tolist()
    for start, stop, ids in zip(offsets, offsets[1:], sequences):
        positions = packed["positions"][start:stop]
        assert packed["input_ids"][positions].tolist() == list(ids)
        assert packed["position_ids"][positions].tolist() == list(range(len(ids)))


@given(tries())
def test_equals_trl(samples):
    sequences = sequences_of(samples)
    packed, expected = pack_sequences(sequences), trl_pack(sequences)
    assert packed.keys() == KEYS
    for key in SHARED_KEYS:
        assert packed[key].dtype == expected[key].dtype, key
        assert torch.equal(packed[key], expected[key]), key
    assert all(packed[key].dtype == torch.int64 for key in ("positions", "offsets", "sizes"))
    assert packed["sizes"].tolist() == [
        len(packed[key]) for key in ("input_ids", "tree_kv_index", "tree_cu_seqlens_q", "offsets")
    ]
    assert_positions_lead_back(packed, sequences)


@given(tries())
def test_chains_without_sharing(samples):
    sequences = sequences_of(samples)
    packed = pack_sequences(sequences, share_prefixes=False)
    assert packed["input_ids"].tolist() == np.concatenate(sequences).tolist()
    assert packed["tree_cu_seqlens_q"].tolist() == packed["offsets"].tolist() == packed["tree_cu_seqlens_k"].tolist()
    assert_positions_lead_back(packed, sequences)


def test_lists_arrays_and_tensors_pack_alike():
    lists = [[1, 2, 3], [1, 2, 4, 5], [6]]
    expected = pack_sequences(lists)
    for convert in (np.array, torch.tensor, lambda ids: np.array(ids, dtype=np.uint16), tuple):
        packed = pack_sequences([convert(ids) for ids in lists])
        assert all(torch.equal(packed[key], expected[key]) for key in KEYS)
    matrix = torch.tensor([[1, 2, 3], [1, 2, 4]])
    assert torch.equal(pack_sequences(matrix)["input_ids"], pack_sequences(matrix.tolist())["input_ids"])


def test_kv_index_is_left_out_on_request():
    sequences = [[1, 2, 3], [1, 2, 4]]
    whole, without = pack_sequences(sequences), pack_sequences(sequences, kv_index=False)
    assert without["tree_kv_index"].shape == (0,)
    assert without["tree_kv_index"].dtype == torch.int64
    assert without["sizes"][1] == 0
    assert all(torch.equal(whole[key], without[key]) for key in KEYS - {"tree_kv_index", "sizes"})
    assert "tree_kv_index" not in unpack_sequences(without)[0]


@given(tries(), st.integers(0, 5), st.booleans(), st.booleans())
def test_padded_slices_are_cut_back(samples, padding, batched, kv_index):
    packed = pack_sequences(sequences_of(samples), kv_index=kv_index)
    padded = {
        key: value if key in ("sizes", "tree_max_seqlens") else torch.nn.functional.pad(value, (0, padding), value=-1)
        for key, value in packed.items()
    }
    if batched:
        padded = {key: value[None] for key, value in padded.items()}
    model_inputs, positions, offsets = unpack_sequences(padded)
    max_seqlen_q, max_seqlen_k = packed["tree_max_seqlens"].tolist()
    expected = {
        "input_ids": packed["input_ids"][None],
        "position_ids": packed["position_ids"][None],
        **{key: packed[key] for key in ("tree_cu_seqlens_q", "tree_cu_seqlens_k")},
        **({"tree_kv_index": packed["tree_kv_index"]} if kv_index else {}),
        "tree_max_seqlen_q": max_seqlen_q,
        "tree_max_seqlen_k": max_seqlen_k,
        "use_cache": False,
    }
    assert model_inputs.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(model_inputs[key], value), key
        else:
            assert model_inputs[key] == value, key
    assert torch.equal(positions, packed["positions"])
    assert torch.equal(offsets, packed["offsets"])


def test_a_model_takes_what_unpack_returns():
    register_attention()
    model = tiny_model("qwen3", attn_implementation="treepack").eval()
    sequences = [[1, 2, 3, 4], [1, 2, 3, 5, 6], [1, 2, 3], [7]]
    model_inputs, positions, offsets = unpack_sequences(pack_sequences(sequences))
    with torch.no_grad():
        logits = model(**model_inputs).logits[0]
        for index, ids in enumerate(sequences):
            alone = model(torch.tensor([ids]), position_ids=torch.arange(len(ids))[None], use_cache=False).logits[0]
            torch.testing.assert_close(logits[positions[offsets[index] : offsets[index + 1]]], alone)


def test_unpack_refuses_more_than_one_row():
    batch = {key: torch.stack([value, value]) for key, value in pack_sequences([[1, 2]]).items()}
    with pytest.raises(ValueError, match=r"must be \(L,\) or \(1, L\), one rank's slice, got shape \(2, "):
        unpack_sequences(batch)


@given(tries(), st.integers(1, 30), st.booleans())
def test_chunks_hold_as_much_as_the_budget_allows(samples, budget, share_prefixes):
    sequences = sequences_of(samples)

    def packed_size(indices):
        return len(pack_sequences([sequences[i] for i in indices], share_prefixes)["input_ids"])

    chunks = chunk_sequences(sequences, budget, share_prefixes)
    assert [i for chunk in chunks for i in chunk] == list(range(len(sequences)))
    for chunk, following in zip(chunks, [*chunks[1:], []]):
        assert len(chunk) == 1 or packed_size(chunk) <= budget
        if following:
            assert packed_size([*chunk, following[0]]) > budget


def test_chunk_bounds():
    """ms-swift#10056: lengths 4, 5, 6 cut at six tokens; offsets are valid and never negative."""
    sequences = [[1] * 4, [2] * 5, [3] * 6]
    assert chunk_sequences(sequences, 6, True) == [[0], [1], [2]]
    assert chunk_sequences(sequences, 9, True) == [[0, 1], [2]]
    assert chunk_sequences(sequences, 1, True) == [[0], [1], [2]]  # each alone, longer than the budget
    assert chunk_sequences([], 6, True) == []
    assert pack_sequences(sequences)["offsets"].tolist() == [0, 4, 9, 15]
    with pytest.raises(ValueError, match="token_budget must be positive, got 0"):
        chunk_sequences(sequences, 0, True)


def test_chunk_inputs_are_in_numerical_order():
    inputs = {f"c{j}_{name}": (j, name) for j in (10, 2, 0, 1, 11, *range(3, 10)) for name in ("uid", "input_ids")}
    assert chunk_inputs(inputs) == [{"uid": (j, "uid"), "input_ids": (j, "input_ids")} for j in range(12)]
    assert chunk_inputs({"uid": 1, "cu_seqlens": 2}) == [{"uid": 1, "cu_seqlens": 2}]


@pytest.mark.parametrize(
    ("keys", "message"),
    [(["c0_uid", "uid"], r"got \['uid'\] without"), (["c0_uid", "c2_uid"], r"without gaps, got \[0, 2\]")],
)
def test_chunk_inputs_refuse(keys, message):
    with pytest.raises(ValueError, match=message):
        chunk_inputs(dict.fromkeys(keys))


@pytest.mark.parametrize("use", [pack_sequences, lambda sequences: chunk_sequences(sequences, 10, True)])
@pytest.mark.parametrize(
    ("bad", "error", "message"),
    [
        ([], ValueError, r"sequences\[1\] must not be empty"),
        ([1.5, 2.0], TypeError, r"sequences\[1\] must hold integers, got float64"),
        ([True, False], TypeError, r"sequences\[1\] must hold integers, got bool"),
        ([[1, 2], [3, 4]], ValueError, r"sequences\[1\] must be one-dimensional, got shape \(2, 2\)"),
        ([[1], [2, 3]], ValueError, r"sequences\[1\] must be one-dimensional, got a nested sequence"),
        (5, ValueError, r"sequences\[1\] must be one-dimensional, got shape \(\)"),
        ([3, -1, -2], ValueError, r"sequences\[1\] must hold tokens >= 0, got -2"),
        (torch.zeros(2, device="meta", dtype=torch.int64), NotImplementedError, r"sequences\[1\] must be on the CPU"),
    ],
)
def test_bad_sequences(use, bad, error, message):
    with pytest.raises(error, match=message):
        use([[1, 2], bad])


def test_a_capacity_is_for_a_gpu():
    with pytest.raises(ValueError, match="capacity must be None for sequences that are not on a GPU, got 9"):
        pack_sequences([[1, 2]], kv_index=False, capacity=9)


@pytest.mark.parametrize(
    ("second", "error", "message"),
    [
        ([3], ValueError, r"sequences\[1\] must be a tensor on cpu like the first, got list"),
        (
            torch.zeros(1, device="meta"),
            ValueError,
            r"sequences\[1\] must be .* on cpu like the first, got one on meta",
        ),
        (torch.zeros(1, 2).long(), ValueError, r"sequences\[1\] must be one-dimensional, got shape \(1, 2\)"),
        (torch.zeros(0).long(), ValueError, r"sequences\[1\] must not be empty"),
        (torch.zeros(2), TypeError, r"sequences\[1\] must hold integers, got torch.float32"),
        (torch.zeros(2).bool(), TypeError, r"sequences\[1\] must hold integers, got torch.bool"),
    ],
)
def test_bad_sequences_on_a_gpu(second, error, message):
    with pytest.raises(error, match=message):
        _pack_on_gpu([torch.tensor([1, 2]), second], True, True, None)


@pytest.mark.parametrize(
    ("kv_index", "capacity", "message"),
    [
        (False, 0, r"capacity must be in 1\.\.2147483647, got 0"),
        (False, 2**31, r"capacity must be in 1\.\.2147483647, got 2147483648"),
        (True, 4, "kv_index must be False with a capacity, got True and 4"),
    ],
)
def test_capacities_that_cannot_be(kv_index, capacity, message):
    with pytest.raises(ValueError, match=message):
        _pack_on_gpu([torch.tensor([1, 2])], True, kv_index, capacity)


def test_no_sequences():
    with pytest.raises(ValueError, match="at least one sequence, got none"):
        pack_sequences([])


def test_rows_too_long_for_int32(monkeypatch):
    monkeypatch.setattr(forest, "INT32_MAX", 5)
    assert len(pack_sequences([[1, 2, 3], [1, 2, 3]])["input_ids"]) == 3
    with pytest.raises(ValueError, match="at most 5 tokens, got 6 at sequence 1"):
        pack_sequences([[1, 2, 3], [4, 5, 6]])
