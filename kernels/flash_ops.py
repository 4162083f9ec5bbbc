"""The "flash" and "fa4" backends as an op: what they refuse, and the op's schema, fake and gradient.

Its kernel exists for GPUs only; tests register one for the CPU, over a varlen attention of their own, and so check all
that lies between the op and a library.

Legend: H query heads, K kv heads, N tokens, D head dim, V value dim.
"""

from typing import Any

import torch
from torch import Tensor

from treepack.kernels import flash
from treepack.kernels.fa4 import Fa4Attention, check_fa4
from treepack.kernels.plan import TreePlan
from treepack.kernels.varlen import HAS_FLASH_ATTN, varlen_kernel
from treepack.kernels.work import HeadShape, flash_path

_MAX_HEAD_DIM = 256


def check_flash(backend: str, q: Tensor, v: Tensor, *, softcap: float | None, deterministic: bool) -> None:
    """Check, before any work, that "flash" or "fa4" can honour the call.

    Raises:
        TypeError: q is not in half precision.
        ValueError: q is not on a GPU.
        NotImplementedError: the backend lacks an option, a head dim, the GPU or its package.
    """
    if q.device.type != "cuda":
        raise ValueError(f"backend '{backend}' must get tensors on a CUDA or ROCm GPU, got {q.device}")
    if q.dtype not in (torch.float16, torch.bfloat16):
        raise TypeError(f"q must be float16 or bfloat16 for backend '{backend}', got {q.dtype}")
    if backend == "fa4":
        check_fa4(q, v)
        return
    for name, columns in (("q", q.shape[2]), ("v", v.shape[2])):
        if columns > _MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name} must have a head dim of at most {_MAX_HEAD_DIM} for backend 'flash', got {columns}"
            )
    if softcap is not None and not HAS_FLASH_ATTN:
        raise NotImplementedError(
            f"softcap must be None for backend 'flash' without the flash-attn package, got {softcap}: torch's own "
            "varlen attention has none; 'triton' has"
        )
    if deterministic and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "deterministic must be False for backend 'flash', got True: its sums are deterministic only under "
            "torch.use_deterministic_algorithms(True); those of 'triton' always are"
        )


@torch.library.custom_op("treepack::flash_attention", mutates_args=(), device_types="cuda")
def flash_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    subtree_end: Tensor,
    depth: Tensor,
    scale: float,
    sliding_window: int | None,
    softcap: float | None,
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Return out (N, H, V) in q's dtype and lse (H, N) float32, natural log without the sinks."""
    options = scale, sliding_window, softcap, deterministic, backend
    row = _row_attention(q_NHD, k_NKD, TreePlan(subtree_end, depth), *options)
    return flash.attention_forward(row, q_NHD, k_NKD, v_NKV, sinks_H)


@flash_attention.register_fake
def _(
    q_NHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, sinks_H: Tensor | None, *plan_and_options: Any
) -> tuple[Tensor, Tensor]:
    num_tokens, heads, _ = q_NHD.shape
    out = q_NHD.new_empty(num_tokens, heads, v_NKV.shape[2])
    return out, q_NHD.new_empty(heads, num_tokens, dtype=torch.float32)


@torch.library.custom_op("treepack::flash_attention_backward", mutates_args=(), device_types="cuda")
def flash_attention_backward(
    grad_out_NHV: Tensor,
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
    deterministic: bool,
    backend: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of q, k, v and the sinks; without sinks the last one is empty."""
    plan = TreePlan(subtree_end, depth)
    results = q_NHD, k_NKD, v_NKV, sinks_H, out_NHV, lse_HN
    if backend == "fa4" and deterministic:
        # FlashAttention 4's block-sparse backward has no deterministic form on Hopper; ours has no other.
        from treepack.kernels import gpu

        dq, dk, dv, grad_sinks = gpu.attention_backward(
            grad_out_NHV, None, *results, plan, scale=scale, window=sliding_window, softcap=softcap
        )
    else:
        row = _row_attention(q_NHD, k_NKD, plan, scale, sliding_window, softcap, deterministic, backend)
        dq, dk, dv, grad_sinks = flash.attention_backward(row, grad_out_NHV, *results)
    return dq, dk, dv, q_NHD.new_empty(0) if grad_sinks is None else grad_sinks


@flash_attention_backward.register_fake
def _(
    grad_out_NHV: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    *plan_results_and_options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q_NHD, k_NKD, v_NKV))
    return dq, dk, dv, q_NHD.new_empty(0) if sinks_H is None else sinks_H.new_empty(sinks_H.shape)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sinks, subtree_end, depth, *options = inputs
    ctx.save_for_backward(q, k, v, sinks, subtree_end, depth, *output)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> tuple[Tensor | None, ...]:
    if grad_lse is not None:
        raise NotImplementedError(
            f"lse must have no gradient with backend '{ctx.options[-1]}': FlashAttention's backward takes none; "
            "'triton' does"
        )
    q, k, v, sinks, subtree_end, depth, out, lse = ctx.saved_tensors
    grad_out = torch.zeros_like(out) if grad_out is None else grad_out
    dq, dk, dv, grad_sinks = flash_attention_backward(
        grad_out, q, k, v, sinks, subtree_end, depth, out, lse, *ctx.options
    )
    return dq, dk, dv, None if sinks is None else grad_sinks, *[None] * 7


flash_attention.register_autograd(_differentiate, setup_context=_save_for_backward)


def _row_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    plan: TreePlan,
    scale: float,
    window: int | None,
    softcap: float | None,
    deterministic: bool,
    backend: str,
) -> flash.RowAttention:
    if backend == "fa4":
        return Fa4Attention(plan, scale, window, softcap)
    heads = HeadShape(q_NHD.shape[1], k_NKD.shape[1], q_NHD.shape[2])
    kernel = varlen_kernel(scale, softcap, deterministic)
    return flash.row_attention(kernel, plan, window=window, path=flash_path(plan, window=window, heads=heads))
