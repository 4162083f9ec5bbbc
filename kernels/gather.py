"""`gather_positions`: the rows of a packed tensor that belong to each sequence, and the gradient that sums their uses.

Legend: N rows of the packed tensor, P gathered rows, H columns.
"""

from typing import Any

import torch
from torch import Tensor

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)

# Elements of a program's tile of gathered rows.
_TILE = 4096
_MAX_BLOCK_H = 512

# Fusion is pinned since Triton's default differs between versions, and it warns.
_OPTIONS: Any = {"num_warps": 4, "enable_fp_fusion": True}


def gather_positions(hidden: Tensor, positions: Tensor) -> Tensor:
    """Lay the rows of a packed tensor out sequence by sequence: `hidden[positions]`.

    With `positions` of `pack_sequences`, row `offsets[b] + t` of the result belongs to token t of sequence b, and a
    shared prefix appears once for each sequence that has it. The gradient of a row sums all its uses in float32
    (float64 for float64), in a fixed order: it repeats bit for bit, which the gradient of indexing does not on a GPU.

    Args:
        hidden: (N, H) float16, bfloat16, float32 or float64, on a CPU or a GPU, any strides.
        positions: (P,) int32 or int64 in [0, N), on the same device; any order, any number of times. A GPU cannot
            refuse what lies outside without waiting for it: there such a row is NaN, and has no gradient.

    Returns:
        (P, H) in hidden's dtype, differentiable any number of times.

    Raises:
        TypeError: an argument that is no tensor or has another dtype.
        ValueError: a shape or a device that does not fit; on a CPU, a position that lies outside.
        NotImplementedError: a device that is neither a CPU nor a CUDA or ROCm GPU.
    """
    _check(hidden, positions)
    # A custom op's own autograd fails under torch.func transforms, an autograd.Function's trips torch.compile.
    gather = _gather if torch.compiler.is_compiling() else _Gather.apply
    gathered: Tensor = gather(hidden, positions)  # type: ignore[no-untyped-call]
    return gathered


@torch.library.custom_op("treepack::gather_positions", mutates_args=(), device_types="cpu")
def _gather(hidden_NH: Tensor, positions_P: Tensor) -> Tensor:
    if positions_P.numel():
        low, high = (int(bound) for bound in positions_P.aminmax())
        if low < 0 or high >= len(hidden_NH):
            raise ValueError(f"positions must lie in [0, {len(hidden_NH)}), got {low if low < 0 else high}")
    return hidden_NH.index_select(0, positions_P)


