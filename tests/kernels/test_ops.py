"""The public op: tracing, transforms, double precision gradients, and every refusal."""

import subprocess
import sys
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from support.forests import FORESTS, comb, group, make_inputs, positions_of
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan

POSITIONS = positions_of([*group(20, [9, 1, 14]), (0, 70), (0, 1)])
OPTIONS: list[dict[str, Any]] = [{}, {"softcap": 3.0, "sliding_window": 9}]


def draw(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    inputs = make_inputs(len(POSITIONS), heads=(4, 2), dims=(16, 8), dtype=dtype, sinks=True)
    assert inputs.sinks is not None
    return inputs.q, inputs.k, inputs.v, inputs.sinks


@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_opcheck_of_the_forward(options: dict[str, Any], with_sinks: bool) -> None:
    q, k, v, sinks = draw()
    plan = TreePlan.from_position_ids(POSITIONS)
    arguments = (q, k, v, sinks if with_sinks else None, plan.subtree_end, plan.depth, 0.25)
    window, softcap = options.get("sliding_window"), options.get("softcap")
    torch.library.opcheck(torch.ops.treepack.tree_attention, (*arguments, window, softcap))


@pytest.mark.parametrize("with_lse", [False, True])
def test_opcheck_of_the_backward(with_lse: bool) -> None:
    q, k, v, sinks = (t.detach() for t in draw())
    plan = TreePlan.from_position_ids(POSITIONS)
    out, lse = tree_attention(q, k, v, plan=plan, sinks=sinks, return_lse=True)
    grad_lse = torch.ones_like(lse) if with_lse else None
    arguments = (torch.ones_like(out), grad_lse, q, k, v, sinks, plan.subtree_end, plan.depth, out, lse, 0.25)
    torch.library.opcheck(torch.ops.treepack.tree_attention_backward, (*arguments, None, None))


def test_opcheck_of_the_plan() -> None:
    torch.library.opcheck(torch.ops.treepack.tree_plan, (POSITIONS,))
    torch.library.opcheck(torch.ops.treepack.tree_plan, (POSITIONS[None],))


@pytest.mark.parametrize("given_as", ["position_ids", "plan"])
def test_a_compiled_function_equals_the_eager_one(given_as: str) -> None:
    mask = {"position_ids": POSITIONS, "plan": TreePlan.from_position_ids(POSITIONS)}[given_as]

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor, mask: Any) -> tuple[Tensor, Tensor]:
        out, lse = tree_attention(q * 2, k, v, sinks=sinks, sliding_window=12, return_lse=True, **{given_as: mask})
        return out + 1, lse

    leaves = draw()
    # aot_eager traces forward and backward whole, without the minute a C++ build takes.
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    results = [f(*leaves, mask) for f in (layer, compiled)]
    for expected, found in zip(*results):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    grads = [torch.autograd.grad(out.square().sum() + lse.sum(), leaves) for out, lse in results]
    for expected, found in zip(*grads):
        torch.testing.assert_close(found, expected)


