"""Gathering by position and its gradient, by the GPU's kernels: exact copies, sums within float32's rounding."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.packing import ROWS, guarded_memory
from treepack import pack_sequences
from treepack.kernels.gather import _gather_backward_on_gpu, _gather_on_gpu


def draw(num_rows: int, columns: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, columns, generator=torch.Generator().manual_seed(0)).to(dtype)


def exact_sums(grad: Tensor, positions: Tensor, num_rows: int) -> Tensor:
    return torch.zeros(num_rows, grad.shape[1], dtype=torch.float64).index_add_(0, positions, grad.double())


def check(num_rows: int, columns: int, positions: Tensor, dtype: torch.dtype) -> None:
    hidden, grad = draw(num_rows, columns, dtype), draw(len(positions), columns, dtype)
    with guarded_memory():
        out, summed = _gather_on_gpu(hidden, positions), _gather_backward_on_gpu(grad, positions, num_rows)
    assert torch.equal(out, hidden[positions])
    exact = exact_sums(grad, positions, num_rows)
    assert summed.dtype == dtype
    # The rounding of the sum, and of the result.
    largest = exact_sums(grad.abs(), positions, num_rows)
    precision = torch.float64 if dtype == torch.float64 else torch.float32
    budget = len(positions) * torch.finfo(precision).eps * largest + torch.finfo(dtype).eps * exact.abs()
    assert ((summed.double() - exact).abs() <= budget).all()
    unused = torch.ones(num_rows, dtype=torch.bool)
    unused[positions] = False
    assert (summed[unused] == 0).all()


@settings(max_examples=20)
@given(
    st.integers(1, 9),
    st.sampled_from([1, 7, 16, 72, 80, 600]),
    st.lists(st.integers(0, 8), max_size=40),
    st.sampled_from([torch.float32, torch.float16, torch.float64]),
    st.sampled_from([torch.int64, torch.int32]),
)
def test_any_positions(
    num_rows: int, columns: int, positions: list[int], dtype: torch.dtype, index_dtype: torch.dtype
) -> None:
    check(num_rows, columns, torch.tensor([p % num_rows for p in positions], dtype=index_dtype), dtype)


@pytest.mark.parametrize("name", ["duplicates", "forks of forks"])
def test_packed_sequences(name: str) -> None:
    packed = pack_sequences(ROWS[name])
    check(len(packed["input_ids"]), 5, packed["positions"], torch.float32)


def test_a_row_with_more_uses_than_a_tile_holds() -> None:
    positions = torch.cat([torch.zeros(70, dtype=torch.int64), torch.tensor([2, 1, 0])])
    check(3, 600, positions, torch.float16)
    ones = torch.ones(4096, 1, dtype=torch.float16)
    positions = torch.zeros(4096, dtype=torch.int64)
    assert _gather_backward_on_gpu(ones, positions, 1).item() == 4096  # in float16 the sum would stop at 2048


def test_results_repeat_bit_for_bit() -> None:
    positions = torch.randint(0, 5, (60,), generator=torch.Generator().manual_seed(1))
    grad = draw(60, 33)
    first = _gather_backward_on_gpu(grad, positions, 5)
    assert torch.equal(first, _gather_backward_on_gpu(grad, positions, 5))


def test_strides() -> None:
    positions = torch.tensor([3, 0, 0, 2])
    wide = draw(4, 40)
    for hidden in (wide[:, 3:19], wide[:, ::2], wide[:, :4].t(), wide.expand(4, 40)[:, :1].expand(4, 6)):
        assert torch.equal(_gather_on_gpu(hidden, positions), hidden[positions])
        grad = _gather_backward_on_gpu(hidden, positions, 5)
        torch.testing.assert_close(grad.double(), exact_sums(hidden, positions, 5))
    spread = torch.tensor([3, 9, 0, 9, 0, 9, 2, 9])[::2]
    assert torch.equal(_gather_on_gpu(wide, spread), wide[positions])


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """Case 7: the pages between the rows are never touched."""
    num_rows, stride = 20, 2**27
    assert (num_rows - 1) * stride > 2**31
    near = draw(num_rows, 8, torch.float16)
    storage = torch.empty((num_rows - 1) * stride + 8, dtype=torch.float16)
    far = storage.as_strided((num_rows, 8), (stride, 1)).copy_(near)
    positions = torch.tensor([19, 0, 18, 19])
    assert torch.equal(_gather_on_gpu(far, positions), near[positions])
    positions = torch.arange(num_rows) // 2
    found = _gather_backward_on_gpu(far, positions, 10)
    assert torch.equal(found, _gather_backward_on_gpu(near, positions, 10))


def test_positions_that_lie_outside_give_nan_and_no_gradient() -> None:
    hidden, positions = draw(3, 4), torch.tensor([0, 3, 2, -1])
    out = _gather_on_gpu(hidden, positions)
    assert out[[1, 3]].isnan().all()
    assert torch.equal(out[[0, 2]], hidden[[0, 2]])
    grad = torch.ones(4, 4)
    assert _gather_backward_on_gpu(grad, positions, 3)[:, 0].tolist() == [1, 0, 1]


@pytest.mark.parametrize(("num_rows", "columns", "gathered"), [(0, 4, 0), (3, 4, 0), (3, 0, 2)])
def test_empty(num_rows: int, columns: int, gathered: int) -> None:
    positions = torch.zeros(gathered, dtype=torch.int64)
    assert _gather_on_gpu(draw(num_rows, columns), positions).shape == (gathered, columns)
    grad = _gather_backward_on_gpu(draw(gathered, columns), positions, num_rows)
    assert torch.equal(grad, torch.zeros(num_rows, columns))
