"""The CPU path against the float64 oracle: outputs and every gradient, judged by the worst segment."""

import subprocess
import sys
import textwrap
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from support.forests import (
    FORESTS,
    Inputs,
    assert_close,
    exact_results,
    forests,
    group,
    make_inputs,
    paths_of,
    plain_attention,
    positions_of,
    run,
)
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan

HALF = [torch.bfloat16, torch.float16]


def check(position_ids: Tensor, inputs: Inputs, **options: Any) -> None:
    plan = TreePlan.from_position_ids(position_ids)

    def ours(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return tree_attention(q, k, v, plan=plan, sinks=sinks, return_lse=True, **options)

    found = run(ours, inputs)
    plain = run(partial(plain_attention, plan=plan, **options), inputs)
    assert_close(found, exact_results(inputs, plan, **options), plain, plan)


OPTIONS: list[dict[str, Any]] = [
    {},
    {"scale": 1.0},
    {"sliding_window": 1},
    {"sliding_window": 50},
    {"softcap": 2.0},
    {"softcap": 5.0, "sliding_window": 130, "scale": 0.4},
]


@pytest.mark.parametrize("sinks", [False, True], ids=["", "sinks"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", FORESTS)
def test_every_shape_of_forest_with_every_option(name: str, options: dict[str, Any], sinks: bool) -> None:
    position_ids = positions_of(FORESTS[name])
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(16, 24), sinks=sinks, lse=sinks)
    check(position_ids, inputs, **options)


@settings(max_examples=60)
@given(
    position_ids=forests(max_segments=8),
    heads=st.sampled_from([(1, 1), (2, 1), (3, 3), (6, 2)]),
    dims=st.sampled_from([(16, 16), (24, 8), (8, 32)]),
    dtype=st.sampled_from([torch.float32, torch.float64, *HALF]),
    sinks=st.booleans(),
    lse=st.booleans(),
    window=st.sampled_from([None, None, 1, 3, 64, 200]),
    softcap=st.sampled_from([None, None, 1.5]),
    seed=st.integers(0, 1000),
)
def test_any_forest_with_any_options(
    position_ids: Tensor,
    heads: tuple[int, int],
    dims: tuple[int, int],
    dtype: torch.dtype,
    sinks: bool,
    lse: bool,
    window: int | None,
    softcap: float | None,
    seed: int,
) -> None:
    inputs = make_inputs(len(position_ids), heads, dims, dtype, sinks, lse, seed)
    check(position_ids, inputs, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize("length", [127, 129, 137, 1025])
def test_odd_lengths_with_softcap_in_bfloat16(length: int) -> None:
    """Case 1 (pytorch#153799, attention-gym#50)."""
    check(torch.arange(length), make_inputs(length, dims=(64, 64), dtype=torch.bfloat16), softcap=20.0)


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_keys_without_a_weighted_query_get_exactly_zero_gradients(softcap: float | None) -> None:
    """Case 2 (pytorch#158212): only one completion has a gradient, and nothing leaks into its siblings."""
    position_ids = positions_of([*group(70, [30, 90, 3]), (0, 80)])
    inputs = make_inputs(len(position_ids), heads=(4, 2))
    grad_out = torch.zeros_like(inputs.grad_out)
    trained = slice(100, 190)
    grad_out[trained] = inputs.grad_out[trained]
    out = tree_attention(inputs.q, inputs.k, inputs.v, position_ids=position_ids, softcap=softcap)
    visited = torch.zeros(len(position_ids), dtype=torch.bool)
    visited[:70] = visited[trained] = True
    for grad in torch.autograd.grad(out, (inputs.k, inputs.v), grad_out):
        assert bool((grad[~visited] == 0).all())
        assert bool((grad[visited].abs().amax((1, 2)) > 0).all())


@pytest.mark.parametrize("softcap", [None, 10.0])
@pytest.mark.parametrize("scale", [None, 1.0])
@pytest.mark.parametrize("head_dim", [16, 64, 72, 80, 128, 256])
def test_each_gradient_at_every_head_dim(head_dim: int, scale: float | None, softcap: float | None) -> None:
    """Case 3 (FA#2623, fla#984)."""
    position_ids = positions_of(group(65, [64, 1, 33]))
    check(position_ids, make_inputs(len(position_ids), dims=(head_dim, head_dim)), scale=scale, softcap=softcap)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_every_segment_one_token(options: dict[str, Any]) -> None:
    """Case 4 (FA#1537), at 9:3 heads: no sharing at all, and a prompt of one token."""
    for position_ids in (torch.zeros(150, dtype=torch.int64), positions_of(group(1, [1] * 149))):
        check(position_ids, make_inputs(150, heads=(9, 3), sinks=True), **options)


def test_large_heads_with_one_token_rows_are_finite() -> None:
    """Case 5 (FA#2562): 4:1 heads, head dim 256, sequences with next to nothing to see."""
    position_ids = positions_of([(0, 1), (0, 1), *group(3, [1, 200]), (0, 1)])
    check(position_ids, make_inputs(len(position_ids), heads=(4, 1), dims=(256, 256)), sliding_window=2)


@pytest.mark.parametrize("fused", ["heads", "transposed"])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_strided_views_of_a_fused_projection(fused: str, softcap: float | None) -> None:
    """Case 7 (FA#2611, sglang#20389)."""
    position_ids = positions_of(FORESTS["block sizes"])
    count = len(position_ids)
    generator = torch.Generator().manual_seed(0)
    if fused == "heads":
        qkv = torch.randn(count, 8, 16, generator=generator).requires_grad_()
    else:  # the elements of a head lie apart
        qkv = torch.randn(16, 8, count, generator=generator).requires_grad_()
    view = qkv if fused == "heads" else qkv.permute(2, 1, 0)
    q, k, v = view.split([4, 2, 2], dim=1)
    assert not q.is_contiguous()
    attend = partial(tree_attention, position_ids=position_ids, softcap=softcap)
    expected = attend(q.contiguous(), k.contiguous(), v.contiguous())
    torch.testing.assert_close(attend(q, k, v), expected, rtol=0, atol=1e-6)
    weight = torch.randn(expected.shape, generator=generator)
    found, wanted = (torch.autograd.grad((out * weight).sum(), qkv)[0] for out in (attend(q, k, v), expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("heads", [(28, 4), (12, 2), (9, 3), (8, 1), (5, 5)])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_head_ratios(heads: tuple[int, int], softcap: float | None) -> None:
    """Case 10 (pytorch#143117, attention-gym#81)."""
    position_ids = positions_of(FORESTS["prompts"])
    check(position_ids, make_inputs(len(position_ids), heads=heads), softcap=softcap)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 40, "softcap": 3.0}], ids=str)
def test_thirty_runs_are_bitwise_equal(options: dict[str, Any]) -> None:
    """Case 11 (FA#2244)."""
    position_ids = positions_of(FORESTS["block sizes"])
    inputs = make_inputs(len(position_ids), heads=(4, 2), sinks=True)
    plan = TreePlan.from_position_ids(position_ids)

    def once() -> dict[str, Tensor]:
        return run(
            lambda q, k, v, sinks: tree_attention(
                q, k, v, plan=plan, sinks=sinks, deterministic=True, return_lse=True, **options
            ),
            inputs,
        )

    first = once()
    for _ in range(29):
        assert all(torch.equal(result, first[name]) for name, result in once().items())


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_half_precision(dtype: torch.dtype, options: dict[str, Any]) -> None:
    position_ids = positions_of(FORESTS["block sizes"])
    check(position_ids, make_inputs(len(position_ids), dtype=dtype, sinks=True), **options)


@pytest.mark.parametrize("options", [{}, {"sliding_window": 30}, {"softcap": 3.0}], ids=str)
def test_changing_one_branch_leaves_the_others_bitwise_unchanged(options: dict[str, Any]) -> None:
    """Case 17 (verl#6689): P -> {A -> R0, R1; B -> R2, R3}, short and long."""
    for scale in (1, 20):
        lengths = [scale * n for n in (5, 4, 3, 6, 4, 3, 6)]
        p, a, r0, r1, b, r2, r3 = lengths
        segments = [(0, p), (p, a), (p + a, r0), (p + a, r1), (p, b), (p + b, r2), (p + b, r3)]
        position_ids = positions_of(segments)
        inputs = make_inputs(len(position_ids), heads=(4, 2))
        attend = partial(tree_attention, position_ids=position_ids, return_lse=True, **options)
        tensors = [t.detach() for t in (inputs.q, inputs.k, inputs.v)]
        changed = [t.clone() for t in tensors]
        for tensor in changed:
            tensor[p : p + a] += 1.0
        (out, lse), (new_out, new_lse) = attend(*tensors), attend(*changed)
        start_b = p + a + r0 + r1
        for unchanged in (slice(0, p), slice(start_b, None)):
            assert torch.equal(out[unchanged], new_out[unchanged])
            assert torch.equal(lse[:, unchanged], new_lse[:, unchanged])
        assert not torch.equal(out[p:start_b], new_out[p:start_b])


def test_a_packed_row_equals_torchs_attention_of_each_sequence() -> None:
    position_ids = positions_of(FORESTS["group"])
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(32, 32))
    out = tree_attention(inputs.q, inputs.k, inputs.v, position_ids=position_ids)
    for path in paths_of(position_ids):
        q, k, v = (t[path].transpose(0, 1)[None] for t in (inputs.q, inputs.k, inputs.v))
        expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
        torch.testing.assert_close(out[path], expected, rtol=1e-5, atol=1e-5)


def test_extreme_scores_do_not_overflow() -> None:
    position_ids = positions_of(FORESTS["prompts"])
    inputs = make_inputs(len(position_ids))
    for options in ({}, {"softcap": 500.0}, {"sliding_window": 5}):
        out = tree_attention(inputs.q * 1e3, inputs.k * 1e3, inputs.v, position_ids=position_ids, **options)
        assert out.isfinite().all()
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (inputs.q, inputs.k, inputs.v)))


