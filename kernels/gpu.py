"""Tree attention on a GPU: launches the Triton kernels; the counterpart of `cpu.py`.

Nothing is read from the device but, once a plan, the length of the schedule (`TreePlan.schedule`). Every sum has a
fixed order, so results repeat bit for bit.

Legend: H query heads, K kv heads, N tokens, D head dim, V value dim.
"""

from functools import cache
from typing import Any

import torch
import triton
from torch import Tensor

from treepack.kernels.configs import AttentionConfig, Device, Tile, attention_config
from treepack.kernels.plan import TreePlan
from treepack.kernels.schedule import TreeSchedule
from treepack.kernels.tree_bwd import key_kernel, prepare_kernel, query_kernel
from treepack.kernels.tree_fwd import forward_kernel
from treepack.kernels.triton_tiles import LOG2_E

_PREPARE_TOKENS = 64


def attention_forward(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    plan: TreePlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend.

    Args:
        q_NHD: queries (N, H, D), float16, bfloat16 or float32, any strides.
        k_NKD: keys (N, K, D), H a multiple of K.
        v_NKV: values (N, K, V).
        sinks_H: (H,) or None.
        plan: the row's forest, on the device of q.
        scale: factor of the scores.
        window: a query sees only the last `window` tokens of its path.
        softcap: scores s become softcap * tanh(s / softcap).
        config: tiles and options; None takes those of the device. Under Triton's interpreter, where the tensors lie on
            a CPU, it must be given.

    Returns:
        out (N, H, V) in q's dtype and lse (H, N) float32, natural log without the sinks.

    Raises:
        TypeError: q has no dtype that the kernels take.
        NotImplementedError: a head dim is too large, or the device is too old or too small.
    """
    config = _launch_config(q_NHD, v_NKV) if config is None else config
    num_tokens, heads, _ = q_NHD.shape
    kv_heads, value_dim = v_NKV.shape[1:]
    out = q_NHD.new_empty(num_tokens, heads, value_dim)
    lse = q_NHD.new_empty(heads, num_tokens, dtype=torch.float32)
    if num_tokens == 0:
        return out, lse
    q, k, v = (_addressable(tensor) for tensor in (q_NHD, k_NKD, v_NKV))
    schedule = _schedule(plan, config, config.forward, window)
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        forward_kernel[_query_grid(schedule, config, kv_heads)](
            q,
            k,
            v,
            lse if sinks_H is None else sinks_H.contiguous(),
            out,
            lse,
            plan.subtree_end,
            plan.depth,
            schedule.range_ptr,
            schedule.ranges,
            *_strides(q, k, v, out),
            num_tokens,
            0 if window is None else window,
            *_score_scales(scale, softcap),
            HAS_WINDOW=window is not None,
            HAS_SOFTCAP=softcap is not None,
            HAS_SINKS=sinks_H is not None,
            **config.constants,
            **config.forward.options,
        )
    return out, lse


def attention_backward(
    grad_out_NHV: Tensor | None,
    grad_lse_HN: Tensor | None,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    out_NHV: Tensor,
    lse_HN: Tensor,
    plan: TreePlan,
    *,
    scale: float,
    window: int | None,
    softcap: float | None,
    config: AttentionConfig | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Differentiate.

    Args:
        grad_out_NHV: gradient of the output (N, H, V), or None.
        grad_lse_HN: gradient of the log-sum-exp (H, N), or None.
        q_NHD: as given to `attention_forward`, and so on.
        k_NKD: keys (N, K, D).
        v_NKV: values (N, K, V).
        sinks_H: (H,) or None.
        out_NHV: its output (N, H, V).
        lse_HN: its log-sum-exp (H, N) float32.
        plan: the row's forest.
        scale: factor of the scores.
        window: a query sees only the last `window` tokens of its path.
        softcap: scores s become softcap * tanh(s / softcap).
        config: tiles and options, as in `attention_forward`.

    Returns:
        The gradients of q, k and v in their dtypes, and of the sinks where there are any.

    Raises:
        TypeError: q has no dtype that the kernels take.
        NotImplementedError: a head dim is too large, or the device is too old or too small.
    """
    config = _launch_config(q_NHD, v_NKV) if config is None else config
    dq, dk, dv = (tensor.new_empty(tensor.shape) for tensor in (q_NHD, k_NKD, v_NKV))
    num_tokens, kv_heads, _ = k_NKD.shape
    if num_tokens == 0:
        return dq, dk, dv, None if sinks_H is None else torch.zeros_like(sinks_H)
    q, k, v = (_addressable(tensor) for tensor in (q_NHD, k_NKD, v_NKV))
    grad_out = torch.zeros_like(out_NHV) if grad_out_NHV is None else _addressable(grad_out_NHV)
    schedule = _schedule(plan, config, config.query_grad, window)
    scalars = (num_tokens, 0 if window is None else window, scale, *_score_scales(scale, softcap))
    constants = {"HAS_WINDOW": window is not None, "HAS_SOFTCAP": softcap is not None, **config.constants}
    with torch.cuda.device_of(q):  # type: ignore[no-untyped-call]
        norm, delta, grad_sinks = _prepare(grad_out, grad_lse_HN, sinks_H, out_NHV, lse_HN)
        key_kernel[(triton.cdiv(num_tokens, config.key_grad.block_n), kv_heads)](
            q,
            k,
            v,
            grad_out,
            norm,
            delta,
            dk,
            dv,
            plan.subtree_end,
            plan.depth,
            plan.query_stops(window),
            *_strides(q, k, v, grad_out, dk, dv),
            *scalars,
            **constants,
            **config.key_grad.options,
        )
        query_kernel[_query_grid(schedule, config, kv_heads)](
            q,
            k,
            v,
            grad_out,
            norm,
            delta,
            dq,
            plan.subtree_end,
            plan.depth,
            schedule.range_ptr,
            schedule.ranges,
            *_strides(q, k, v, grad_out, dq),
            *scalars,
            **constants,
            **config.query_grad.options,
        )
    return dq, dk, dv, grad_sinks


@cache
def device_limits(device: torch.device) -> Device:
    """Architecture and shared memory of a GPU."""
    properties: Any = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return Device(properties.gcnArchName.split(":")[0], properties.shared_memory_per_block)
    return Device(f"sm_{properties.major}{properties.minor}", properties.shared_memory_per_block_optin)


def _prepare(
    grad_out: Tensor, grad_lse_HN: Tensor | None, sinks_H: Tensor | None, out_NHV: Tensor, lse_HN: Tensor
) -> tuple[Tensor, Tensor, Tensor | None]:
    """What the scores' gradients subtract, (H, N) twice, and the gradient of the sinks."""
    num_tokens, heads, value_dim = out_NHV.shape
    blocks = triton.cdiv(num_tokens, _PREPARE_TOKENS)
    out, lse = _addressable(out_NHV), lse_HN.contiguous()
    norm, delta = torch.empty_like(lse), torch.empty_like(lse)
    sink_sums = lse.new_empty(heads, 0 if sinks_H is None else blocks)
    prepare_kernel[(blocks, heads)](
        out,
        grad_out,
        lse,
        lse if grad_lse_HN is None else grad_lse_HN.contiguous(),
        lse if sinks_H is None else sinks_H.contiguous(),
        norm,
        delta,
        sink_sums,
        *_strides(out, grad_out),
        num_tokens,
        VALUE_DIM=value_dim,
        WIDTH=triton.next_power_of_2(value_dim),
        BLOCK=_PREPARE_TOKENS,
        HAS_GRAD_LSE=grad_lse_HN is not None,
        HAS_SINKS=sinks_H is not None,
        num_warps=4,
        enable_fp_fusion=True,
    )
    return norm, delta, None if sinks_H is None else sink_sums.sum(1).to(sinks_H.dtype)


def _launch_config(q_NHD: Tensor, v_NKV: Tensor) -> AttentionConfig:
    return attention_config(
        q_NHD.shape[2],
        v_NKV.shape[2],
        q_NHD.dtype,
        group=q_NHD.shape[1] // v_NKV.shape[1],
        device=device_limits(q_NHD.device),
        allow_tf32=torch.get_float32_matmul_precision() != "highest",
    )


def _schedule(plan: TreePlan, config: AttentionConfig, tile: Tile, window: int | None) -> TreeSchedule:
    return plan.schedule(tile.block_m // config.pack, tile.block_n, window)


def _query_grid(schedule: TreeSchedule, config: AttentionConfig, kv_heads: int) -> tuple[int, int]:
    # Only the first axis of a grid may exceed 65,535.
    return len(schedule.range_ptr) // 2, kv_heads * config.chunks


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Token and head stride of each tensor, in elements."""
    return tuple(stride for tensor in tensors for stride in tensor.stride()[:2])


def _score_scales(scale: float, softcap: float | None) -> tuple[float, float]:
    """`score_scale` and `cap_log2` of `triton_tiles.log2_scores`."""
    if softcap is None:
        return scale * LOG2_E.value, 0.0
    return scale / softcap, softcap * LOG2_E.value


def _addressable(tensor: Tensor) -> Tensor:
    """The tensor itself where a kernel can walk it, a copy where not.

    Columns must be adjacent, and offsets have 32 bits within a tile of 128 tokens and from a group's first head to its
    last; those of tiles and of groups have 64.
    """
    token, head, column = tensor.stride()
    near = token < 2**24 and head * tensor.shape[1] < 2**31
    return tensor if column == 1 and near else tensor.contiguous()
