"""The algebra of the "flash" backend over a dense varlen attention: both paths, every option, and every refusal."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from support.forests import (
    FORESTS,
    assert_close,
    comb,
    exact_results,
    forests,
    group,
    make_inputs,
    plain_attention,
    positions_of,
    run,
)
from support.varlen import DenseVarlen, flash_attention, register_on_cpu
from treepack.kernels import flash_ops, levels, varlen
from treepack.kernels.flash import row_attention
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan
from treepack.kernels.varlen import TorchVarlen, VarlenCall

SMALL = [name for name in FORESTS if name not in ("thousand leaves", "one-token comb", "branch at every offset")]
register_on_cpu()


def check(
    position_ids: Tensor,
    *,
    path: Any,
    heads: tuple[int, int] = (4, 2),
    dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float32,
    sinks: bool = False,
    **options: Any,
) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    inputs = make_inputs(len(position_ids), heads=heads, dims=dims, dtype=dtype, sinks=sinks, lse=False)
    found = run(partial(flash_attention, plan=plan, path=path, **options), inputs)
    plain = run(partial(plain_attention, plan=plan, **options), inputs)
    assert_close(found, exact_results(inputs, plan, **options), plain, plan)


@pytest.mark.parametrize("path", ["cascade", "gather"])
@pytest.mark.parametrize("name", SMALL)
def test_both_paths_on_every_forest(name: str, path: str) -> None:
    check(positions_of(FORESTS[name]), path=path, sinks=True)


@pytest.mark.parametrize("name", ["thousand leaves", "branch at every offset"])
def test_many_segments(name: str) -> None:
    check(positions_of(FORESTS[name]), path="cascade", heads=(2, 1))


@settings(max_examples=40)
@given(forests(max_segments=8), st.sampled_from(["cascade", "gather"]), st.booleans())
def test_any_forest(position_ids: Tensor, path: str, sinks: bool) -> None:
    check(position_ids, path=path, heads=(2, 1), dims=(8, 8), sinks=sinks)


@settings(max_examples=40)
@given(forests(max_segments=8), st.sampled_from([1, 2, 5, 64, 130, 1000]))
def test_any_forest_in_a_window(position_ids: Tensor, window: int) -> None:
    check(position_ids, path="gather", heads=(2, 1), dims=(8, 8), sliding_window=window)


@pytest.mark.parametrize("path", ["cascade", "gather"])
@pytest.mark.parametrize(
    "options",
    [
        {"heads": (8, 1), "sinks": True},
        {"heads": (9, 3)},
        {"heads": (7, 7), "scale": 1.0},
        {"dims": (24, 16), "sinks": True},
        {"dims": (20, 32)},
        {"dims": (3, 5)},
        {"softcap": 2.0, "sinks": True},
        {"dtype": torch.bfloat16, "sinks": True},
        {"dtype": torch.float16},
    ],
    ids=str,
)
def test_options(options: dict[str, Any], path: str) -> None:
    check(positions_of([*group(40, [9, 70, 1]), *comb(4, 6, 3)]), path=path, **options)


@pytest.mark.parametrize(("name", "levels_below"), [("group", 1), ("binary", 5), ("one-token comb", 199), ("chain", 0)])
def test_the_cascade_makes_one_call_a_level(name: str, levels_below: int) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS[name]))
    kernel = DenseVarlen(0.25)
    inputs = make_inputs(plan.num_tokens, heads=(1, 1), dims=(8, 8))
    with torch.no_grad():
        row_attention(kernel, plan, window=None, path="cascade").forward(inputs.q, inputs.k, inputs.v)
    assert kernel.calls == 1 + levels_below


def test_a_window_shortens_the_copies() -> None:
    plan = TreePlan.from_position_ids(positions_of(group(1000, [10] * 8)))
    assert len(levels.path_index(plan.segments, None)) == 1000 + 8 * 1010
    assert len(levels.path_index(plan.segments, 5)) == 1000 + 8 * 14


@settings(max_examples=60)
@given(forests(), st.sampled_from([None, 1, 3, 100]))
def test_paths_are_each_segments_ancestors(position_ids: Tensor, window: int | None) -> None:
    plan = TreePlan.from_position_ids(position_ids)
    segments = plan.segments
    end, depth = plan.subtree_end.tolist(), plan.depth.tolist()
    reach = len(end) + 1 if window is None else window
    expected: list[int] = []
    for start, stop in zip(segments.start.tolist(), segments.stop.tolist()):
        expected += [j for j in range(start) if end[j] > start and depth[start] - depth[j] < reach]
        expected += range(start, stop)
    assert levels.path_index(segments, window).tolist() == expected
    assert int(levels.path_lengths(segments, window).sum()) == len(expected)


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = make_inputs(len(POSITIONS), heads=(4, 2), dims=(16, 8), dtype=dtype, sinks=True)
    assert inputs.sinks is not None
    return inputs.q, inputs.k, inputs.v, inputs.sinks


POSITIONS = positions_of([*group(20, [9, 1, 14]), (0, 70), (0, 1)])
PLAN = TreePlan.from_position_ids(POSITIONS)


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("window", [None, 9])
def test_opcheck(window: int | None, with_sinks: bool) -> None:
    q, k, v, sinks = draw()
    arguments = q, k, v, sinks if with_sinks else None, PLAN.subtree_end, PLAN.depth
    options = 0.25, window, None, False, "flash"

    # The check of autograd would ask for the gradient of lse, which is refused.
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.treepack.flash_attention, (*arguments, *options), test_utils=checks)
    plain = [None if t is None else t.detach() for t in arguments]
    out, lse = torch.ops.treepack.flash_attention(*plain, *options)
    torch.library.opcheck(
        torch.ops.treepack.flash_attention_backward, (torch.ones_like(out), *plain, out, lse, *options)
    )


def test_the_op_traces_whole_with_its_gradient() -> None:
    leaves = draw()

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        options = 0.25, None, None, False, "flash"
        return flash_ops.flash_attention(q * 2, k, v, sinks, PLAN.subtree_end, PLAN.depth, *options)[0].square()

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    expected, found = layer(*leaves), compiled(*leaves)
    torch.testing.assert_close(found, expected)
    grads = [torch.autograd.grad(out.sum(), leaves) for out in (expected, found)]
    for wanted, got in zip(*grads):
        torch.testing.assert_close(got, wanted)


def test_a_gradient_through_lse_is_refused() -> None:
    q, k, v, _ = draw()
    _, lse = flash_ops.flash_attention(q, k, v, None, PLAN.subtree_end, PLAN.depth, 0.25, None, None, False, "flash")
    with pytest.raises(NotImplementedError, match="lse must have no gradient with backend 'flash'"):
        lse.sum().backward()


@pytest.fixture
def fake_gpu() -> Iterator[FakeTensorMode]:
    """CUDA tensors without data: shapes and signatures are checked for real, kernels do not run."""
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        yield mode


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"softcap": 3.0}, NotImplementedError, "softcap must be None for backend 'flash' without the flash-attn"),
        ({"deterministic": True}, NotImplementedError, "deterministic must be False for backend 'flash', got True"),
        ({"dtype": torch.float32}, TypeError, "q must be float16 or bfloat16 for backend 'flash', got torch.float32"),
        ({"dim": 264}, NotImplementedError, "q must have a head dim of at most 256 for backend 'flash', got 264"),
        ({"backend": "fa4", "dim": 96}, NotImplementedError, "one head dim out of 64, 128, 256 for backend 'fa4'"),
        ({"backend": "fa4", "dtype": torch.float32}, TypeError, "q must be float16 or bfloat16 for backend 'fa4'"),
    ],
    ids=str,
)
def test_what_a_gpu_is_refused(
    fake_gpu: FakeTensorMode, arguments: dict[str, Any], error: type[Exception], message: str
) -> None:
    """Case 14 (unsloth#6871): an option that the path cannot honour raises."""
    dim, dtype = arguments.pop("dim", 64), arguments.pop("dtype", torch.bfloat16)
    q, k = (torch.empty(8, heads, dim, dtype=dtype, device="cuda") for heads in (4, 2))
    with pytest.raises(error, match=message):
        tree_attention(q, k, k, plan=PLAN, **{"backend": "flash", **arguments})


def test_what_a_gpu_is_not_refused_reaches_the_op(fake_gpu: FakeTensorMode) -> None:
    q, k, v = (
        torch.empty(8, heads, dim, dtype=torch.half, device="cuda") for heads, dim in ((4, 80), (2, 80), (2, 24))
    )
    plan = TreePlan(*(torch.empty(8, dtype=torch.int32, device="cuda") for _ in range(2)))
    out, lse = tree_attention(q, k, v, plan=plan, sliding_window=3, backend="flash", return_lse=True)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((8, 4, 24), torch.half, (4, 8), torch.float32)


@pytest.mark.parametrize("backend", ["flash", "fa4"])
def test_a_cpu_is_refused(backend: Any) -> None:
    q = torch.zeros(len(POSITIONS), 1, 8, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=f"backend '{backend}' must get tensors on a CUDA or ROCm GPU, got cpu"):
        tree_attention(q, q, q, plan=PLAN, backend=backend)


@pytest.mark.parametrize("window", [None, 7])
def test_torchs_varlen_attention_takes_our_arguments(fake_gpu: FakeTensorMode, window: int | None) -> None:
    q, k = (torch.empty(30, heads, 64, dtype=torch.bfloat16, device="cuda") for heads in (4, 2))
    boundaries = torch.tensor([0, 10, 30], dtype=torch.int32, device="cuda")
    call = VarlenCall(boundaries, boundaries, 20, 20, causal=True, window=window)
    kernel = TorchVarlen(0.125)
    out, lse = kernel.forward(call, q, k, k)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, (4, 30), torch.float32)
    dq, dk, dv = kernel.backward(call, out, q, k, k, out, lse)
    assert (dq.shape, dk.shape, dv.shape) == (q.shape, k.shape, k.shape)


@pytest.mark.parametrize(
    ("causal", "window", "sides"), [(True, None, (-1, 0)), (False, None, (-1, -1)), (True, 7, (6, 0))]
)
def test_windows_in_the_libraries_terms(causal: bool, window: int | None, sides: tuple[int, int]) -> None:
    boundaries = torch.zeros(1, dtype=torch.int32)
    assert varlen._window_sides(VarlenCall(boundaries, boundaries, 0, 0, causal, window)) == sides