MEMORY_SCRIPT = """
    import resource, torch
    from treepack.kernels.ops import tree_attention

    torch.set_num_threads(1)
    torch.manual_seed(0)
    turns = 50
    position_ids = torch.cat(
        [p for t in range(turns) for p in (torch.arange(t * 1000, (t + 1) * 1000),
                                           torch.arange((t + 1) * 1000, (t + 1) * 1000 + 201))])
    assert len(position_ids) == 60_050
    q, k, v = (torch.randn(60_050, 1, 16, requires_grad=True) for _ in range(3))

    def peak(**options):
        out = tree_attention(q, k, v, position_ids=position_ids, **options)
        out.sum().backward()
        assert all(t.grad.isfinite().all() for t in (q, k, v))
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    small = torch.arange(300)  # loads what the kernels load
    tree_attention(q[:300], k[:300], v[:300], position_ids=small, softcap=3.0, sliding_window=9).sum().backward()
    tree_attention(q[:300], k[:300], v[:300], position_ids=small).sum().backward()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print((peak() - before) // 1024, (peak(sliding_window=512, softcap=20.0) - before) // 1024)
"""


def test_memory_is_linear_in_unique_tokens() -> None:
    """Case 18: 60,050 unique tokens of 2,560,000 gathered rows (164 MB a tensor here; an N x N mask is 3.6 GB).

    One (N, 1, 16) tensor is 3.7 MB, and a handful of them is all that is needed.
    """
    script = textwrap.dedent(MEMORY_SCRIPT)
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    fused, softcapped = map(int, result.stdout.split())
    assert fused <= 100, f"{fused} MiB"
    assert softcapped <= 100, f"{softcapped} MiB"
