"""What `tree_attention` refuses, and why; all of it before any work.

Legend: H query heads, K kv heads, N tokens, D head dim, V value dim.
"""

import math
from typing import Literal, get_args

import torch
from torch import Tensor

from treepack.kernels.configs import MAX_HEAD_DIM
from treepack.kernels.flash_ops import check_flash

Backend = Literal["triton", "cpu", "flash", "fa4", "reference"]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def choose_backend(
    backend: Backend | None, q: Tensor, v: Tensor, *, softcap: float | None, deterministic: bool
) -> Backend:
    """The backend to run: the named one, or that of q's device; it takes these tensors and options, or this raises."""
    if backend is not None and backend not in get_args(Backend):
        raise ValueError(f"backend must be None or one of {', '.join(get_args(Backend))}, got {backend!r}")
    on_cpu = q.device.type == "cpu"
    chosen: Backend = backend or ("cpu" if on_cpu else "triton")
    if chosen == "cpu" and not on_cpu:
        raise ValueError(f"backend 'cpu' must get tensors on a CPU, got {q.device}")
    if chosen == "triton":
        _check_triton(q, v)
    if chosen in ("flash", "fa4"):
        check_flash(chosen, q, v, softcap=softcap, deterministic=deterministic)
    return chosen


def check_inputs(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise unless q (N, H, D), k (N, K, D) and v (N, K, V) fit together."""
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
        if tensor.dtype not in _DTYPES:
            raise TypeError(f"{name} must be float16, bfloat16, float32 or float64, got {tensor.dtype}")
        if tensor.dim() != 3:
            raise ValueError(f"{name} must be (tokens, heads, head dim), got {tuple(tensor.shape)}")
        if tensor.dtype != q.dtype:
            raise TypeError(f"{name} must have q's dtype {q.dtype}, got {tensor.dtype}")
        if tensor.device != q.device:
            raise ValueError(f"{name} must be on q's device {q.device}, got {tensor.device}")
        if tensor.shape[0] != q.shape[0]:
            raise ValueError(f"{name} must have the {q.shape[0]} tokens of q, got {tensor.shape[0]}")
        if tensor.shape[1] == 0 or tensor.shape[2] == 0:
            raise ValueError(f"{name} must have at least one head and one column, got {tuple(tensor.shape)}")
    if k.shape[2] != q.shape[2]:
        raise ValueError(f"k must have q's head dim {q.shape[2]}, got {k.shape[2]}")
    if v.shape[1] != k.shape[1]:
        raise ValueError(f"v must have the {k.shape[1]} heads of k, got {v.shape[1]}")
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(f"q must have a multiple of the {k.shape[1]} heads of k, got {q.shape[1]}")


def check_options(
    q: Tensor, scale: float | None, sliding_window: int | None, softcap: float | None, sinks: Tensor | None
) -> None:
    """Raise unless the options have a meaning for q (N, H, D)."""
    if scale is not None and not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if sliding_window is not None and not isinstance(sliding_window, int):
        raise TypeError(f"sliding_window must be an int, got {type(sliding_window).__name__}")
    if sliding_window is not None and sliding_window < 1:
        raise ValueError(f"sliding_window must be at least 1, got {sliding_window}")
    if softcap is not None and not (softcap > 0 and math.isfinite(softcap)):
        raise ValueError(f"softcap must be positive and finite, got {softcap}")
    if sinks is None:
        return
    if not isinstance(sinks, Tensor) or sinks.dtype not in _DTYPES:
        got = sinks.dtype if isinstance(sinks, Tensor) else type(sinks).__name__
        raise TypeError(f"sinks must be a tensor of float16, bfloat16, float32 or float64, got {got}")
    if sinks.shape != (q.shape[1],):
        raise ValueError(f"sinks must be one logit for each of q's {q.shape[1]} heads, got {tuple(sinks.shape)}")
    if sinks.device != q.device:
        raise ValueError(f"sinks must be on q's device {q.device}, got {sinks.device}")


def _check_triton(q: Tensor, v: Tensor) -> None:
    if q.device.type != "cuda":
        raise ValueError(f"backend 'triton' must get tensors on a CUDA or ROCm GPU, got {q.device}")
    if q.dtype == torch.float64:
        raise TypeError(
            "q must be float16, bfloat16 or float32 for backend 'triton', got torch.float64 (see 'reference')"
        )
    for name, columns in (("q", q.shape[2]), ("v", v.shape[2])):
        if columns > MAX_HEAD_DIM:
            raise NotImplementedError(
                f"{name} must have a head dim of at most {MAX_HEAD_DIM} for backend 'triton', got {columns}"
            )
