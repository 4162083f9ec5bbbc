"""Tree attention over FlashAttention: by levels (the cascade) or by copies of the paths (the gather).

The cascade attends every segment to itself in one causal call, then, level by level of the forest, all descendants of
the level's segments to these, and merges by LSE (`cascade.py`): no path is copied. The gather copies each segment's
path and attends once; a depth window allows nothing else, and forests with many short levels are faster that way.
Partial results merge in float32, and so do the sums of gradients.

Nothing here names a library: the varlen kernel is given, so that the algebra is tested on a CPU.

Legend: H query heads, K kv heads, G query heads per kv head, N tokens, R queries and L keys of a call, D head dim (of
values too).
"""

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from treepack.kernels import levels
from treepack.kernels.cascade import Rows, Tile, cascade_backward, cascade_forward
from treepack.kernels.plan import TreePlan, plan_memo
from treepack.kernels.varlen import VarlenCall, VarlenKernel
from treepack.kernels.work import FlashPath


class RowAttention(Protocol):
    """Attention of a whole row, without sinks."""

    def forward(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """Return out (N, H, D), float32 or in q's dtype, and LSE (H, N) float32, natural log."""
        ...

    def backward(
        self,
        grad_out_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return (dq, dk, dv) for probabilities exp(scores - `lse`) and the final `out`; float32 or in q's dtype."""
        ...


def attention_forward(
    row: RowAttention, q_NHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, sinks_H: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return out (N, H, V) in q's dtype and lse (H, N) float32, natural log without the sinks."""
    num_tokens, heads, _ = q_NHD.shape
    value_dim = v_NKV.shape[2]
    if num_tokens == 0:
        return q_NHD.new_empty(0, heads, value_dim), q_NHD.new_empty(heads, 0, dtype=torch.float32)
    out_NHD, lse_HN = row.forward(*_equal_head_dims(q_NHD, k_NKD, v_NKV))
    out_NHV = out_NHD[:, :, :value_dim]
    if sinks_H is not None:
        out_NHV = out_NHV * torch.sigmoid(lse_HN - sinks_H.float()[:, None]).t()[:, :, None]
    return out_NHV.to(q_NHD.dtype).contiguous(), lse_HN


def attention_backward(
    row: RowAttention,
    grad_out_NHV: Tensor,
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    sinks_H: Tensor | None,
    out_NHV: Tensor,
    lse_HN: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, where there are sinks, of the sinks."""
    if q_NHD.shape[0] == 0:
        dq, dk, dv = (torch.empty_like(t) for t in (q_NHD, k_NKD, v_NKV))
        return dq, dk, dv, None if sinks_H is None else torch.zeros_like(sinks_H)
    normaliser_HN, grad_sinks = lse_HN, None
    if sinks_H is not None:
        # Probabilities are normalised with the sinks, which the public lse leaves out.
        sinks_H1 = sinks_H.float()[:, None]
        normaliser_HN = torch.logaddexp(lse_HN, sinks_H1)
        delta_HN = (grad_out_NHV.float() * out_NHV).sum(-1).t()
        grad_sinks = -((sinks_H1 - normaliser_HN).exp() * delta_HN).sum(1).to(sinks_H.dtype)
    q, k, v = _equal_head_dims(q_NHD, k_NKD, v_NKV)
    grad_out, out = (_pad_columns(t, q.shape[2]) for t in (grad_out_NHV, out_NHV))
    grads = row.backward(grad_out, q, k, v, out, normaliser_HN)
    dq, dk, dv = (
        grad[:, :, : given.shape[2]].to(given.dtype).contiguous() for grad, given in zip(grads, (q_NHD, k_NKD, v_NKV))
    )
    return dq, dk, dv, grad_sinks


def row_attention(kernel: VarlenKernel, plan: TreePlan, *, window: int | None, path: FlashPath) -> RowAttention:
    """Attention of the plan's row by `path`, which `work.flash_path` chooses; only "gather" takes a window."""
    if path == "gather":
        return _Gather(kernel, plan, window)
    assert window is None
    return _Cascade(kernel, plan)


@dataclass(frozen=True, eq=False)
class _LevelTile(Tile):
    """All sequences of one level; `masked` is of no meaning, since the call cuts them apart."""

    call: VarlenCall


@dataclass(frozen=True, eq=False)
class _Cascade:
    kernel: VarlenKernel
    plan: TreePlan

    def forward(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.empty_like(q_NHD, dtype=torch.float32, memory_format=torch.contiguous_format)
        lse_KGN = cascade_forward(
            _LevelPrimitive(self.kernel),
            _level_tiles(self.plan),
            _split_heads(q_NHD, k_NKD.shape[1]),
            k_NKD.transpose(0, 1),
            v_NKD.transpose(0, 1),
            _split_heads(out, k_NKD.shape[1]),
        )
        return out, lse_KGN.flatten(0, 1)

    def backward(
        self,
        grad_out_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        kv_heads = k_NKD.shape[1]
        dq, dk, dv = (
            torch.empty_like(t, dtype=torch.float32, memory_format=torch.contiguous_format)
            for t in (q_NHD, k_NKD, v_NKD)
        )
        cascade_backward(
            _LevelPrimitive(self.kernel),
            _level_tiles(self.plan),
            _split_heads(grad_out_NHD, kv_heads),
            _split_heads(q_NHD, kv_heads),
            k_NKD.transpose(0, 1),
            v_NKD.transpose(0, 1),
            _split_heads(out_NHD, kv_heads),
            _split_first(lse_HN, kv_heads),
            (_split_heads(dq, kv_heads), dk.transpose(0, 1), dv.transpose(0, 1)),
        )
        return dq, dk, dv


@dataclass(frozen=True, eq=False)
class _LevelPrimitive:
    """A varlen kernel in the cascade's layout, with results in float32."""

    kernel: VarlenKernel

    def forward(self, tile: _LevelTile, q_KGRD: Tensor, k_KLD: Tensor, v_KLV: Tensor) -> tuple[Tensor, Tensor]:
        out, lse = self.kernel.forward(tile.call, _join_heads(q_KGRD), k_KLD.transpose(0, 1), v_KLV.transpose(0, 1))
        kv_heads = k_KLD.shape[0]
        return _split_heads(out.float(), kv_heads), _split_first(lse, kv_heads)

    def backward(
        self,
        tile: _LevelTile,
        grad_out_KGRV: Tensor,
        q_KGRD: Tensor,
        k_KLD: Tensor,
        v_KLV: Tensor,
        out_KGRV: Tensor,
        lse_KGR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        dq, dk, dv = self.kernel.backward(
            tile.call,
            _join_heads(grad_out_KGRV),
            _join_heads(q_KGRD),
            k_KLD.transpose(0, 1),
            v_KLV.transpose(0, 1),
            _join_heads(out_KGRV),
            lse_KGR.flatten(0, 1).contiguous(),
        )
        kv_heads = k_KLD.shape[0]
        return _split_heads(dq.float(), kv_heads), dk.float().transpose(0, 1), dv.float().transpose(0, 1)


@dataclass(frozen=True, eq=False)
class _Gather:
    kernel: VarlenKernel
    plan: TreePlan
    window: int | None

    def forward(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        index_L, call = _paths(self.plan, self.window)
        return self.kernel.forward(call, q_NHD, k_NKD[index_L], v_NKD[index_L])

    def backward(
        self,
        grad_out_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        index_L, call = _paths(self.plan, self.window)
        dq, *path_grads = self.kernel.backward(
            call, grad_out_NHD, q_NHD, k_NKD[index_L], v_NKD[index_L], out_NHD, lse_HN.contiguous()
        )
        dk, dv = (
            torch.zeros_like(t, dtype=torch.float32).index_add_(0, index_L, grad_LKD.float())
            for t, grad_LKD in zip((k_NKD, v_NKD), path_grads)
        )
        return dq, dk, dv


def _level_tiles(plan: TreePlan) -> tuple[_LevelTile, ...]:
    return plan_memo.get(plan.subtree_end, "level tiles", lambda: _build_level_tiles(plan))


def _build_level_tiles(plan: TreePlan) -> tuple[_LevelTile, ...]:
    segments, device = plan.segments, plan.depth.device
    return (
        _level_tile(levels.triangles(segments), True, device),
        *(_level_tile(level, False, device) for level in levels.rectangles(segments)),
    )


def _level_tile(spans: levels.Spans, causal: bool, device: torch.device) -> _LevelTile:
    return _LevelTile(
        queries=_rows(spans.q_start, spans.q_stop, device),
        keys=_rows(spans.k_start, spans.k_stop, device),
        causal=causal,
        masked=False,
        call=_varlen_call(spans.q_lengths, spans.k_lengths, device, causal=causal),
    )


def _paths(plan: TreePlan, window: int | None) -> tuple[Tensor, VarlenCall]:
    return plan_memo.get(plan.subtree_end, ("paths", window), lambda: _build_paths(plan, window))


def _build_paths(plan: TreePlan, window: int | None) -> tuple[Tensor, VarlenCall]:
    segments, device = plan.segments, plan.depth.device
    index_L = torch.from_numpy(levels.path_index(segments, window)).to(device)
    lengths = segments.stop - segments.start, levels.path_lengths(segments, window)
    return index_L, _varlen_call(*lengths, device, causal=True, window=window)


def _varlen_call(
    q_lengths: levels.Ints, k_lengths: levels.Ints, device: torch.device, *, causal: bool, window: int | None = None
) -> VarlenCall:
    cu_q, cu_k = (
        F.pad(torch.from_numpy(lengths).cumsum(0), (1, 0)).int().to(device) for lengths in (q_lengths, k_lengths)
    )
    return VarlenCall(cu_q, cu_k, int(q_lengths.max()), int(k_lengths.max()), causal, window)


def _rows(start: levels.Ints, stop: levels.Ints, device: torch.device) -> Rows:
    """A slice where the spans follow each other without a gap, so that no copy is made."""
    if (start[1:] == stop[:-1]).all():
        return slice(int(start[0]), int(stop[-1]))
    return torch.from_numpy(levels.concatenated_ranges(start, stop)).to(device)


def _split_heads(tensor_NHD: Tensor, kv_heads: int) -> Tensor:
    """View (N, H, D) as (K, G, N, D)."""
    num_tokens, heads, dim = tensor_NHD.shape
    return tensor_NHD.view(num_tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)


def _split_first(tensor_HN: Tensor, kv_heads: int) -> Tensor:
    """View (H, N) as (K, G, N)."""
    return tensor_HN.reshape(kv_heads, tensor_HN.shape[0] // kv_heads, -1)


def _join_heads(tensor_KGRD: Tensor) -> Tensor:
    """View (K, G, R, D) as (R, H, D)."""
    return tensor_KGRD.permute(2, 0, 1, 3).flatten(1, 2)


def _equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zeros to one multiple of 8, which the kernels require and which changes no result."""
    dim = -(-max(q.shape[2], v.shape[2]) // 8) * 8
    return _pad_columns(q, dim), _pad_columns(k, dim), _pad_columns(v, dim)


def _pad_columns(tensor: Tensor, dim: int) -> Tensor:
    """To `dim` columns, adjacent in memory."""
    if tensor.shape[2] < dim:
        return F.pad(tensor, (0, dim - tensor.shape[2]))
    return tensor if tensor.stride(2) == 1 else tensor.contiguous()
