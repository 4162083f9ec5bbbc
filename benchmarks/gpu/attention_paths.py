"""Ours and the peers behind one interface: how each lays out its tensors, what it prepares a row, how it attends.

What the peers are:
- "gather + varlen" is TRL's tree attention over the FlashAttention that torch ships: `index_select` copies every
  segment's whole path, forward, and its gradient adds the copies up again.
- "unshared varlen" runs every root-to-leaf sequence alone. Equal samples of a group run once here, so that it
  does less than a trainer without sharing. Its copies of the shared tokens are made outside of the timing.
- "flex" is FlexAttention, compiled with dynamic shapes, with the same mask as blocks of 128 x 128.

Legend: N tokens, H query heads, K kv heads, D head dim, T tokens of a peer's own layout.
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.nn.attention.varlen import varlen_attn

from treepack.kernels.checks import Backend
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan
from workloads import Workload

_FLEX_BLOCK = 128


@dataclass(frozen=True, eq=False)
class Inputs:
    """q (N, H, D), k and v (N, K, D), the output's gradient (N, H, D)."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad_out: Tensor

    @classmethod
    def draw(cls, num_tokens: int, heads: tuple[int, int], head_dim: int, device: torch.device) -> "Inputs":
        """Normal bfloat16 tensors."""
        generator = torch.Generator(device).manual_seed(num_tokens)

        def normal(count: int) -> Tensor:
            shape = (num_tokens, count, head_dim)
            return torch.randn(shape, generator=generator, device=device, dtype=torch.bfloat16)

        return cls(normal(heads[0]), normal(heads[1]), normal(heads[1]), normal(heads[0]))


class Path(Protocol):
    """One way to attend to a workload's row.

    Attributes:
        name: shown in the results.
        error_allowance: how far off its results may be, in units of `exact_attention.error_of_budget`.
    """

    name: str
    error_allowance: float

    def lay_out(self, workload: Workload, inputs: Inputs) -> Inputs:
        """The inputs as this path takes them; not timed."""
        ...

    def prepare(self, workload: Workload, device: torch.device) -> Any:
        """Whatever is derived from the row once, for all layers."""
        ...

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: Any) -> Tensor:
        """The differentiable output."""
        ...

    def packed_out(self, workload: Workload, out: Tensor) -> Tensor:
        """The packed row's output."""
        ...

    def packed_grad(self, workload: Workload, grad: Tensor) -> Tensor:
        """The packed row's gradient of q, k or v."""
        ...


class _Packed:
    """Takes and gives the packed layout."""

    error_allowance = 1.0

    def lay_out(self, workload: Workload, inputs: Inputs) -> Inputs:
        return inputs

    def packed_out(self, workload: Workload, out: Tensor) -> Tensor:
        return out

    def packed_grad(self, workload: Workload, grad: Tensor) -> Tensor:
        return grad


class TreePath(_Packed):
    """`tree_attention` with a named backend; its plan is built on the device."""

    def __init__(self, backend: Backend) -> None:
        self.name = f"treepack {backend}"
        self._backend = backend

    def prepare(self, workload: Workload, device: torch.device) -> TreePlan:
        return TreePlan.from_position_ids(workload.position_ids.to(device))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: TreePlan) -> Tensor:
        return tree_attention(q, k, v, plan=prepared, backend=self._backend)


@dataclass(frozen=True, eq=False)
class _Boundaries:
    cu_q: Tensor
    cu_k: Tensor
    max_q: int
    max_k: int

    @classmethod
    def of(cls, lengths_q: list[int], lengths_k: list[int], device: torch.device) -> "_Boundaries":
        cu_q, cu_k = (
            torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
            for lengths in (lengths_q, lengths_k)
        )
        return cls(cu_q, cu_k, max(lengths_q), max(lengths_k))


class GatherPath(_Packed):
    """TRL's: every segment attends to a copy of its path."""

    name = "gather + varlen"
    # The gradient of `index_select` adds up the copies of a key in bfloat16; a wrong pair would weigh 64 and more.
    error_allowance = 16.0

    def prepare(self, workload: Workload, device: torch.device) -> tuple[Tensor, _Boundaries]:
        index = torch.from_numpy(np.concatenate(workload.paths())).to(device)
        lengths = [length for _, length in workload.segments]
        return index, _Boundaries.of(lengths, [sum(segment) for segment in workload.segments], device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: tuple[Tensor, _Boundaries]) -> Tensor:
        index, boundaries = prepared
        return _varlen(q, k.index_select(0, index), v.index_select(0, index), boundaries)


