"""The float64 result of one kv head, at sizes where the whole dense oracle would not fit, and the check against it.

Legend: N tokens, K kv heads, G query heads of a kv head, D head dim, C queries of a chunk, M keys a chunk may see.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from treepack.kernels.plan import TreePlan

# Scores of one chunk: 2^27 float64 numbers are 1 GiB, and there are a few such tensors at a time.
_CHUNK_SCORES = 2**27


@dataclass(frozen=True, eq=False)
class Results:
    """Output and gradients of one kv head: (N, G, D), and (N, 1, D) of k and v."""

    out: Tensor
    dq: Tensor
    dk: Tensor
    dv: Tensor


def exact_results(q_NGD: Tensor, k_ND: Tensor, v_ND: Tensor, grad_out_NGD: Tensor, plan: TreePlan) -> Results:
    """Attend and differentiate one kv head in float64, chunk by chunk of queries."""
    q, grad_out = (t.double().transpose(0, 1) for t in (q_NGD, grad_out_NGD))
    k, v = k_ND.double(), v_ND.double()
    group, num_tokens, head_dim = q.shape
    out, dq = torch.empty_like(q), torch.empty_like(q)
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    chunk = max(1, _CHUNK_SCORES // (group * num_tokens))
    token = torch.arange(num_tokens, device=k.device)
    for start in range(0, num_tokens, chunk):
        stop = min(start + chunk, num_tokens)
        query_C, key_M = token[start:stop, None], token[None, :stop]
        hidden_CM = (key_M > query_C) | (query_C >= plan.subtree_end[None, :stop])
        scores = q[:, start:stop] @ k[:stop].t()
        weights = scores.mul_(head_dim**-0.5).masked_fill_(hidden_CM, -torch.inf).softmax(-1)
        out[:, start:stop] = weights @ v[:stop]
        dv[:stop] += torch.einsum("gcm,gcd->md", weights, grad_out[:, start:stop])
        delta = (grad_out[:, start:stop] * out[:, start:stop]).sum(-1, keepdim=True)
        grad_scores = (grad_out[:, start:stop] @ v[:stop].t()).sub_(delta).mul_(weights).mul_(head_dim**-0.5)
        dq[:, start:stop] = grad_scores @ k[:stop]
        dk[:stop] += torch.einsum("gcm,gcd->md", grad_scores, q[:, start:stop])
    return Results(out.transpose(0, 1), dq.transpose(0, 1), dk[:, None], dv[:, None])


def error_of_budget(found: Tensor, exact: Tensor, plan: TreePlan) -> float:
    """Largest error of any segment, in units of what its dtype allows; above 1 is red, and NaN is infinitely so.

    A segment may be off by 4 roundings of its own largest value, and by 1 of the row's root mean square: weights and
    score gradients are rounded to the inputs' dtype before their products, whose errors add up as random ones do.
    """
    error = (found.double() - exact).abs()
    if not bool(error.isfinite().all()):
        return float("inf")
    owner = _segment_of_token(plan)
    worst, largest = (_largest_by_segment(t, owner) for t in (error, exact.abs()))
    budget = torch.finfo(found.dtype).eps * (4 * largest + exact.square().mean().sqrt())
    return float((worst / budget).max())


def _segment_of_token(plan: TreePlan) -> Tensor:
    starts = torch.zeros(plan.num_tokens, dtype=torch.int64)
    starts[torch.from_numpy(plan.segments.start[1:])] = 1
    return starts.cumsum(0).to(plan.depth.device)


def _largest_by_segment(values: Tensor, owner: Tensor) -> Tensor:
    segments = int(owner[-1]) + 1
    return values.new_zeros(segments).scatter_reduce(0, owner, values.flatten(1).amax(1), "amax")
