"""Head ratios, head dims, lengths, offsets, strides: the shapes in which kernels go wrong."""

import pytest
import torch

from support.forests import comb, group, make_inputs, positions_of, unwinding
from support.triton_kernels import check, small_config

TILES = {"forward": (16, 16), "query_grad": (32, 16), "key_grad": (16, 16)}


@pytest.mark.parametrize("heads", [(7, 1), (12, 2), (9, 3), (8, 1), (5, 1)], ids=str)
def test_head_ratios(heads: tuple[int, int]) -> None:
    position_ids = positions_of([*group(9, [4, 1, 5]), (0, 1)])
    inputs = make_inputs(len(position_ids), heads=heads, sinks=True)
    check(position_ids, inputs, small_config(inputs, **TILES))


def test_a_group_larger_than_a_tile_packs_in_chunks() -> None:
    position_ids = positions_of(group(5, [2, 1]))
    inputs = make_inputs(len(position_ids), heads=(37, 1), sinks=True)
    config = small_config(inputs, **TILES)
    assert (config.pack, config.chunks) == (13, 3)
    check(position_ids, inputs, config)


@pytest.mark.parametrize(
    "dims", [(8, 8), (20, 16), (72, 72), (80, 80), (96, 120), (192, 128), (64, 48), (256, 256)], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    position_ids = positions_of(group(15, [6, 3]))
    inputs = make_inputs(len(position_ids), dims=dims, dtype=dtype)
    check(position_ids, inputs, small_config(inputs, **TILES), scale=1.0 / dims[0])


@pytest.mark.parametrize("num_tokens", [*range(1, 18), 31, 32, 33])
def test_lengths_around_a_tile(num_tokens: int) -> None:
    position_ids = torch.arange(num_tokens)
    inputs = make_inputs(num_tokens, heads=(1, 1))
    check(position_ids, inputs, small_config(inputs, **TILES))


@pytest.mark.parametrize("residue", range(8))
def test_tails_of_every_residue_in_one_forest(residue: int) -> None:
    position_ids = positions_of([s for tail in range(4) for s in group(16, [4 * residue // 2 + tail + 1])])
    inputs = make_inputs(len(position_ids), heads=(1, 1))
    check(position_ids, inputs, small_config(inputs, **TILES))


@pytest.mark.parametrize("stretch", range(4))
def test_a_branch_at_every_offset_of_a_block(stretch: int) -> None:
    """AReaL's dK/dV lost contributions of a branch that starts late in a block of keys."""
    chains = [(40, depth) for depth in range(16 + 4 * stretch, 20 + 4 * stretch)]
    position_ids = positions_of([s for length, depth in chains for s in ((0, length), (depth, 3), (depth - 1, 1))])
    inputs = make_inputs(len(position_ids), heads=(1, 1))
    check(position_ids, inputs, small_config(inputs, **TILES))


@pytest.mark.parametrize(
    "segments",
    [[(0, 1)] * 70, comb(30, 1, 1), comb(9, 5, 3), unwinding(20, 2), group(3, [1] * 60)],
    ids=["roots", "one-token comb", "comb", "unwinding", "leaves"],
)
def test_awkward_forests(segments: list[tuple[int, int]]) -> None:
    position_ids = positions_of(segments)
    inputs = make_inputs(len(position_ids), heads=(2, 2))
    check(position_ids, inputs, small_config(inputs, **TILES), sliding_window=6)
    check(position_ids, inputs, small_config(inputs, **TILES))


def test_views_of_a_fused_projection() -> None:
    position_ids = positions_of(group(20, [5, 9]))
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(16, 16), sinks=True)
    fused = torch.cat([t.detach().flatten(1) for t in (inputs.q, inputs.k, inputs.v)], 1)
    q, k, v = (part.unflatten(1, (-1, 16)) for part in fused.split([64, 32, 32], 1))
    # Heads before tokens, a transposed head dim, and every second column of the gradient.
    k = k.transpose(0, 1).contiguous().transpose(0, 1)
    v = v.transpose(1, 2).contiguous().transpose(1, 2)
    grad_out = torch.stack([inputs.grad_out, inputs.grad_out], -1)[..., 0]
    strided = type(inputs)(
        **{
            **vars(inputs),
            "q": q.requires_grad_(),
            "k": k.requires_grad_(),
            "v": v.requires_grad_(),
            "grad_out": grad_out,
        }
    )
    assert not any(t.is_contiguous() for t in (q, k, v, grad_out))
    check(position_ids, strided, small_config(inputs, **TILES))


@pytest.mark.slow
def test_thousands_of_leaves() -> None:
    position_ids = positions_of(group(50, [1, 2] * 1000))
    inputs = make_inputs(len(position_ids), heads=(1, 1))
    check(position_ids, inputs, small_config(inputs, forward=(128, 64), query_grad=(128, 64), key_grad=(64, 128)))


@pytest.mark.slow
@pytest.mark.parametrize("num_tokens", [127, 129, 137, 1025])
def test_lengths_of_public_reports(num_tokens: int) -> None:
    position_ids = torch.arange(num_tokens)
    inputs = make_inputs(num_tokens, heads=(1, 1), dims=(64, 64))
    check(
        position_ids,
        inputs,
        small_config(inputs, forward=(128, 64), query_grad=(128, 64), key_grad=(64, 128)),
        softcap=20.0,
    )