class UnsharedPath:
    """Every root-to-leaf sequence alone."""

    name = "unshared varlen"
    error_allowance = 1.0

    def lay_out(self, workload: Workload, inputs: Inputs) -> Inputs:
        index = _leaf_index(workload).to(inputs.q.device)
        # A shared token's gradient enters once, as in the packed row.
        grad_out = inputs.grad_out[index]
        grad_out[~_first_copies(index, workload.num_tokens)] = 0
        return Inputs(inputs.q[index], inputs.k[index], inputs.v[index], grad_out)

    def prepare(self, workload: Workload, device: torch.device) -> _Boundaries:
        return _Boundaries.of(workload.sequence_lengths, workload.sequence_lengths, device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: _Boundaries) -> Tensor:
        return _varlen(q, k, v, prepared)

    def packed_out(self, workload: Workload, out: Tensor) -> Tensor:
        packed = out.new_empty(workload.num_tokens, *out.shape[1:])
        packed[_leaf_index(workload).to(out.device)] = out
        return packed

    def packed_grad(self, workload: Workload, grad: Tensor) -> Tensor:
        total = torch.zeros(workload.num_tokens, *grad.shape[1:], dtype=torch.float32, device=grad.device)
        return total.index_add_(0, _leaf_index(workload).to(grad.device), grad.float()).to(grad.dtype)


class FlexPath(_Packed):
    """FlexAttention over the same mask; eager on a CPU, where it has no backward."""

    name = "flex"

    def __init__(self, device: torch.device) -> None:
        eager: Callable[..., Any] = flex_attention
        self._flex = torch.compile(eager, dynamic=True) if device.type == "cuda" else eager

    def prepare(self, workload: Workload, device: torch.device) -> BlockMask:
        plan = TreePlan.from_position_ids(workload.position_ids.to(device))
        return block_mask(plan)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: BlockMask) -> Tensor:
        batched = (t.transpose(0, 1).unsqueeze(0) for t in (q, k, v))
        return self._flex(*batched, block_mask=prepared, enable_gqa=True)[0].transpose(0, 1)


def block_mask(plan: TreePlan) -> BlockMask:
    """FlexAttention's blocks, straight from the plan's bounds: `create_block_mask` would look at all N x N pairs."""
    end, device = plan.subtree_end, plan.depth.device
    blocks = -(-plan.num_tokens // _FLEX_BLOCK)
    missing = blocks * _FLEX_BLOCK - plan.num_tokens
    # Keys past the row's end are seen by nobody.
    block_end = F.pad(end, (0, missing)).view(blocks, _FLEX_BLOCK)
    first, last = block_end.amin(1), block_end.amax(1)
    start = torch.arange(0, blocks * _FLEX_BLOCK, _FLEX_BLOCK, device=device)
    below = start[None, :] < start[:, None]
    visible = (start[None, :] <= start[:, None]) & (last[None, :] > start[:, None])
    full = below & (first[None, :] >= start[:, None] + _FLEX_BLOCK)
    counts_and_indices = [_ordered_blocks(kind) for kind in (visible & ~full, full)]

    def mask_mod(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (query < end[key])

    return BlockMask.from_kv_blocks(
        *counts_and_indices[0],
        *counts_and_indices[1],
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=mask_mod,
        seq_lengths=(plan.num_tokens, plan.num_tokens),
    )


def _ordered_blocks(kind: Tensor) -> tuple[Tensor, Tensor]:
    """(1, 1, Q) counts and (1, 1, Q, K) indices of the key blocks of every query block, the chosen ones first."""
    order = kind.byte().argsort(dim=1, descending=True, stable=True)
    return kind.sum(1).int()[None, None], order.int()[None, None].contiguous()


def _leaf_index(workload: Workload) -> Tensor:
    paths = workload.paths()
    return torch.from_numpy(np.concatenate([paths[leaf] for leaf in workload.leaves]))


def _first_copies(index: Tensor, num_tokens: int) -> Tensor:
    """(T,) bool: whether this is a packed token's first copy."""
    place = torch.arange(len(index), device=index.device)
    first = place.new_full((num_tokens,), len(index)).scatter_reduce(0, index, place, "amin")
    return first[index] == place


def _varlen(q: Tensor, k: Tensor, v: Tensor, at: _Boundaries) -> Tensor:
    """Causal attention of every sequence, its queries the last ones of its keys."""
    if q.device.type == "cpu":
        return _varlen_on_cpu(q, k, v, at)
    return _torch_varlen()(q, k, v, at.cu_q, at.cu_k, at.max_q, at.max_k, window_size=(-1, 0))


def _torch_varlen() -> Callable[..., Any]:
    # torch 2.11 takes grouped heads unasked, 2.13 wants to be told.
    grouped = "enable_gqa" in inspect.signature(varlen_attn).parameters
    return partial(varlen_attn, enable_gqa=True) if grouped else varlen_attn


def _varlen_on_cpu(q: Tensor, k: Tensor, v: Tensor, at: _Boundaries) -> Tensor:
    parts = []
    q_parts, k_parts, v_parts = (
        tensor.split(cu.diff().tolist()) for tensor, cu in ((q, at.cu_q), (k, at.cu_k), (v, at.cu_k))
    )
    for sequence in zip(q_parts, k_parts, v_parts):
        batched = (t.transpose(0, 1).unsqueeze(0) for t in sequence)
        queries, keys = len(sequence[0]), len(sequence[1])
        mask = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        out = F.scaled_dot_product_attention(*batched, attn_mask=mask, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)
