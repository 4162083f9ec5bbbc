"""Addresses beyond 2^31, many segments, untouched neighbours, and what compute-sanitizer has to say."""

import shutil
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from support.cuda import attend, needs_gpu, on_gpu
from support.forests import Inputs, group, make_inputs, positions_of, run
from support.triton_kernels import guarded_memory
from treepack.kernels.plan import TreePlan

pytestmark = needs_gpu

SANITIZED = Path(__file__).with_name("sanitized_case.py")


def test_offsets_beyond_two_to_the_31_elements() -> None:
    """262,144 tokens, 8,192 elements apart in a fused projection (FA#2611, sglang#20389)."""
    num_tokens, stride, columns = 262_144, 8_192, 64
    position_ids = torch.arange(64, device="cuda").repeat(num_tokens // 64)
    plan = TreePlan.from_position_ids(position_ids)
    fused = torch.empty(num_tokens, stride, dtype=torch.bfloat16, device="cuda")
    # The last columns of the row, so that even the first head lies beyond.
    views = [part.unflatten(1, (-1, columns)) for part in fused[:, -384:].split([128, 64, 64, 128], 1)]
    generator = torch.Generator("cuda").manual_seed(0)
    for view in views:
        view.normal_(generator=generator)
    assert (num_tokens - 1) * stride + stride > 2**31
    far, near = (
        Inputs(*(copy(t).requires_grad_() for t in views[:3]), None, copy(views[3]), None)
        for copy in (Tensor.detach, Tensor.clone)
    )
    assert not far.q.is_contiguous()
    results = [run(partial(attend, plan=plan), inputs) for inputs in (far, near)]
    for name, expected in results[1].items():
        assert torch.equal(results[0][name], expected), name


@pytest.mark.parametrize("num_tokens", [70_000, 140_000])
def test_more_segments_than_a_grid_axis_is_long(num_tokens: int) -> None:
    """All alike, so that one of them tells the result (fla#1077, Liger#1294)."""
    position_ids = torch.arange(2, device="cuda").repeat(num_tokens // 2)
    small = on_gpu(make_inputs(2, heads=(2, 1), dims=(16, 16), dtype=torch.bfloat16, lse=False))
    large = Inputs(
        **{
            name: None if t is None else t.detach().repeat(num_tokens // 2, 1, 1).requires_grad_(t.requires_grad)
            for name, t in vars(small).items()
        }
    )
    expected = run(partial(attend, plan=TreePlan.from_position_ids(torch.arange(2, device="cuda"))), small)
    found = run(partial(attend, plan=TreePlan.from_position_ids(position_ids)), large)
    for name, target in expected.items():
        repeated = target.repeat(num_tokens // 2, *[1] * (target.dim() - 1))
        torch.testing.assert_close(found[name], repeated, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("columns", [72, 80, 96, 120, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_nothing_is_written_past_the_columns_and_nothing_left_out(columns: int, dtype: torch.dtype) -> None:
    position_ids = positions_of(group(130, [60, 1, 129])).cuda()
    inputs = on_gpu(make_inputs(len(position_ids), heads=(3, 1), dims=(columns, columns), dtype=dtype))
    plan = TreePlan.from_position_ids(position_ids)
    with guarded_memory():
        run(partial(attend, plan=plan), inputs)


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer")
def test_compute_sanitizer_finds_nothing() -> None:
    command = ["compute-sanitizer", "--error-exitcode", "3", sys.executable, str(SANITIZED)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if "not supported" in result.stdout:
        pytest.skip("compute-sanitizer cannot use this device")
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "ERROR SUMMARY: 0 errors" in result.stdout