def test_a_new_length_needs_one_more_compilation_at_most() -> None:
    compilations = 0

    def count(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        nonlocal compilations
        compilations += 1
        return graph.forward

    compiled = torch.compile(partial(tree_attention, scale=0.5), fullgraph=True, backend=count)
    for length in range(30, 50):
        q, k, v = (torch.ones(length, heads, 8) for heads in (2, 1, 1))
        compiled(q, k, v, position_ids=torch.arange(length))
    assert compilations <= 2


def test_torch_func_transforms() -> None:
    q, k, v, sinks = (t.detach() for t in draw())

    def loss(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return tree_attention(q, k, v, position_ids=POSITIONS, sinks=sinks).square().sum()

    grads = torch.func.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, sinks)
    leaves = draw()
    for found, expected in zip(grads, torch.autograd.grad(loss(*leaves), leaves)):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing(reentrant: bool) -> None:
    leaves = draw()

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        return tree_attention(q, k, v, position_ids=POSITIONS, sinks=sinks).square()

    layer(*leaves).sum().backward()
    expected = [t.grad for t in leaves]
    again = draw()
    checkpoint(layer, *again, use_reentrant=reentrant).sum().backward()
    for found, wanted in zip(again, expected):
        assert torch.equal(found.grad, wanted)


@pytest.mark.parametrize("options", [*OPTIONS, {"sliding_window": 3}], ids=str)
def test_gradcheck_in_double_precision(options: dict[str, Any]) -> None:
    position_ids = positions_of(comb(3, 2, 1))
    inputs = make_inputs(len(position_ids), heads=(2, 1), dims=(3, 2), dtype=torch.float64, sinks=True)

    def attend(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
        return tree_attention(q, k, v, position_ids=position_ids, sinks=sinks, return_lse=True, **options)

    assert torch.autograd.gradcheck(attend, tuple(inputs.leaves.values()))


def test_the_gradient_of_lse_alone() -> None:
    q, k, v, sinks = draw()
    for backend in ("cpu", "reference"):
        _, lse = tree_attention(q, k, v, position_ids=POSITIONS, sinks=sinks, return_lse=True, backend=backend)
        grads = torch.autograd.grad(lse.square().sum(), (q, k, v, sinks), allow_unused=True)
        if backend == "cpu":
            first = grads
    for found, expected in zip(first, grads):
        # The public lse has neither values nor sinks in it.
        torch.testing.assert_close(found, torch.zeros_like(found) if expected is None else expected)


def test_second_derivatives_are_refused() -> None:
    q, k, v, _ = draw()
    (grad,) = torch.autograd.grad(tree_attention(q, k, v, position_ids=POSITIONS).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        grad.sum().backward()


@pytest.mark.parametrize("name", ["empty", "one token"])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_rows_of_no_and_one_token(name: str, options: dict[str, Any]) -> None:
    """Case 15 too (pytorch#148752): there are gradients on a CPU."""
    position_ids = positions_of(FORESTS[name])
    inputs = make_inputs(len(position_ids))
    q, k, v = inputs.q, inputs.k, inputs.v
    out, lse = tree_attention(q, k, v, position_ids=position_ids, return_lse=True, **options)
    assert out.shape == q.shape
    assert lse.shape == (2, len(position_ids))
    torch.testing.assert_close(out, v.expand_as(out))
    for leaf, grad in zip((q, k, v), torch.autograd.grad(out.sum(), (q, k, v))):
        assert grad.shape == leaf.shape


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_output_dtypes(dtype: torch.dtype, backend: Any) -> None:
    q, k, v, sinks = draw(dtype)
    out, lse = tree_attention(q, k, v, position_ids=POSITIONS, sinks=sinks, return_lse=True, backend=backend)
    assert out.dtype == dtype
    assert lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert all(t.dtype == dtype for t in torch.autograd.grad(out.sum(), (q, k, v, sinks)))


def test_inference_mode() -> None:
    with torch.inference_mode():
        q, k, v, _ = (t.clone() for t in draw())
        plan = TreePlan.from_position_ids(POSITIONS.clone())
        expected = tree_attention(q, k, v, plan=plan, backend="reference")
        torch.testing.assert_close(tree_attention(q, k, v, plan=plan), expected)


def test_autocast_casts_as_for_torchs_own_attention() -> None:
    q, k, v, _ = draw()
    expected = tree_attention(q.bfloat16(), k.bfloat16(), v.bfloat16(), position_ids=POSITIONS)
    with torch.autocast("cpu", torch.bfloat16):
        found = tree_attention(q, k.bfloat16(), v, position_ids=POSITIONS)
    assert torch.equal(found, expected)
    assert torch.autograd.grad(found.sum(), q)[0].dtype == torch.float32


def test_autocast_leaves_double_precision_alone() -> None:
    q, k, v, _ = draw(torch.float64)
    with torch.autocast("cpu", torch.bfloat16):
        assert tree_attention(q, k, v, position_ids=POSITIONS).dtype == torch.float64


def test_autocast_of_fake_tensors() -> None:
    with FakeTensorMode() as mode, torch.autocast("cpu", torch.bfloat16):
        q, k, v, sinks = (mode.from_tensor(t.detach()).requires_grad_() for t in draw())
        out, lse = tree_attention(q, k, v, position_ids=mode.from_tensor(POSITIONS), sinks=sinks, return_lse=True)
        grads = torch.autograd.grad(out.sum() + lse.sum(), (q, k, v, sinks))
    assert (out.dtype, lse.dtype) == (torch.bfloat16, torch.float32)
    assert [(g.dtype, g.shape) for g in grads] == [(torch.float32, t.shape) for t in (q, k, v, sinks)]


def test_autocast_of_a_compiled_function() -> None:
    q, k, v, sinks = draw()

    def layer(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return tree_attention(q, k, v, position_ids=POSITIONS, sinks=sinks)

    expected = layer(q, k, v, sinks)
    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(q, k, v, sinks)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, expected)
    for one, other in zip(*(torch.autograd.grad(out.float().sum(), (q, k, v, sinks)) for out in (found, expected))):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)


def test_a_plan_changed_in_place_is_read_anew() -> None:
    q, k, v, _ = (t.detach() for t in draw())
    plan = TreePlan.from_position_ids(torch.zeros_like(POSITIONS))
    tree_attention(q, k, v, plan=plan)
    other = TreePlan.from_position_ids(POSITIONS)
    plan.subtree_end.copy_(other.subtree_end)
    plan.depth.copy_(other.depth)
    assert torch.equal(tree_attention(q, k, v, plan=plan), tree_attention(q, k, v, plan=other))


N = len(POSITIONS)
Q, K = torch.zeros(N, 4, 16), torch.zeros(N, 2, 16)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"q": torch.zeros(N, 64)}, ValueError, r"q must be \(tokens, heads, head dim\), got \(\d+, 64\)"),
        ({"q": None}, TypeError, "q must be a tensor, got NoneType"),
        ({"q": Q.long()}, TypeError, "q must be float16, bfloat16, float32 or float64, got torch.int64"),
        ({"k": K.half()}, TypeError, "k must have q's dtype torch.float32, got torch.float16"),
        ({"k": torch.zeros(3, 2, 16)}, ValueError, f"k must have the {N} tokens of q, got 3"),
        ({"k": torch.zeros(N, 2, 8)}, ValueError, "k must have q's head dim 16, got 8"),
        ({"k": torch.zeros(N, 3, 16), "v": torch.zeros(N, 3, 16)}, ValueError, "multiple of the 3 heads of k, got 4"),
        ({"v": torch.zeros(N, 1, 16)}, ValueError, "v must have the 2 heads of k, got 1"),
        ({"v": torch.zeros(N, 2, 0)}, ValueError, "v must have at least one head and one column"),
        ({"v": K.to("meta")}, ValueError, "v must be on q's device cpu, got meta"),
        ({"position_ids": None}, ValueError, "exactly one of position_ids and plan must be given, got neither"),
        ({"plan": TreePlan.from_position_ids(POSITIONS)}, ValueError, "exactly one .* got both"),
        ({"position_ids": None, "plan": POSITIONS}, TypeError, "plan must be a TreePlan, got Tensor"),
        ({"position_ids": [0]}, TypeError, "position_ids must be a tensor, got list"),
        ({"position_ids": POSITIONS[:-1]}, ValueError, f"position_ids must cover the {N} tokens of q, got {N - 1}"),
        ({"position_ids": POSITIONS + 1}, ValueError, "position_ids must start at 0, got 1"),
        ({"position_ids": POSITIONS.to("meta")}, ValueError, "position_ids must be on q's device cpu, got meta"),
        ({"scale": float("nan")}, ValueError, "scale must be finite, got nan"),
        ({"sliding_window": 0}, ValueError, "sliding_window must be at least 1, got 0"),
        ({"sliding_window": 2.0}, TypeError, "sliding_window must be an int, got float"),
        ({"softcap": 0.0}, ValueError, "softcap must be positive and finite, got 0.0"),
        ({"softcap": float("inf")}, ValueError, "softcap must be positive and finite, got inf"),
        ({"sinks": torch.zeros(2)}, ValueError, r"one logit for each of q's 4 heads, got \(2,\)"),
        ({"sinks": torch.zeros(4, dtype=torch.int64)}, TypeError, "sinks must be a tensor of .* got torch.int64"),
        ({"sinks": [0.0] * 4}, TypeError, "sinks must be a tensor of .* got list"),
        ({"backend": "cuda"}, ValueError, "backend must be None or one of triton, cpu, flash, fa4, reference, got"),
    ],
)
def test_arguments_that_do_not_fit(arguments: dict[str, Any], error: type[Exception], message: str) -> None:
    """Case 14 (unsloth#6871): what cannot be honoured raises, by name."""
    with pytest.raises(error, match=message):
        tree_attention(**{"q": Q, "k": K, "v": K, "position_ids": POSITIONS, **arguments})


