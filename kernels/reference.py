"""Dense float64 tree attention: the oracle every other path is tested against.

Legend: H query heads, K kv heads, N tokens, D head dim, V value dim.
"""

import torch
from torch import Tensor

from treepack.kernels.plan import TreePlan


def visible_pairs(plan: TreePlan, sliding_window: int | None = None) -> Tensor:
    """(N, N) bool: entry (i, j) says whether query i sees key j."""
    token = torch.arange(plan.num_tokens, device=plan.depth.device)
    query, key = token[:, None], token[None, :]
    visible = (key <= query) & (query < plan.subtree_end[None, :])
    if sliding_window is not None:
        visible &= plan.depth[:, None] - plan.depth[None, :] < sliding_window
    return visible


def reference_attention(
    q_NHD: Tensor,
    k_NKD: Tensor,
    v_NKV: Tensor,
    plan: TreePlan,
    *,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend densely in float64; plain torch, so autograd gives the exact gradients.

    Args:
        q_NHD: queries (N, H, D).
        k_NKD: keys (N, K, D), H a multiple of K.
        v_NKV: values (N, K, V).
        plan: the row's forest.
        scale: factor of the scores, 1 / sqrt(D) by default.
        sliding_window: query i sees key j only if depth[i] - depth[j] < sliding_window.
        softcap: scores s become softcap * tanh(s / softcap).
        sinks: (H,) one logit a head that takes part in the normalisation and has no value.

    Returns:
        out (N, H, V) and lse (H, N), natural log without the sinks, both float64.
    """
    num_tokens, heads, head_dim = q_NHD.shape
    group = heads // k_NKD.shape[1]
    q, k, v = (t.double().transpose(0, 1) for t in (q_NHD, k_NKD, v_NKV))
    k, v = (t.repeat_interleave(group, 0) for t in (k, v))
    scores = q @ k.transpose(1, 2) * (head_dim**-0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible_pairs(plan, sliding_window), -torch.inf)
    lse = torch.logsumexp(scores, -1)
    normaliser = lse if sinks is None else torch.logaddexp(lse, sinks.double()[:, None].expand(-1, num_tokens))
    out = torch.exp(scores - normaliser[:, :, None]) @ v
    return out.transpose(0, 1), lse
