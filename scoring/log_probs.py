"""token_log_probs: log-probabilities of given tokens without ever holding a row's logits.

N: tokens of the row, P: scored tokens, H: hidden size, V: vocabulary; BP, BV: a chunk of P and of V.
"""

from collections.abc import Iterator
from typing import Any

import torch

BLOCK_P = 1024
BLOCK_V = 8192
"""Logits of one chunk at most: 32 MiB in float32, enough work for one matrix product to be efficient."""


def token_log_probs(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    token_index: torch.Tensor,
    targets: torch.Tensor,
    temperature: float = 1.0,
) -> torch.Tensor:
    """Log-probability of each target under softmax(hidden[token_index] @ head_weight.T / temperature).

    Logits exist for one chunk of tokens and vocabulary at a time, in the forward and again in the backward, which
    recomputes them. Beyond its results the function keeps one number a target, and the backward needs a float32 copy of
    `hidden`'s gradient and of the scored tokens'. Products are accumulated, and the softmax taken, in float32 (float64
    for float64 inputs), also under autocast. Bitwise deterministic for given inputs on one device, forward and
    backward.

    Args:
        hidden: (N, H) float64, float32, bfloat16 or float16, the model's last hidden states of a packed row.
        head_weight: (V, H) of the same dtype and device, the weight of the language model head.
        token_index: (P,) int32 or int64, where each prediction is made: the packed index (0-based) of the target's
            predecessor, as `TreeRow.pack` gives it. Indices may repeat, in any order.
        targets: (P,) int32 or int64 token ids in [0, V).
        temperature: the logits are divided by it.

    Returns:
        (P,) float32 (float64 for float64 inputs), differentiable once in `hidden` and `head_weight`.

    Raises:
        TypeError: a tensor of another dtype, or `hidden` and `head_weight` of different ones.
        ValueError: a shape, a device, an index or a target out of range, or a temperature that is not positive.

    Source: the vocabulary is streamed as in Cut Cross-Entropy (Wijmans et al. 2025, arXiv 2411.09009), in plain torch.
    """
    _check(hidden, head_weight, token_index, targets, temperature)
    log_probs: torch.Tensor = _TokenLogProbs.apply(  # type: ignore[no-untyped-call]
        hidden, head_weight, token_index.long(), targets.long(), temperature
    )
    return log_probs


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: torch.Tensor,
        head_VH: torch.Tensor,
        index_P: torch.Tensor,
        targets_P: torch.Tensor,
        temperature: float,
    ) -> torch.Tensor:
        dtype = _accumulator(hidden_NH)
        peak_P = torch.full(index_P.shape, -torch.inf, dtype=dtype, device=hidden_NH.device)
        total_P = torch.zeros_like(peak_P)  # sum of exp(logit - peak) so far
        picked_P = torch.zeros_like(peak_P)  # the target's logit
        for v, vocab in _chunks(head_VH.shape[0], BLOCK_V):
            block_VH = head_VH[vocab]
            for _, tokens in _chunks(len(index_P), BLOCK_P):
                logits = _logits(hidden_NH[index_P[tokens]], block_VH, temperature)  # [BP, BV]
                peak = torch.maximum(peak_P[tokens], logits.amax(dim=1))
                total_P[tokens] *= torch.exp(peak_P[tokens] - peak)
                total_P[tokens] += torch.exp(logits - peak[:, None]).sum(dim=1)
                peak_P[tokens] = peak
                column, here = _columns(targets_P[tokens], v, logits.shape[1])
                picked_P[tokens] += torch.where(here, logits.gather(1, column[:, None])[:, 0], 0.0)
        lse_P = peak_P + total_P.log()
        ctx.save_for_backward(hidden_NH, head_VH, index_P, targets_P, lse_P)
        ctx.temperature = temperature
        return picked_P - lse_P

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_P: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        hidden_NH, head_VH, index_P, targets_P, lse_P = ctx.saved_tensors
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        dtype = lse_P.dtype
        d_scored_PH = torch.zeros(len(index_P), hidden_NH.shape[1], dtype=dtype, device=hidden_NH.device)
        d_head_VH = torch.zeros_like(head_VH) if needs_head else None
        for v, vocab in _chunks(head_VH.shape[0], BLOCK_V):
            block_VH = head_VH[vocab]
            d_block_VH = torch.zeros(block_VH.shape, dtype=dtype, device=head_VH.device)
            for _, tokens in _chunks(len(index_P), BLOCK_P):
                scored_BH = hidden_NH[index_P[tokens]]
                logits = _logits(scored_BH, block_VH, ctx.temperature)  # [BP, BV]
                d_logits = torch.exp(logits - lse_P[tokens][:, None]).neg_()
                column, here = _columns(targets_P[tokens], v, logits.shape[1])
                d_logits.scatter_add_(1, column[:, None], here[:, None].to(dtype))
                d_logits *= (grad_P[tokens] / ctx.temperature)[:, None]
                if needs_hidden:
                    d_scored_PH[tokens] += _matmul(d_logits, block_VH)
                if needs_head:
                    d_block_VH += _matmul(d_logits.T, scored_BH)
            if d_head_VH is not None:
                d_head_VH[vocab] = d_block_VH.to(head_VH.dtype)
        d_hidden_NH = add_rows(d_scored_PH, index_P, len(hidden_NH)).to(hidden_NH.dtype) if needs_hidden else None
        return d_hidden_NH, d_head_VH, None, None, None


