"""A varlen attention for CPUs, dense and sequence by sequence, and the "flash" op over it."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from treepack.kernels import flash, flash_ops
from treepack.kernels.plan import TreePlan
from treepack.kernels.varlen import VarlenCall
from treepack.kernels.work import FlashPath, HeadShape, flash_path


@dataclass
class DenseVarlen:
    """`VarlenKernel` by matrix products; remembers the calls it served."""

    scale: float
    softcap: float | None = None
    calls: int = 0

    def forward(self, call: VarlenCall, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        self._note(call, q, k)
        out, lse = torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)
        for rows, columns in _sequences(call):
            scores, _ = self._scores(call, q[rows], k[columns])
            lse[:, rows] = torch.logsumexp(scores, -1)
            probs = torch.softmax(scores, -1)
            out[rows] = (probs @ _per_query_head(v[columns], q)).transpose(0, 1).to(out.dtype)
        return out, lse

    def backward(
        self, call: VarlenCall, grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        self._note(call, q, k)
        assert lse.is_contiguous(), "libraries read it as such"
        dq, dk, dv = (torch.empty_like(t) for t in (q, k, v))
        for rows, columns in _sequences(call):
            scores, slope = self._scores(call, q[rows], k[columns])
            grad, values = _heads_first(grad_out[rows]), _per_query_head(v[columns], q)
            probs = torch.exp(scores - lse[:, rows, None])
            delta = (grad * _heads_first(out[rows])).sum(-1, keepdim=True)
            d_scores = probs * (grad @ values.transpose(1, 2) - delta) * slope
            dq[rows] = (d_scores @ _per_query_head(k[columns], q)).transpose(0, 1).to(dq.dtype)
            dk[columns] = _sum_group(d_scores.transpose(1, 2) @ _heads_first(q[rows]), k).to(dk.dtype)
            dv[columns] = _sum_group(probs.transpose(1, 2) @ grad, v).to(dv.dtype)
        return dq, dk, dv

    def _note(self, call: VarlenCall, q: Tensor, k: Tensor) -> None:
        self.calls += 1
        for boundaries, longest, tensor in ((call.cu_q, call.max_q, q), (call.cu_k, call.max_k, k)):
            assert boundaries.dtype == torch.int32
            assert int(boundaries[0]) == 0
            assert int(boundaries[-1]) == len(tensor)
            # Libraries have had bugs with sequences of no tokens: none is ever passed.
            assert int(boundaries.diff().min()) >= 1
            assert int(boundaries.diff().max()) == longest
            assert tensor.stride(-1) == 1

    def _scores(self, call: VarlenCall, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """Scores (H, R, L), and their derivative after q.k."""
        scores = _heads_first(q) @ _per_query_head(k, q).transpose(1, 2) * self.scale
        slope = torch.full_like(scores, self.scale)
        if self.softcap is not None:
            squashed = torch.tanh(scores / self.softcap)
            scores, slope = self.softcap * squashed, slope * (1 - squashed.square())
        if call.causal:
            ahead = torch.arange(len(k)) - torch.arange(len(k) - len(q), len(k))[:, None]
            hidden = ahead > 0 if call.window is None else (ahead > 0) | (ahead <= -call.window)
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores, slope


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    plan: TreePlan,
    path: FlashPath,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    kernel: DenseVarlen | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and lse by `path`, differentiable through out."""
    kernel = kernel or DenseVarlen(q.shape[-1] ** -0.5 if scale is None else scale, softcap)
    row = flash.row_attention(kernel, plan, window=sliding_window, path=path)
    out, lse = _Attention.apply(row, q, k, v, sinks)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, row: flash.RowAttention, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Any:
        out, lse = flash.attention_forward(row, q, k, v, sinks)
        ctx.row, ctx.saved = row, (q, k, v, sinks, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor, _: Tensor) -> Any:
        return None, *flash.attention_backward(ctx.row, grad_out, *ctx.saved)


def register_on_cpu() -> None:
    """Let the op run on a CPU, over `DenseVarlen`, along the path it would choose on a GPU."""

    def row_of(q: Tensor, k: Tensor, subtree_end: Tensor, depth: Tensor, *options: Any) -> flash.RowAttention:
        scale, window, softcap, _, backend = options
        assert backend == "flash"
        plan, heads = TreePlan(subtree_end, depth), HeadShape(q.shape[1], k.shape[1], q.shape[2])
        path = flash_path(plan, window=window, heads=heads)
        return flash.row_attention(DenseVarlen(scale, softcap), plan, window=window, path=path)

    @flash_ops.flash_attention.register_kernel("cpu")
    def _(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *plan_and_options: Any) -> tuple[Tensor, Tensor]:
        return flash.attention_forward(row_of(q, k, *plan_and_options), q, k, v, sinks)

    @flash_ops.flash_attention_backward.register_kernel("cpu")
    def _(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        subtree_end, depth, out, lse, *options = rest
        row = row_of(q, k, subtree_end, depth, *options)
        dq, dk, dv, grad_sinks = flash.attention_backward(row, grad_out, q, k, v, sinks, out, lse)
        return dq, dk, dv, q.new_empty(0) if grad_sinks is None else grad_sinks


def _sequences(call: VarlenCall) -> list[tuple[slice, slice]]:
    bounds = zip(*(cu.tolist() for cu in (call.cu_q[:-1], call.cu_q[1:], call.cu_k[:-1], call.cu_k[1:])))
    return [(slice(q0, q1), slice(k0, k1)) for q0, q1, k0, k1 in bounds]


def _heads_first(tensor: Tensor) -> Tensor:
    return tensor.float().transpose(0, 1)


def _per_query_head(tensor: Tensor, q: Tensor) -> Tensor:
    return _heads_first(tensor).repeat_interleave(q.shape[1] // tensor.shape[1], 0)


def _sum_group(grad: Tensor, given: Tensor) -> Tensor:
    return grad.unflatten(0, (given.shape[1], -1)).sum(1).transpose(0, 1)
