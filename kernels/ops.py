"""`tree_attention`: the `torch.library` ops with their fakes and gradients, and dispatch.

The ops take a plan's two tensors, not the plan, so they trace: `torch.compile(fullgraph=True)`, `torch.func`,
checkpointing and `torch.library.opcheck` all work. A device's kernel registers on the same op.

Legend: H query heads, K kv heads, N tokens, D head dim, V value dim.
"""

from typing import Any, Literal, overload

import torch
from torch import Tensor

from treepack.kernels import cpu
from treepack.kernels.checks import Backend, check_inputs, check_options, choose_backend
from treepack.kernels.flash_ops import flash_attention
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import reference_attention


@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position_ids: Tensor | None = None,
    plan: TreePlan | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[False] = False,
    backend: Backend | None = None,
) -> Tensor: ...


@overload
def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position_ids: Tensor | None = None,
    plan: TreePlan | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: Literal[True],
    backend: Backend | None = None,
) -> tuple[Tensor, Tensor]: ...


def tree_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    position_ids: Tensor | None = None,
    plan: TreePlan | None = None,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    deterministic: bool = False,
    return_lse: bool = False,
    backend: Backend | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Causal attention of a prefix forest packed into one row: each token sees its ancestors and itself.

    The row lists the forest's tokens in depth-first pre-order, each shared prefix once. The result equals attention of
    every root-to-leaf sequence alone. Differentiable in q, k, v and sinks, through both outputs.

    Args:
        q: queries (N, H, D); float16, bfloat16, float32 or float64. Any strides. Under `torch.autocast` q, k and v are
            cast to its dtype, unless they are float64.
        k: keys (N, K, D), in q's dtype and on its device; H must be a multiple of K.
        v: values (N, K, V), likewise; V may differ from D.
        position_ids: (N,) or (1, N) integer, the 0-based depth of each token in its sequence. Exactly one of
            `position_ids` and `plan` is given.
        plan: the row's `TreePlan`; share one between layers, so that it is built once.
        scale: factor of the scores q.k, 1 / sqrt(D) by default.
        sliding_window: a token sees only the last `sliding_window` tokens of its path, itself included (depth[i] -
            depth[j] < sliding_window), whatever lies between them in the row.
        softcap: scores s become softcap * tanh(s / softcap), as in Gemma 2.
        sinks: (H,) attention sinks, one logit a head that only joins the softmax's denominator, as in gpt-oss.
        deterministic: results and gradients repeat bit for bit. "triton", "cpu" and "reference" always do, at no cost,
            so it changes nothing there; "flash" does only under `torch.use_deterministic_algorithms(True)` and raises
            otherwise; "fa4" takes the backward of "triton".
        return_lse: also return the log-sum-exp of the scores.
        backend: "triton" (a GPU), "cpu" or "reference" (dense float64, any device); None picks by q's device. A named
            backend runs or raises; nothing falls back silently. Two more are unverified, since no GPU has run them yet:
            "flash", by levels over torch's FlashAttention or the flash-attn package, and "fa4", FlashAttention 4 on
            Hopper (the flash-attn-4 package; head dims 64, 128, 256). Both take half precision only and give no
            gradient through lse; "flash" has a softcap only with the flash-attn package.

    Returns:
        out (N, H, V) in q's dtype; with `return_lse` also lse (H, N), natural log, without the sinks, float32
        (float64 for float64 inputs).

    Raises:
        TypeError: an argument has the wrong type or dtype.
        ValueError: shapes, devices or values do not fit together, or `position_ids` is no depth-first forest.
        NotImplementedError: the backend is not available for these tensors.
    """
    q, k, v = (_autocast(tensor) for tensor in (q, k, v))
    check_inputs(q, k, v)
    check_options(q, scale, sliding_window, softcap, sinks)
    chosen = choose_backend(backend, q, v, softcap=softcap, deterministic=deterministic)
    subtree_end, depth = _plan_tensors(position_ids, plan, q)
    scale = q.shape[-1] ** -0.5 if scale is None else float(scale)
    if chosen == "reference":
        out, lse = reference_attention(
            q,
            k,
            v,
            TreePlan(subtree_end, depth),
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=sinks,
        )
        out, lse = out.to(q.dtype), lse.to(_lse_dtype(q))
    elif chosen in ("flash", "fa4"):
        out, lse = flash_attention(
            q, k, v, sinks, subtree_end, depth, scale, sliding_window, softcap, deterministic, chosen
        )
    else:
        # A custom op's own autograd fails under torch.func transforms, an autograd.Function's trips torch.compile.
        attend = _attention if torch.compiler.is_compiling() else _Attention.apply
        out, lse = attend(  # type: ignore[no-untyped-call]
            q, k, v, sinks, subtree_end, depth, scale, sliding_window, softcap
        )
    return (out, lse) if return_lse else out


@torch.library.custom_op("treepack::tree_plan", mutates_args=())
def _plan(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    plan = TreePlan.from_position_ids(position_ids)
    return plan.subtree_end, plan.depth


@_plan.register_fake
def _(position_ids: Tensor) -> tuple[Tensor, Tensor]:
    num_tokens = position_ids.shape[-1]
    return (
        position_ids.new_empty(num_tokens, dtype=torch.int32),
        position_ids.new_empty(num_tokens, dtype=torch.int32),
    )


@torch.library.custom_op("treepack::tree_attention", mutates_args=(), device_types="cpu")
def _attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    options = cpu.Options(scale, sliding_window, softcap)
    return cpu.attention_forward(q_NHD, k_NKD, v_NKV, sinks_H, TreePlan(subtree_end, depth), options)


@_attention.register_kernel("cuda")
def _attention_on_gpu(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    from treepack.kernels import gpu  # Triton takes seconds to load, and only a GPU needs it.

    plan = TreePlan(subtree_end, depth)
    return gpu.attention_forward(
        q_NHD, k_NKD, v_NKV, sinks_H, plan, scale=scale, window=sliding_window, softcap=softcap
    )


@_attention.register_fake
def _(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    num_tokens, heads, _ = q_NHD.shape
    out = q_NHD.new_empty(num_tokens, heads, v_NKV.shape[2])
    return out, q_NHD.new_empty(heads, num_tokens, dtype=_lse_dtype(q_NHD))


@torch.library.custom_op("treepack::tree_attention_backward", mutates_args=(), device_types="cpu")
def _attention_backward(
    grad_out_NHV: Tensor | None,
    grad_lse_HN: Tensor | None,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    out_NHV: Tensor,
    lse_HN: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, grad_sinks = cpu.attention_backward(
        grad_out_NHV,
        grad_lse_HN,
        q_NHD,
        k_NKD,
        v_NKV,
        sinks_H,
        out_NHV,
        lse_HN,
        TreePlan(subtree_end, depth),
        cpu.Options(scale, sliding_window, softcap),
    )
    # An op's outputs are not optional: without sinks the last one is empty.
    return dq, dk, dv, q_NHD.new_empty(0) if grad_sinks is None else grad_sinks


@_attention_backward.register_kernel("cuda")
def _attention_backward_on_gpu(
    grad_out_NHV: Tensor | None,
    grad_lse_HN: Tensor | None,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    out_NHV: Tensor,
    lse_HN: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from treepack.kernels import gpu

    dq, dk, dv, grad_sinks = gpu.attention_backward(
        grad_out_NHV,
        grad_lse_HN,
        q_NHD,
        k_NKD,
        v_NKV,
        sinks_H,
        out_NHV,
        lse_HN,
        TreePlan(subtree_end, depth),
        scale=scale,
        window=sliding_window,
        softcap=softcap,
    )
    return dq, dk, dv, q_NHD.new_empty(0) if grad_sinks is None else grad_sinks


@_attention_backward.register_fake
def _(
    grad_out_NHV: Tensor | None,
    grad_lse_HN: Tensor | None,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    out_NHV: Tensor,
    lse_HN: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    grad_sinks = q_NHD.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)
    grads = (tensor.new_empty(tensor.shape) for tensor in (q_NHD, k_NKD, v_NKV))
    return *grads, grad_sinks  # type: ignore[return-value]  # mypy does not count a generator's items


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, subtree_end, depth, *options = inputs
    ctx.save_for_backward(q, k, v, sinks, subtree_end, depth, *output)
    ctx.options = options
    # An output without a gradient then arrives as None and costs nothing.
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, sinks, subtree_end, depth, out, lse = ctx.saved_tensors
    dq, dk, dv, grad_sinks = _AttentionBackward.apply(  # type: ignore[no-untyped-call]
        grad_out, grad_lse, q, k, v, sinks, subtree_end, depth, out, lse, *ctx.options
    )
    return dq, dk, dv, None if sinks is None else grad_sinks, None, None, None, None, None


_attention.register_autograd(_differentiate, setup_context=_save_for_backward)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor]:
        out, lse = _attention(*inputs)
        return out, lse

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)


class _AttentionBackward(torch.autograd.Function):
    @staticmethod
    def forward(*inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        dq, dk, dv, grad_sinks = _attention_backward(*inputs)
        return dq, dk, dv, grad_sinks

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> None:
        raise NotImplementedError("tree_attention has no second derivative; backend='reference' has")


def _autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast does for torch's own attention."""
    # What is no tensor is for the checks to refuse.
    if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.dtype != torch.float64:
        device = tensor.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            return tensor.to(torch.get_autocast_dtype(device))
    return tensor


def _lse_dtype(q: Tensor) -> torch.dtype:
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def _plan_tensors(position_ids: Tensor | None, plan: TreePlan | None, q: Tensor) -> tuple[Tensor, Tensor]:
    if (position_ids is None) == (plan is None):
        given = "neither" if plan is None else "both"
        raise ValueError(f"exactly one of position_ids and plan must be given, got {given}")
    if plan is not None:
        if not isinstance(plan, TreePlan):
            raise TypeError(f"plan must be a TreePlan, got {type(plan).__name__}")
        name, device, num_tokens = "plan", plan.depth.device, plan.num_tokens
    else:
        assert position_ids is not None
        if not isinstance(position_ids, Tensor):
            raise TypeError(f"position_ids must be a tensor, got {type(position_ids).__name__}")
        name, device, num_tokens = "position_ids", position_ids.device, position_ids.numel()
    if num_tokens != q.shape[0]:
        raise ValueError(f"{name} must cover the {q.shape[0]} tokens of q, got {num_tokens}")
    if device != q.device:
        raise ValueError(f"{name} must be on q's device {q.device}, got {device}")
    return _plan(position_ids) if plan is None else (plan.subtree_end, plan.depth)