def _accumulator(tensor: torch.Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(length: int, size: int) -> Iterator[tuple[int, slice]]:
    """The start of each chunk, and the chunk."""
    return ((start, slice(start, start + size)) for start in range(0, length, size))


def _logits(hidden: torch.Tensor, block_VH: torch.Tensor, temperature: float) -> torch.Tensor:
    return _matmul(hidden, block_VH.T).div_(temperature)


def _matmul(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The product accumulated and returned in float32 (float64 for float64), whatever autocast says.

    A float32 gradient times bfloat16 values is rounded to bfloat16 first where that has units of its own (CUDA), as
    autograd would have it; float16 would underflow.
    """
    dtype = _accumulator(left)
    with torch.autocast(left.device.type, enabled=False):
        if left.is_cuda and right.dtype == torch.bfloat16:
            return torch.mm(left.bfloat16(), right, out_dtype=dtype)
        if left.is_cuda and left.dtype == right.dtype == torch.float16:
            return torch.mm(left, right, out_dtype=dtype)
        return left.to(dtype) @ right.to(dtype)


def _columns(targets: torch.Tensor, start: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Each target's column in the vocabulary chunk that starts at `start`, and whether it lies in it."""
    column = targets - start
    here = (column >= 0) & (column < width)
    return column.clamp(0, width - 1), here


def add_rows(rows_PH: torch.Tensor, index_P: torch.Tensor, count: int) -> torch.Tensor:
    """Sum the rows that have one index: (P, H) -> (count, H), in a fixed order, in their own precision."""
    out = torch.zeros(count, rows_PH.shape[1], dtype=rows_PH.dtype, device=rows_PH.device)
    if out.is_cuda:
        return out.index_put_((index_P,), rows_PH, accumulate=True)  # sorts; there index_add_ is atomic, in any order
    return out.index_add_(0, index_P, rows_PH)  # one row after another; here it is index_put_ that is in any order


def _check(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    token_index: torch.Tensor,
    targets: torch.Tensor,
    temperature: float,
) -> None:
    if hidden.dtype not in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"hidden must be float64, float32, bfloat16 or float16, got {hidden.dtype}")
    if head_weight.dtype != hidden.dtype:
        raise TypeError(f"head_weight must be of hidden's dtype {hidden.dtype}, got {head_weight.dtype}")
    if hidden.ndim != 2:
        raise ValueError(f"hidden must be (N, H), got shape {tuple(hidden.shape)}")
    if head_weight.ndim != 2 or head_weight.shape[1] != hidden.shape[1] or not len(head_weight):
        raise ValueError(
            f"head_weight must be (V, {hidden.shape[1]}) with V > 0, as hidden is {tuple(hidden.shape)}, got "
            f"{tuple(head_weight.shape)}"
        )
    if not temperature > 0:
        raise ValueError(f"temperature must be positive, got {temperature}")
    for name, tensor in (("head_weight", head_weight), ("token_index", token_index), ("targets", targets)):
        if tensor.device != hidden.device:
            raise ValueError(f"{name} must be on hidden's device {hidden.device}, got {tensor.device}")
    for name, tensor, stop in (("token_index", token_index, len(hidden)), ("targets", targets, len(head_weight))):
        if tensor.dtype not in (torch.int32, torch.int64):
            raise TypeError(f"{name} must be int32 or int64, got {tensor.dtype}")
        if tensor.ndim != 1:
            raise ValueError(f"{name} must be (P,), got shape {tuple(tensor.shape)}")
        if tensor.numel():
            low, high = torch.stack(tensor.aminmax()).tolist()
            if low < 0 or high >= stop:
                raise ValueError(f"{name} must lie in [0, {stop}), got {low if low < 0 else high}")
    if token_index.shape != targets.shape:
        raise ValueError(
            f"targets must have token_index's shape {tuple(token_index.shape)}, got {tuple(targets.shape)}"
        )
