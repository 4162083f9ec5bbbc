"""The backends over FlashAttention on a GPU, against float64: what takes the mark "unverified" off them.

Gradients are judged apart by name: a forward can be exact with gradients far off (FA#2623, #2756).
"""

from typing import Any

import pytest
import torch

from support.cuda import attend, check, needs_gpu, on_gpu
from support.forests import group, karied, make_inputs, positions_of
from treepack.kernels.fa4 import check_fa4
from treepack.kernels.plan import TreePlan

pytestmark = needs_gpu

DTYPES = [torch.bfloat16, torch.float16]
SEGMENTS = [*group(330, [200, 1, 129, 64, 65]), *karied(2, 5, 70)]
WITH_GATHER: dict[str, Any] = {"sliding_window": 100}


def fa4_is_here() -> bool:
    """Whether the package and a GPU that it takes are."""
    q = torch.zeros(1, 1, 128, device="cuda", dtype=torch.bfloat16)
    try:
        check_fa4(q, q)
    except NotImplementedError:
        return False
    return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("options", [{}, WITH_GATHER], ids=["levels", "gather"])
@pytest.mark.parametrize("dims", [(64, 64), (128, 128), (80, 80), (256, 256), (192, 128)], ids=str)
def test_flash(dims: tuple[int, int], options: dict[str, Any], sinks: bool, dtype: torch.dtype) -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=(8, 2), dims=dims, dtype=dtype, sinks=sinks, lse=False)
    check(position_ids, inputs, backend="flash", **options)


def test_a_gradient_through_lse_is_refused() -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = on_gpu(make_inputs(len(position_ids), dims=(64, 64), dtype=torch.bfloat16))
    plan = TreePlan.from_position_ids(position_ids.cuda())
    _, lse = attend(inputs.q, inputs.k, inputs.v, None, plan=plan, backend="flash")
    with pytest.raises(NotImplementedError, match="lse must have no gradient"):
        lse.sum().backward()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", [{}, {"sliding_window": 100}, {"softcap": 20.0}], ids=str)
@pytest.mark.parametrize("sinks", [False, True], ids=["no sinks", "sinks"])
@pytest.mark.parametrize("columns", [64, 128, 256])
def test_fa4(columns: int, sinks: bool, options: dict[str, Any], deterministic: bool) -> None:
    if not fa4_is_here():
        pytest.skip("needs flash-attn-4 and a Hopper GPU")
    position_ids = positions_of(SEGMENTS)
    dims = (columns, columns)
    inputs = make_inputs(len(position_ids), heads=(8, 2), dims=dims, dtype=torch.bfloat16, sinks=sinks, lse=False)
    check(position_ids, inputs, backend="fa4", deterministic=deterministic, **options)
