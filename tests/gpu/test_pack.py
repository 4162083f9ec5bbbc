"""Packing and gathering on a GPU: equal to the CPU's results bit for bit, at any size, without a hidden wait."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch import Tensor

from support.cuda import needs_gpu
from support.packing import ROWS, assert_same
from treepack import gather_positions, pack_sequences, unpack_sequences

pytestmark = needs_gpu

GPU = torch.device("cuda")


def grouped(prompts: int, samples: int, prompt: int, completion: int) -> list[Tensor]:
    """Groups of samples with one prompt each; a few are copies and strict prefixes of others."""
    rng = np.random.default_rng(0)
    sequences = []
    for _ in range(prompts):
        ids = rng.integers(0, 50_000, prompt)
        for _ in range(samples):
            sequences.append(np.r_[ids, rng.integers(0, 50_000, rng.integers(1, completion + 1))])
        sequences += [sequences[-1], ids[: max(prompt // 2, 1)]]
    return [torch.from_numpy(ids) for ids in sequences]


def check(sequences: list[Tensor], **options: bool) -> None:
    found = pack_sequences([ids.to(GPU) for ids in sequences], **options)
    assert all(tensor.device.type == "cuda" for tensor in found.values())
    assert_same(found, pack_sequences(sequences, **options))


@contextmanager
def no_waiting() -> Iterator[None]:
    """Any read of the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("share_prefixes", [True, False])
@pytest.mark.parametrize("name", ROWS)
def test_awkward_rows(name: str, share_prefixes: bool) -> None:
    check([torch.tensor(ids) for ids in ROWS[name]], share_prefixes=share_prefixes)


@pytest.mark.parametrize(
    "shape", [(8, 8, 1000, 500), (1, 16, 60_000, 3000), (100, 30, 40, 20)], ids=["groups", "one long prompt", "many"]
)
def test_groups(shape: tuple[int, int, int, int]) -> None:
    check(grouped(*shape))


def test_a_million_tokens() -> None:
    check(grouped(4, 16, 2000, 31_000), kv_index=False)


def test_more_sequences_than_a_grid_axis_holds() -> None:
    """Case 8: 70,000 sequences of a few tokens."""
    rng = np.random.default_rng(1)
    check([torch.from_numpy(rng.integers(0, 20, rng.integers(1, 6))) for _ in range(70_000)], kv_index=False)


def test_a_long_chain_of_extensions() -> None:
    ids = torch.arange(3000)
    check([ids[:length] for length in range(1, 3001, 2)], kv_index=False)


def test_results_repeat() -> None:
    sequences = [ids.to(GPU) for ids in grouped(8, 8, 300, 100)]
    first = pack_sequences(sequences)
    for _ in range(30):
        again = pack_sequences(sequences)
        assert all(torch.equal(first[key], again[key]) for key in first)


def test_nothing_waits_with_a_capacity() -> None:
    sequences = grouped(8, 8, 300, 100)
    expected = pack_sequences(sequences, kv_index=False)
    capacity = len(expected["input_ids"]) + 99
    on_gpu = [ids.to(GPU) for ids in sequences]
    pack_sequences(on_gpu, kv_index=False, capacity=capacity)  # compiles
    with no_waiting():
        found = pack_sequences(on_gpu, kv_index=False, capacity=capacity)
    inputs, positions, offsets = unpack_sequences(found)
    assert torch.equal(inputs["input_ids"][0].cpu(), expected["input_ids"])
    assert torch.equal(inputs["position_ids"][0].cpu(), expected["position_ids"])
    assert torch.equal(inputs["tree_cu_seqlens_k"].cpu(), expected["tree_cu_seqlens_k"])
    assert torch.equal(positions.cpu(), expected["positions"])
    assert torch.equal(offsets.cpu(), expected["offsets"])
    too_small = pack_sequences(on_gpu, kv_index=False, capacity=capacity - 100)
    with pytest.raises(ValueError, match=f"must hold all {capacity - 99} tokens"):
        unpack_sequences(too_small)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="tokens >= 0, got -3"):
        pack_sequences([torch.tensor([1, -3], device=GPU)])
    with pytest.raises(ValueError, match=r"sequences\[1\] must be a tensor on cuda:0 like the first, got one on cpu"):
        pack_sequences([torch.tensor([1], device=GPU), torch.tensor([1])])
    with pytest.raises(NotImplementedError, match=r"sequences\[1\] must be on the CPU"):
        pack_sequences([[1], torch.tensor([1], device=GPU)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("columns", [1, 72, 1000, 4096])
def test_gather_and_its_gradient(dtype: torch.dtype, columns: int) -> None:
    packed = pack_sequences([ids.to(GPU) for ids in grouped(2, 9, 100, 50)])
    positions = packed["positions"]
    hidden = torch.randn(len(packed["input_ids"]), columns, device=GPU, dtype=dtype, requires_grad=True)
    grad = torch.randn(len(positions), columns, device=GPU, dtype=dtype)
    gather_positions(hidden, positions)  # compiles
    with no_waiting():
        gathered = gather_positions(hidden, positions)
    assert torch.equal(gathered, hidden[positions])
    (found,) = torch.autograd.grad(gathered, hidden, grad, retain_graph=True)
    exact = torch.zeros(hidden.shape, dtype=torch.float64, device=GPU).index_add_(0, positions, grad.double())
    sums = torch.zeros_like(exact).index_add_(0, positions, grad.double().abs())
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    budget = 20 * torch.finfo(precision).eps * sums + torch.finfo(dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= budget).all()
    for _ in range(30):
        (again,) = torch.autograd.grad(gathered, hidden, grad, retain_graph=True)
        assert torch.equal(found, again)


def test_gather_beyond_two_to_the_31_elements() -> None:
    """Case 7."""
    rows, columns = 300_000, 8192
    hidden = torch.empty(rows, columns, dtype=torch.bfloat16, device=GPU)
    hidden[-3:] = torch.arange(3, device=GPU)[:, None]
    positions = torch.tensor([rows - 1, rows - 3, rows - 2], device=GPU)
    assert gather_positions(hidden, positions)[:, -1].tolist() == [2, 0, 1]


def test_gather_compiles_whole() -> None:
    positions = torch.tensor([3, 0, 0], device=GPU)
    leaves = [torch.ones(4, 64, device=GPU, requires_grad=True) for _ in range(2)]
    gather_positions(leaves[0] * 2, positions).square().sum().backward()
    compiled = torch.compile(lambda hidden: gather_positions(hidden * 2, positions).square().sum(), fullgraph=True)
    compiled(leaves[1]).backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)
