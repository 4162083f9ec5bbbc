"""Both paths of the "flash" backend on a GPU: rows this small would all take the gather."""

from functools import partial
from typing import Any

import pytest
import torch

from support.cuda import attend, check, needs_gpu, on_gpu
from support.forests import FORESTS, group, karied, make_inputs, positions_of, run
from treepack.kernels import flash_ops
from treepack.kernels.plan import TreePlan
from treepack.kernels.varlen import HAS_FLASH_ATTN

pytestmark = needs_gpu

SEGMENTS = [*group(330, [200, 1, 129, 64, 65]), *karied(2, 5, 70)]
PATHS = ["cascade", "gather"]


@pytest.fixture(params=PATHS)
def _path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash_ops, "flash_path", lambda plan, *, window, heads: request.param)


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize("name", [name for name in FORESTS if name != "empty"])
def test_every_forest(name: str) -> None:
    position_ids = positions_of(FORESTS[name])
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16, sinks=True, lse=False)
    check(position_ids, inputs, backend="flash")


@pytest.mark.usefixtures("_path")
@pytest.mark.parametrize(
    ("heads", "dims", "options"),
    [
        ((8, 1), (128, 128), {}),
        ((9, 3), (64, 64), {"scale": 0.5}),
        ((4, 4), (192, 128), {}),
        ((4, 2), (20, 36), {}),
        ((4, 2), (256, 256), {}),
        pytest.param(
            (4, 2),
            (64, 64),
            {"softcap": 20.0},
            marks=pytest.mark.skipif(not HAS_FLASH_ATTN, reason="needs the flash-attn package"),
        ),
    ],
    ids=str,
)
def test_options(heads: tuple[int, int], dims: tuple[int, int], options: dict[str, Any]) -> None:
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=heads, dims=dims, dtype=torch.float16, lse=False)
    check(position_ids, inputs, backend="flash", **options)


@pytest.mark.usefixtures("_path")
def test_deterministic_where_torch_is() -> None:
    """Case 11 (FA#2244): 30 runs, bit for bit."""
    position_ids = positions_of(SEGMENTS)
    inputs = make_inputs(len(position_ids), heads=(8, 2), dims=(128, 128), dtype=torch.bfloat16, sinks=True, lse=False)
    inputs, plan = on_gpu(inputs), TreePlan.from_position_ids(position_ids.cuda())
    ours = partial(attend, plan=plan, backend="flash", deterministic=True)
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (run(ours, inputs) for _ in range(30))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(other[name], result) for name, result in first.items())
