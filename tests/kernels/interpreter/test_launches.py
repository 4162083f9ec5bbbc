"""Shipped tiles, addresses beyond 2^31 elements, determinism, capacity, empty rows."""

from functools import partial

import pytest
import torch

from support.forests import Inputs, exact_results, group, karied, make_inputs, positions_of, run
from support.triton_kernels import check, small_config, triton_attention
from treepack.kernels import gpu
from treepack.kernels.configs import Device, attention_config
from treepack.kernels.plan import TreePlan

DEVICES = {
    "hopper": Device("sm_90", 232448),
    "ampere": Device("sm_80", 166912),
    "consumer": Device("sm_120", 101376),
    "cdna": Device("gfx942", 65536),
}
TILES = {"forward": (16, 16), "query_grad": (32, 16), "key_grad": (16, 16)}


def check_shipped(device: Device, dims: tuple[int, int], dtype: torch.dtype) -> None:
    position_ids = positions_of([*group(70, [40, 1, 33]), (0, 5)])
    inputs = make_inputs(len(position_ids), heads=(4, 1), dims=dims, dtype=dtype, sinks=True)
    config = attention_config(*dims, dtype, group=4, device=device)
    check(position_ids, inputs, config, sliding_window=60, softcap=20.0)


@pytest.mark.parametrize("columns", [64, 128, 256])
def test_hopper_tiles(columns: int) -> None:
    check_shipped(DEVICES["hopper"], (columns, columns), torch.float16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dims", [(16, 16), (64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256)], ids=str)
@pytest.mark.parametrize("device", DEVICES)
def test_every_shipped_tile(device: str, dims: tuple[int, int], dtype: torch.dtype) -> None:
    check_shipped(DEVICES[device], dims, dtype)


def far_apart(tensor: torch.Tensor, token_stride: int, head_stride: int) -> torch.Tensor:
    """The same values with these strides, in elements; the pages between are never touched."""
    num_tokens, heads, columns = tensor.shape
    storage = torch.empty((num_tokens - 1) * token_stride + (heads - 1) * head_stride + columns, dtype=tensor.dtype)
    view = storage.as_strided(tensor.shape, (token_stride, head_stride, 1))
    return view.copy_(tensor)


def check_far_apart(plan: TreePlan, inputs: Inputs, token_stride: int, head_stride: int) -> None:
    tensors = {
        name: far_apart(t.detach(), token_stride, head_stride) for name, t in vars(inputs).items() if t is not None
    }
    leaves = {name: t.requires_grad_(name != "grad_out") for name, t in tensors.items()}
    distant = Inputs(**leaves, sinks=None, grad_lse=None)
    config = small_config(inputs, forward=(128, 64), query_grad=(128, 64), key_grad=(64, 128))
    attend = partial(triton_attention, plan=plan, config=config)
    near, far = run(attend, inputs), run(attend, distant)
    assert all(torch.equal(near[name], far[name]) for name in near)


@pytest.mark.parametrize(("prompt", "token_stride"), [(200, 2**23), (50, 2**24)], ids=["walked", "copied"])
def test_offsets_of_more_than_31_bits(prompt: int, token_stride: int) -> None:
    plan = TreePlan.from_position_ids(positions_of(group(prompt, [33, 47])))
    inputs = make_inputs(plan.num_tokens, heads=(1, 1), dtype=torch.float16, lse=False)
    assert (plan.num_tokens - 1) * token_stride >= 2**31
    check_far_apart(plan, inputs, token_stride, 16)


@pytest.mark.parametrize("head_stride", [2**28, 2**29], ids=["walked", "copied"])
def test_heads_far_apart(head_stride: int) -> None:
    """As in a (heads, tokens, columns) layout: offsets from a group's first head to its last have 32 bits."""
    plan = TreePlan.from_position_ids(positions_of(group(9, [20, 5])))
    inputs = make_inputs(plan.num_tokens, heads=(6, 2), dtype=torch.float16, lse=False)
    check_far_apart(plan, inputs, 16, head_stride)


def test_results_repeat_bit_for_bit() -> None:
    plan = TreePlan.from_position_ids(positions_of(karied(3, 3, 4)))
    inputs = make_inputs(plan.num_tokens, heads=(4, 2), sinks=True)
    attend = partial(triton_attention, plan=plan, config=small_config(inputs, **TILES))
    first, second = run(attend, inputs), run(attend, inputs)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_branch_does_not_move_its_siblings() -> None:
    """P -> {A, B}: other tokens in A leave every result of B bit for bit."""
    plan = TreePlan.from_position_ids(positions_of([(0, 13), (13, 21), (13, 18)]))
    inputs = make_inputs(plan.num_tokens)
    attend = partial(triton_attention, plan=plan, config=small_config(inputs, **TILES))
    before = run(attend, inputs)
    with torch.no_grad():
        for leaf in (inputs.q, inputs.k, inputs.v):
            leaf[13:34] += 1
    after = run(attend, inputs)
    for name in ("out", "lse", "dq"):
        assert torch.equal(before[name][34:], after[name][34:]), name
        assert not torch.equal(before[name][13:34], after[name][13:34]), name


@pytest.mark.parametrize("spare", [0, 100])
def test_a_schedule_of_fixed_capacity_is_right_even_when_it_overflows(spare: int) -> None:
    position_ids = positions_of(karied(2, 5, 2))
    inputs = make_inputs(len(position_ids), heads=(1, 1))
    config = small_config(inputs, forward=(16, 16), query_grad=(16, 16), key_grad=(16, 16))
    plan = TreePlan.from_position_ids(position_ids)
    schedule = plan.schedule(16, 16, capacity=-(-len(position_ids) // 16) + spare)
    assert bool(schedule.overflow) == (spare == 0)
    found = run(partial(triton_attention, plan=plan, config=config), inputs)
    for name, exact in exact_results(inputs, plan).items():
        torch.testing.assert_close(found[name].double(), exact, rtol=1e-4, atol=1e-5)


def test_an_empty_row() -> None:
    plan = TreePlan.from_position_ids(torch.zeros(0, dtype=torch.int64))
    inputs = make_inputs(0, sinks=True)
    config = small_config(inputs, **TILES)
    found = run(partial(triton_attention, plan=plan, config=config), inputs)
    assert found["out"].shape == (0, 2, 16)
    assert found["dsinks"].tolist() == [0, 0]


def test_one_gradient_may_be_missing() -> None:
    plan = TreePlan.from_position_ids(positions_of(group(9, [3, 4])))
    inputs = make_inputs(plan.num_tokens, sinks=True)
    options = {"scale": 0.25, "window": None, "softcap": None, "config": small_config(inputs, **TILES)}
    tensors = [None if t is None else t.detach() for t in (inputs.q, inputs.k, inputs.v, inputs.sinks)]
    out, lse = gpu.attention_forward(*tensors, plan, **options)
    grads = gpu.attention_backward(None, inputs.grad_lse, *tensors, out, lse, plan, **options)
    expected = gpu.attention_backward(torch.zeros_like(out), inputs.grad_lse, *tensors, out, lse, plan, **options)
    assert all(torch.equal(a, b) for a, b in zip(grads, expected))