@_gather.register_kernel("cuda")
def _gather_on_gpu(hidden_NH: Tensor, positions_P: Tensor) -> Tensor:
    from treepack.kernels.gather_kernels import gather_kernel  # Triton takes seconds to load; only a GPU needs it.

    (num_rows, columns), num_gathered = hidden_NH.shape, len(positions_P)
    out = hidden_NH.new_empty(num_gathered, columns)
    hidden = hidden_NH if hidden_NH.stride(1) == 1 else hidden_NH.contiguous()
    block_h = _block_columns(columns)
    block_p = _TILE // block_h
    if out.numel():
        with torch.cuda.device_of(hidden):  # type: ignore[no-untyped-call]
            gather_kernel[(-(-num_gathered // block_p), -(-columns // block_h))](
                hidden,
                positions_P.contiguous(),
                out,
                hidden.stride(0),
                num_rows,
                num_gathered,
                COLUMNS=columns,
                BLOCK_P=block_p,
                BLOCK_H=block_h,
                **_OPTIONS,
            )
    return out


@_gather.register_fake
def _(hidden_NH: Tensor, positions_P: Tensor) -> Tensor:
    return hidden_NH.new_empty(positions_P.shape[0], hidden_NH.shape[1])


@torch.library.custom_op("treepack::gather_positions_backward", mutates_args=(), device_types="cpu")
def _gather_backward(grad_PH: Tensor, positions_P: Tensor, num_rows: int) -> Tensor:
    # One row is added after another; index_put_ would add them in any order.
    total = torch.zeros(num_rows, grad_PH.shape[1], dtype=_sum_dtype(grad_PH))
    return total.index_add_(0, positions_P, grad_PH.to(total.dtype)).to(grad_PH.dtype)


@_gather_backward.register_kernel("cuda")
def _gather_backward_on_gpu(grad_PH: Tensor, positions_P: Tensor, num_rows: int) -> Tensor:
    import triton.language as tl

    from treepack.kernels.gather_kernels import gather_sum_kernel

    columns = grad_PH.shape[1]
    out = grad_PH.new_empty(num_rows, columns)
    grad = grad_PH if grad_PH.stride(1) == 1 else grad_PH.contiguous()
    block_h = _block_columns(columns)
    ordered, order = positions_P.sort(stable=True)
    bounds = torch.searchsorted(ordered, torch.arange(num_rows + 1, dtype=ordered.dtype, device=ordered.device))
    if out.numel():
        with torch.cuda.device_of(grad):  # type: ignore[no-untyped-call]
            gather_sum_kernel[(num_rows, -(-columns // block_h))](
                grad,
                order,
                bounds,
                out,
                grad.stride(0),
                COLUMNS=columns,
                BLOCK_U=_TILE // block_h,
                BLOCK_H=block_h,
                SUM_DTYPE=tl.float64 if grad.dtype == torch.float64 else tl.float32,
                **_OPTIONS,
            )
    return out


@_gather_backward.register_fake
def _(grad_PH: Tensor, positions_P: Tensor, num_rows: int) -> Tensor:
    return grad_PH.new_empty(num_rows, grad_PH.shape[1])


def _save_for_backward(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    hidden, positions = inputs
    ctx.save_for_backward(positions)
    ctx.num_rows = hidden.shape[0]


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (positions,) = ctx.saved_tensors
    grad_hidden: Tensor = _GatherBackward.apply(grad, positions, ctx.num_rows)  # type: ignore[no-untyped-call]
    return grad_hidden, None


def _save_for_second_backward(ctx: Any, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    ctx.save_for_backward(inputs[1])


def _differentiate_again(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
    (positions,) = ctx.saved_tensors
    grad_grad: Tensor = _Gather.apply(grad, positions)  # type: ignore[no-untyped-call]
    return grad_grad, None, None


_gather.register_autograd(_differentiate, setup_context=_save_for_backward)


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(hidden_NH: Tensor, positions_P: Tensor) -> Tensor:
        gathered: Tensor = _gather(hidden_NH, positions_P)
        return gathered

    setup_context = staticmethod(_save_for_backward)
    backward = staticmethod(_differentiate)


class _GatherBackward(torch.autograd.Function):
    @staticmethod
    def forward(grad_PH: Tensor, positions_P: Tensor, num_rows: int) -> Tensor:
        grad_hidden: Tensor = _gather_backward(grad_PH, positions_P, num_rows)
        return grad_hidden

    setup_context = staticmethod(_save_for_second_backward)
    backward = staticmethod(_differentiate_again)


def _sum_dtype(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _block_columns(columns: int) -> int:
    """The smallest power of two that holds a row, within bounds."""
    return int(min(max(16, 1 << (columns - 1).bit_length()), _MAX_BLOCK_H))


def _check(hidden: Tensor, positions: Tensor) -> None:
    for name, tensor in (("hidden", hidden), ("positions", positions)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if hidden.dtype not in _DTYPES:
        raise TypeError(f"hidden must be float16, bfloat16, float32 or float64, got {hidden.dtype}")
    if positions.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"positions must be int32 or int64, got {positions.dtype}")
    if hidden.dim() != 2:
        raise ValueError(f"hidden must be (N, H), got shape {tuple(hidden.shape)}")
    if positions.dim() != 1:
        raise ValueError(f"positions must be (P,), got shape {tuple(positions.shape)}")
    if positions.device != hidden.device:
        raise ValueError(f"positions must be on hidden's device {hidden.device}, got {positions.device}")
    if hidden.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"hidden must be on a CPU or a CUDA or ROCm GPU, got {hidden.device}")
