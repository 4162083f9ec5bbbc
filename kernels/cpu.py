"""Tree attention on the CPU: the cascade over torch's fused attention, or over plain matmuls where there is a softcap.

Memory is linear in tokens: the largest temporaries are one tile's. Half-precision inputs are computed in float32
(their backward is several times slower natively) and float64 in float64. Every sum has a fixed order, so
results repeat bit for bit.

Legend: H query heads, K kv heads, G query heads per kv head, N tokens, R queries of a tile, L keys of a tile,
D head dim, V value dim.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from treepack.kernels.cascade import Primitive, Rows, Tile, cascade_backward, cascade_forward
from treepack.kernels.cpu_tiles import Tiling, tile_schedule
from treepack.kernels.plan import TreePlan

# Measured: larger packs waste masked pairs, smaller blocks drown in calls and merges.
_PACK = 128
_CHAIN = 64
# torch's fused kernel computes all pairs of up to 512 causal keys.
_LEAF = 256
# Where a tile's mask or scores are built in memory: its most keys, and its most scores of all heads together (4 MiB).
_SPLIT = 256
_SCORES = 2**20

_sdpa_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_sdpa_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True)
class Options:
    """What modifies the softmax: scale, sliding window by depth (None: off), softcap (None: off)."""

    scale: float
    window: int | None
    softcap: float | None


def attention_forward(
    q_NHD: Tensor, k_NKD: Tensor, v_NKV: Tensor, sinks_H: Tensor | None, plan: TreePlan, options: Options
) -> tuple[Tensor, Tensor]:
    """Return out (N, H, V) in q's dtype and lse (H, N), natural log without sinks, in the compute dtype."""
    q, k, v = (_computable(t) for t in (q_NHD, k_NKD, v_NKV))
    num_tokens, heads, kv_heads = q.shape[0], q.shape[1], k.shape[1]
    value_dim = v.shape[2]
    if options.softcap is None:
        q, k, v = _equal_head_dims(q, k, v)
    out = q.new_empty(num_tokens, heads, v.shape[2])
    lse_KGN = cascade_forward(
        _primitive(plan, options),
        tile_schedule(plan, _tiling(options, heads)),
        _split_heads(q, kv_heads),
        k.transpose(0, 1),
        v.transpose(0, 1),
        _split_heads(out, kv_heads),
    )
    lse_HN = lse_KGN.reshape(heads, num_tokens)
    if sinks_H is not None:
        out *= torch.sigmoid(lse_HN - sinks_H.to(lse_HN.dtype)[:, None]).t()[:, :, None]
    return out[:, :, :value_dim].to(q_NHD.dtype).contiguous(), lse_HN


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
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the gradients of q, k, v and, where there are sinks, of the sinks."""
    q, k, v, out = (_computable(t) for t in (q_NHD, k_NKD, v_NKV, out_NHV))
    grad_out = torch.zeros_like(out) if grad_out_NHV is None else _computable(grad_out_NHV)
    num_tokens, heads, head_dim = q.shape
    kv_heads, value_dim = v.shape[1:]
    normaliser_HN, grad_sinks = lse_HN, None
    if sinks_H is not None:
        sinks_H1 = sinks_H.to(lse_HN.dtype)[:, None]
        normaliser_HN = torch.logaddexp(lse_HN, sinks_H1)
        delta_HN = (grad_out * out).sum(-1).t()
        grad_sinks = -((sinks_H1 - normaliser_HN).exp() * delta_HN).sum(1).to(sinks_H.dtype)
    if grad_lse_HN is not None:
        # P here is normalised with the sinks, the public lse without.
        grad_lse_HN = grad_lse_HN.to(lse_HN.dtype) * (normaliser_HN - lse_HN).exp()
        v, out, grad_out = _fold_lse_gradient(v, out, grad_out, grad_lse_HN.t())
    if options.softcap is None:
        q, k, v = _equal_head_dims(q, k, v)
        out, grad_out = (_pad_last(t, v.shape[2]) for t in (out, grad_out))
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    cascade_backward(
        _primitive(plan, options),
        tile_schedule(plan, _tiling(options, heads)),
        _split_heads(grad_out, kv_heads),
        _split_heads(q, kv_heads),
        k.transpose(0, 1),
        v.transpose(0, 1),
        _split_heads(out, kv_heads),
        normaliser_HN.view(kv_heads, heads // kv_heads, num_tokens),
        (_split_heads(dq, kv_heads), dk.transpose(0, 1), dv.transpose(0, 1)),
    )
    return (
        dq[:, :, :head_dim].to(q_NHD.dtype).contiguous(),
        dk[:, :, :head_dim].to(k_NKD.dtype).contiguous(),
        dv[:, :, :value_dim].to(v_NKV.dtype).contiguous(),
        grad_sinks,
    )


class _SdpaPrimitive:
    """torch's fused CPU attention; masks are additive and exist for one tile at a time."""

    def __init__(self, mask: "_TileMask", scale: float) -> None:
        self._mask = mask
        self._scale = scale

    def forward(self, tile: Tile, q_KGRD: Tensor, k_KLD: Tensor, v_KLV: Tensor) -> tuple[Tensor, Tensor]:
        hidden_RL = self._mask.hidden(tile) if tile.masked else None
        out, lse = _sdpa_forward(
            q_KGRD,
            _per_query_head(k_KLD, q_KGRD),
            _per_query_head(v_KLV, q_KGRD),
            0.0,
            tile.causal,
            attn_mask=_additive(hidden_RL, q_KGRD.dtype),
            scale=self._scale,
        )
        if hidden_RL is not None and self._mask.window is not None:
            # The fused kernel reports lse 0 for a query without a key.
            lse = lse.masked_fill(hidden_RL.all(-1), -torch.inf)
        return out, lse

    def backward(
        self,
        tile: Tile,
        grad_out_KGRV: Tensor,
        q_KGRD: Tensor,
        k_KLD: Tensor,
        v_KLV: Tensor,
        out_KGRV: Tensor,
        lse_KGR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        hidden_RL = self._mask.hidden(tile) if tile.masked else None
        dq, dk, dv = _sdpa_backward(
            grad_out_KGRV,
            q_KGRD,
            _per_query_head(k_KLD, q_KGRD),
            _per_query_head(v_KLV, q_KGRD),
            out_KGRV,
            lse_KGR,
            0.0,
            tile.causal,
            attn_mask=_additive(hidden_RL, q_KGRD.dtype),
            scale=self._scale,
        )
        return dq, dk.sum(1), dv.sum(1)


class _MatmulPrimitive:
    """Attention with softcap, S = softcap * tanh(scale * QK^T / softcap), by batched matmuls over small tiles."""

    def __init__(self, mask: "_TileMask", scale: float, softcap: float) -> None:
        self._mask = mask
        self._scale = scale
        self._softcap = softcap

    def forward(self, tile: Tile, q_KGRD: Tensor, k_KLD: Tensor, v_KLV: Tensor) -> tuple[Tensor, Tensor]:
        group = q_KGRD.shape[1]
        scores = self._squashed(q_KGRD.flatten(1, 2), k_KLD).mul_(self._softcap)
        self._hide(scores, tile, group)
        lse = torch.logsumexp(scores, -1, keepdim=True)
        # A query without a key has lse -inf; against a finite value its probabilities come out 0, not NaN.
        finite = lse.clamp_min(torch.finfo(lse.dtype).min)
        out = scores.sub_(finite).exp_() @ v_KLV
        return _split_group(out, group), _split_group(lse, group).squeeze(-1)

    def backward(
        self,
        tile: Tile,
        grad_out_KGRV: Tensor,
        q_KGRD: Tensor,
        k_KLD: Tensor,
        v_KLV: Tensor,
        out_KGRV: Tensor,
        lse_KGR: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        group = q_KGRD.shape[1]
        q, grad_out = q_KGRD.flatten(1, 2), grad_out_KGRV.flatten(1, 2)
        squashed = self._squashed(q, k_KLD)
        scores = squashed * self._softcap
        self._hide(scores, tile, group)
        probs = scores.sub_(lse_KGR.flatten(1).unsqueeze(-1)).exp_()
        dv = probs.transpose(1, 2) @ grad_out
        delta = (grad_out_KGRV * out_KGRV).sum(-1).flatten(1).unsqueeze(-1)
        d_scores = (grad_out @ v_KLV.transpose(1, 2)).sub_(delta).mul_(probs)
        # d tanh(x) = 1 - tanh(x)^2
        d_scores.addcmul_(d_scores * squashed, squashed, value=-1.0).mul_(self._scale)
        dq = _split_group(d_scores @ k_KLD, group)
        return dq, d_scores.transpose(1, 2) @ q, dv

    def _squashed(self, q: Tensor, k: Tensor) -> Tensor:
        return (q @ k.transpose(1, 2)).mul_(self._scale / self._softcap).tanh_()

    def _hide(self, scores: Tensor, tile: Tile, group: int) -> None:
        if tile.masked or tile.causal:
            hidden_RL = self._mask.hidden(tile)
            if tile.causal:
                hidden_RL |= torch.ones_like(hidden_RL).triu_(1)
            _split_group(scores, group).masked_fill_(hidden_RL, -torch.inf)


@dataclass(frozen=True)
class _TileMask:
    """Reads a tile's invisible pairs off the plan, by comparing bounds."""

    plan: TreePlan
    window: int | None

    def hidden(self, tile: Tile) -> Tensor:
        """(R, L) bool; that a causal tile hides later keys too is left to the primitive."""
        hidden = _row_index(tile.queries)[:, None] >= self.plan.subtree_end[tile.keys]
        if self.window is not None:
            depth = self.plan.depth
            hidden |= depth[tile.queries][:, None] - depth[tile.keys] >= self.window
        return hidden


def _primitive(plan: TreePlan, options: Options) -> Primitive[Tile]:
    mask = _TileMask(plan, options.window)
    if options.softcap is None:
        return _SdpaPrimitive(mask, options.scale)
    return _MatmulPrimitive(mask, options.scale, options.softcap)


def _tiling(options: Options, heads: int) -> Tiling:
    if options.softcap is None and options.window is None:
        return Tiling(_PACK, _CHAIN, leaf=_LEAF)
    rows = max(_SCORES // (heads * _SPLIT), 1)
    return Tiling(_PACK, _CHAIN, split=_SPLIT, rows=rows, window=options.window)


def _computable(tensor: Tensor) -> Tensor:
    """In float32 or float64, with elements of a head next to each other, as the fused kernel takes for granted."""
    dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _split_heads(tensor_NHD: Tensor, kv_heads: int) -> Tensor:
    """View (N, H, D) as (K, G, N, D)."""
    num_tokens, heads, dim = tensor_NHD.shape
    return tensor_NHD.view(num_tokens, kv_heads, heads // kv_heads, dim).permute(1, 2, 0, 3)


def _split_group(tensor: Tensor, group: int) -> Tensor:
    """View (K, G * R, L) as (K, G, R, L)."""
    return tensor.view(tensor.shape[0], group, -1, tensor.shape[2])


def _per_query_head(tensor_KLD: Tensor, q_KGRD: Tensor) -> Tensor:
    """Share each kv head between its query heads without a copy."""
    return tensor_KLD.unsqueeze(1).expand(-1, q_KGRD.shape[1], -1, -1)


def _additive(hidden_RL: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if hidden_RL is None:
        return None
    return torch.zeros(hidden_RL.shape, dtype=dtype).masked_fill_(hidden_RL, -torch.inf)


def _row_index(rows: Rows) -> Tensor:
    return torch.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows


def _pad_last(tensor: Tensor, size: int) -> Tensor:
    return F.pad(tensor, (0, size - tensor.shape[-1])) if tensor.shape[-1] < size else tensor


def _equal_head_dims(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Pad with zeros to one head dim, which the fused kernel requires and which changes no result."""
    dim = max(q.shape[-1], v.shape[-1])
    return _pad_last(q, dim), _pad_last(k, dim), _pad_last(v, dim)


def _fold_lse_gradient(v: Tensor, out: Tensor, grad_out: Tensor, grad_lse_NH: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Carry the gradient of lse through a backward that does not know it.

    dS = P * (dP - delta + dLSE) with delta = sum(dO * O): a value column of zeros, with dO = 1 and O = -dLSE, adds
    dLSE to -delta and nothing to dP.
    """
    v = F.pad(v, (0, 1))
    out = torch.cat([out, -grad_lse_NH.unsqueeze(-1)], -1)
    grad_out = F.pad(grad_out, (0, 1), value=1.0)
    return v, out, grad_out