def test_there_is_no_dropout() -> None:
    with pytest.raises(TypeError, match="dropout"):
        tree_attention(Q, K, K, position_ids=POSITIONS, dropout=0.1)  # type: ignore[call-overload]


def test_other_devices_are_refused_or_named() -> None:
    q, k, v = (t.to("meta") for t in (Q, K, K))
    with pytest.raises(ValueError, match="backend 'cpu' must get tensors on a CPU, got meta"):
        tree_attention(q, k, v, position_ids=POSITIONS.to("meta"), backend="cpu")
    with pytest.raises((ValueError, NotImplementedError), match="backend .* meta"):
        tree_attention(q, k, v, position_ids=POSITIONS.to("meta"))


@pytest.mark.parametrize("backend", ["triton", "flash", "fa4"])
def test_a_named_backend_that_cannot_run_does_not_fall_back(backend: Any) -> None:
    with pytest.raises((ValueError, NotImplementedError), match=f"backend .*'{backend}'"):
        tree_attention(Q, K, K, position_ids=POSITIONS, backend=backend)


def test_a_row_longer_than_its_boundaries_is_refused() -> None:
    """Case 6 (pytorch#188933): 946 rows, boundaries that end at 944."""
    plan = TreePlan.from_cu_seqlens(torch.tensor([0, 500, 944]), torch.tensor([0, 500, 1444]))
    q = torch.zeros(946, 1, 8)
    with pytest.raises(ValueError, match="plan must cover the 946 tokens of q, got 944"):
        tree_attention(q, q, q, plan=plan)


def test_importing_the_ops_does_not_import_triton_or_transformers() -> None:
    script = (
        "import sys, treepack.kernels.ops;"
        "print(sorted({'triton', 'transformers', 'trl'} & {name.split('.')[0] for name in sys.modules}))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
