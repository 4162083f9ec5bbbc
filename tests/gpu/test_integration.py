"""What a trainer does with the op on a GPU: repeat, compile, checkpoint, capture it, run it in lower precision."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from support.cuda import attend, needs_gpu, on_gpu
from support.forests import Inputs, group, karied, make_inputs, positions_of, run
from treepack.kernels.configs import attention_config
from treepack.kernels.gpu import device_limits
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan

pytestmark = needs_gpu

SEGMENTS = [*group(330, [200, 1, 129, 64, 65]), *karied(3, 3, 40)]
OPTIONS: list[dict[str, Any]] = [{}, {"sliding_window": 90, "softcap": 20.0}]


def draw(dtype: torch.dtype = torch.bfloat16, *, lse: bool = False) -> tuple[TreePlan, Inputs]:
    plan = TreePlan.from_position_ids(positions_of(SEGMENTS).cuda())
    inputs = make_inputs(plan.num_tokens, heads=(8, 2), dims=(128, 128), dtype=dtype, sinks=True, lse=lse)
    return plan, on_gpu(inputs)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_thirty_runs_are_bitwise_equal(options: dict[str, Any], deterministic: bool) -> None:
    plan, inputs = draw(lse=True)
    once = partial(run, partial(attend, plan=plan, deterministic=deterministic, **options), inputs)
    first = once()
    for _ in range(29):
        for name, result in once().items():
            assert torch.equal(result, first[name]), name


def test_a_branch_does_not_move_its_siblings() -> None:
    """P -> {A, B}: other tokens in A leave every result of B bit for bit (verl#6689)."""
    plan = TreePlan.from_position_ids(positions_of(group(200, [130, 170])).cuda())
    inputs = on_gpu(make_inputs(plan.num_tokens, heads=(4, 2), dims=(64, 64), dtype=torch.bfloat16))
    before = run(partial(attend, plan=plan), inputs)
    with torch.no_grad():
        for leaf in (inputs.q, inputs.k, inputs.v):
            leaf[200:330] += 1
    after = run(partial(attend, plan=plan), inputs)
    for name in ("out", "lse", "dq"):
        assert torch.equal(before[name][330:], after[name][330:]), name
        assert not torch.equal(before[name][200:330], after[name][200:330]), name


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_a_compiled_function_equals_the_eager_one(options: dict[str, Any]) -> None:
    plan, inputs = draw()

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        return attend(q, k, v, sinks, plan=plan, **options)

    expected = run(layer, inputs)
    found = run(torch.compile(layer, fullgraph=True), inputs)
    for name, result in found.items():
        assert torch.equal(result, expected[name]), name


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    plan, inputs = draw()

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
        return tree_attention(q, k, v, plan=plan, sinks=sinks)

    def checkpointed(*tensors: Tensor) -> Any:
        return checkpoint(layer, *tensors, use_reentrant=reentrant)

    leaves = list(inputs.leaves.values())
    grads = []
    for attention in (layer, checkpointed):
        out = attention(*leaves)
        for leaf in leaves:
            leaf.grad = None
        out.backward(inputs.grad_out)
        grads.append([leaf.grad for leaf in leaves])
    assert all(torch.equal(*pair) for pair in zip(*grads))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_what_is_in_float32(dtype: torch.dtype) -> None:
    plan, inputs = draw(torch.float32)
    with torch.autocast("cuda", dtype=dtype):
        out = tree_attention(inputs.q, inputs.k, inputs.v, plan=plan)
    assert out.dtype == dtype
    cast = [t.detach().to(dtype) for t in (inputs.q, inputs.k, inputs.v)]
    assert torch.equal(out, tree_attention(*cast, plan=plan))
    (grad,) = torch.autograd.grad(out.float().sum(), inputs.q)
    assert grad.dtype == torch.float32


def test_a_captured_graph_replays_on_new_values() -> None:
    plan, inputs = draw()
    tensors = [t.detach() for t in (inputs.q, inputs.k, inputs.v)]
    expected = tree_attention(*tensors, plan=plan)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        captured = [torch.zeros_like(t) for t in tensors]
        tree_attention(*captured, plan=plan)  # compiles, and builds the plan's schedule
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = tree_attention(*captured, plan=plan)
    for target, source in zip(captured, tensors):
        target.copy_(source)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, expected)


def test_a_schedule_of_fixed_capacity_waits_for_nothing() -> None:
    plan, inputs = draw()
    expected = tree_attention(inputs.q, inputs.k, inputs.v, plan=plan)
    fresh = TreePlan(plan.subtree_end.clone(), plan.depth.clone())
    config = attention_config(128, 128, torch.bfloat16, group=4, device=device_limits(plan.depth.device))
    block_q, block_k = config.forward.block_m // config.pack, config.forward.block_n
    torch.cuda.set_sync_debug_mode("error")
    try:
        schedule = fresh.schedule(block_q, block_k, capacity=4096)
        out = tree_attention(inputs.q, inputs.k, inputs.v, plan=fresh)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not schedule.overflow
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


def test_memory_is_linear_in_unique_tokens() -> None:
    """50 turns of 1,000 tokens, a side branch of 200 a turn: a gather would copy 2,560,000 rows."""
    segments = [s for turn in range(50) for s in ((turn * 1000, 1000), ((turn + 1) * 1000, 200))]
    position_ids = positions_of([*segments, (50_000, 50)]).cuda()
    shapes = [(len(position_ids), heads, 128) for heads in (8, 2, 2)]
    q, k, v = (torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = tree_attention(q, k, v, position_ids=position_ids)
    torch.autograd.grad(out, (q, k, v), out.detach())
    used = torch.cuda.max_memory_allocated() - before
    tensors = sum(t.numel() * t.element_size() for t in (q, k, v))
    assert used < 4 * tensors
