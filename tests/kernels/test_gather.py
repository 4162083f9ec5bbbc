"""`gather_positions` on a CPU: sums in float32, double differentiability, tracing, and every refusal."""

import subprocess
import sys
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from support.tries import tries
from treepack import gather_positions, pack_sequences

POSITIONS = torch.tensor([4, 0, 0, 2, 0, 4])


def draw(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(5, 3, generator=torch.Generator().manual_seed(0), dtype=dtype).requires_grad_()


@given(tries(), st.sampled_from([torch.int32, torch.int64]))
def test_each_sequence_gets_its_own_rows_and_their_gradients(samples: list[Any], dtype: torch.dtype) -> None:
    sequences = [sample["input_ids"] for sample in samples]
    packed = pack_sequences(sequences)
    table = torch.arange(6.0).view(3, 2)
    hidden = table[packed["input_ids"]].requires_grad_()
    gathered = gather_positions(hidden, packed["positions"].to(dtype))
    for start, stop, ids in zip(packed["offsets"], packed["offsets"][1:], sequences):
        assert torch.equal(gathered[start:stop], table[torch.from_numpy(ids)])
    (uses,) = torch.autograd.grad(gathered.sum(), hidden)
    assert torch.equal(uses[:, 0], packed["positions"].bincount(minlength=len(hidden)).float())


@pytest.mark.parametrize(
    ("dtype", "uses"), [(torch.bfloat16, 1024), (torch.float16, 8192), (torch.float32, 3)], ids=str
)
def test_uses_are_summed_in_float32(dtype: torch.dtype, uses: int) -> None:
    """A sum of ones in bfloat16 stops at 256, in float16 at 2,048."""
    hidden = torch.zeros(2, 1, dtype=dtype, requires_grad=True)
    gather_positions(hidden, torch.zeros(uses, dtype=torch.int64)).sum().backward()
    assert hidden.grad is not None
    assert hidden.grad.tolist() == [[uses], [0]]
    assert hidden.grad.dtype == dtype


def test_opcheck() -> None:
    for hidden in (draw(), draw().half().detach().requires_grad_()):
        torch.library.opcheck(torch.ops.treepack.gather_positions, (hidden, POSITIONS))
    torch.library.opcheck(torch.ops.treepack.gather_positions_backward, (torch.ones(6, 3), POSITIONS, 5))


def test_gradients_of_any_order() -> None:
    def square(hidden: Tensor) -> Tensor:
        return gather_positions(hidden, POSITIONS).square()

    assert torch.autograd.gradcheck(square, draw(torch.float64))
    assert torch.autograd.gradgradcheck(square, draw(torch.float64))


def test_a_compiled_function_equals_the_eager_one() -> None:
    def layer(hidden: Tensor) -> Tensor:
        return gather_positions(hidden * 2, POSITIONS).square()

    results = [f(draw()) for f in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager"))]
    assert torch.equal(*results)
    leaves = [draw(), draw()]
    layer(leaves[0]).sum().backward()
    torch.compile(layer, fullgraph=True, backend="aot_eager")(leaves[1]).sum().backward()
    assert torch.equal(leaves[0].grad, leaves[1].grad)


def test_torch_func_transforms() -> None:
    def loss(hidden: Tensor) -> Tensor:
        return gather_positions(hidden, POSITIONS).square().sum()

    leaf = draw()
    assert torch.equal(torch.func.grad(loss)(leaf.detach()), torch.autograd.grad(loss(leaf), leaf)[0])


def test_nothing_to_gather() -> None:
    hidden = draw()
    gathered = gather_positions(hidden, POSITIONS[:0])
    assert gathered.shape == (0, 3)
    gathered.sum().backward()
    assert torch.equal(hidden.grad, torch.zeros(5, 3))
    assert gather_positions(torch.zeros(0, 3), POSITIONS[:0]).shape == (0, 3)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"hidden": [[1.0]]}, TypeError, "hidden must be a tensor, got list"),
        ({"positions": [0]}, TypeError, "positions must be a tensor, got list"),
        ({"hidden": torch.zeros(5, 3, dtype=torch.int64)}, TypeError, "hidden must be float16, .* got torch.int64"),
        ({"positions": POSITIONS.float()}, TypeError, "positions must be int32 or int64, got torch.float32"),
        ({"positions": POSITIONS > 0}, TypeError, "positions must be int32 or int64, got torch.bool"),
        ({"hidden": torch.zeros(1, 5, 3)}, ValueError, r"hidden must be \(N, H\), got shape \(1, 5, 3\)"),
        ({"positions": POSITIONS[None]}, ValueError, r"positions must be \(P,\), got shape \(1, 6\)"),
        ({"positions": POSITIONS + 1}, ValueError, r"positions must lie in \[0, 5\), got 5"),
        ({"positions": POSITIONS - 1}, ValueError, r"positions must lie in \[0, 5\), got -1"),
        ({"positions": POSITIONS.to("meta")}, ValueError, "positions must be on hidden's device cpu, got meta"),
        (
            {"hidden": torch.zeros(5, 3, device="meta"), "positions": POSITIONS.to("meta")},
            NotImplementedError,
            "hidden must be on a CPU or a CUDA or ROCm GPU, got meta",
        ),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        gather_positions(**{"hidden": torch.zeros(5, 3), "positions": POSITIONS, **arguments})


def test_importing_it_does_not_import_triton() -> None:
    script = "import sys, treepack.kernels.gather; print('triton' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
