"""Tree attention on a GPU against float64, forward and every gradient: all variants and dtypes.

bfloat16 is only ever tested here: Triton's interpreter computes it wrongly.
"""

from typing import Any

import pytest
import torch

from support.cuda import check, needs_gpu
from support.forests import FORESTS, group, make_inputs, positions_of
from treepack.kernels.plan import TreePlan
from treepack.kernels.schedule import build_schedule, query_stops

pytestmark = needs_gpu

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# Longer than several tiles, with short and long branches, and a second root.
SEGMENTS = [*group(330, [200, 1, 129, 64, 65]), *group(64, [48, 300])]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 100},
    "softcap": {"softcap": 15.0},
    "scale 1": {"scale": 1.0},
    "all": {"sliding_window": 150, "softcap": 20.0, "scale": 0.2},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "dims", [(16, 16), (64, 64), (72, 72), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256), (64, 128)], ids=str
)
def test_head_dims(dims: tuple[int, int], dtype: torch.dtype) -> None:
    position_ids = positions_of(SEGMENTS)
    check(position_ids, make_inputs(len(position_ids), heads=(4, 1), dims=dims, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("options", OPTIONS)
def test_options(options: str, sinks: bool, dtype: torch.dtype) -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=(8, 2), dims=(64, 64), dtype=dtype, sinks=sinks)
    check(position_ids, inputs, **OPTIONS[options])


@pytest.mark.parametrize("dims", [(128, 128), (256, 256), (192, 128)], ids=str)
def test_all_options_at_large_head_dims(dims: tuple[int, int]) -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=(8, 2), dims=dims, dtype=torch.bfloat16, sinks=True)
    check(position_ids, inputs, **OPTIONS["all"])


@pytest.mark.parametrize("heads", [(1, 1), (28, 4), (12, 2), (9, 3), (8, 1), (37, 1), (6, 6)], ids=str)
def test_head_ratios(heads: tuple[int, int]) -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=heads, dims=(64, 64), dtype=torch.bfloat16)
    check(position_ids, inputs)


@pytest.mark.parametrize("options", ["plain", "window"])
@pytest.mark.parametrize("forest", [name for name in FORESTS if name != "empty"])
def test_forests(forest: str, options: str) -> None:
    position_ids = positions_of(FORESTS[forest])
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16)
    check(position_ids, inputs, **OPTIONS[options])


@pytest.mark.parametrize("num_tokens", [1, 31, 127, 129, 137, 1025])
def test_lengths_of_public_reports(num_tokens: int) -> None:
    inputs = make_inputs(num_tokens, heads=(2, 1), dims=(64, 64), dtype=torch.bfloat16)
    check(torch.arange(num_tokens), inputs, softcap=20.0)


def test_a_gradient_of_lse_is_not_needed() -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=(4, 1), dims=(128, 128), dtype=torch.bfloat16, lse=False, sinks=True)
    check(position_ids, inputs)


def test_float32_is_not_rounded_to_tf32() -> None:
    """One rounding of the inputs to tf32 (2^-11) would be hundreds of times the error that float32 has."""
    assert torch.get_float32_matmul_precision() == "highest"
    position_ids = torch.arange(300)
    inputs = make_inputs(300, heads=(2, 1), dims=(128, 128))
    check(position_ids, inputs)


@pytest.mark.parametrize("window", [None, 1, 40])
@pytest.mark.parametrize("forest", FORESTS)
def test_the_plan_and_its_schedule_equal_the_cpu_ones(forest: str, window: int | None) -> None:
    position_ids = positions_of(FORESTS[forest])
    on_cpu, on_gpu = (TreePlan.from_position_ids(ids) for ids in (position_ids, position_ids.cuda()))
    assert torch.equal(on_gpu.subtree_end.cpu(), on_cpu.subtree_end)
    assert torch.equal(on_gpu.depth.cpu(), on_cpu.depth)
    if not len(position_ids):
        return
    stops = [query_stops(plan.subtree_end, plan.depth, window).cpu() for plan in (on_cpu, on_gpu)]
    assert torch.equal(*stops)
    for capacity in (None, 4 * len(position_ids)):
        expected, found = (
            build_schedule(plan.subtree_end, plan.depth, block_q=32, block_k=64, window=window, capacity=capacity)
            for plan in (on_cpu, on_gpu)
        )
        assert torch.equal(found.range_ptr.cpu(), expected.range_ptr)
        used = int(expected.range_ptr[-1])
        assert torch.equal(found.ranges[:used].cpu(), expected.ranges[:used])
        assert not found.overflow
