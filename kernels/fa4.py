"""Tree attention by FlashAttention 4 (the flash-attn-4 package) on Hopper: its kernels, our mask and block lists.

Unverified: the kernels compile for sm_90a with this mask, forward and backward (tests/kernels/test_fa4_compiles.py),
but no GPU has run them yet, hence they serve only who names them. Sinks stay with `flash.py`, which adds them after the
softmax, so that the log-sum-exp excludes them here as everywhere.

Legend: H query heads, K kv heads, N tokens, D head dim.
"""

import importlib
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from treepack.kernels.fa4_lists import BlockLists, block_lists
from treepack.kernels.plan import TreePlan
from treepack.kernels.varlen import is_installed

BLOCK_SIZES = {64: (128, 128), 128: (128, 128), 256: (128, 64)}
"""Tokens of a block of queries and of keys by head dim, on SM90, in both directions."""

# Read once, since a traced function can look nothing up.
_HAS_FLASH_ATTN_4 = is_installed("flash-attn-4")


@dataclass(frozen=True, eq=False)
class Fa4Attention:
    """`flash.RowAttention` by FlashAttention 4; head dims of `BLOCK_SIZES`, not deterministic backward."""

    plan: TreePlan
    scale: float
    window: int | None
    softcap: float | None

    def forward(self, q_NHD: Tensor, k_NKD: Tensor, v_NKD: Tensor) -> tuple[Tensor, Tensor]:
        """See `RowAttention`."""
        by_queries, _ = self._lists(q_NHD.shape[2])
        out, lse, *_ = _interface()._flash_attn_fwd(
            *(tensor.unsqueeze(0) for tensor in (q_NHD, k_NKD, v_NKD)),
            softmax_scale=self.scale,
            softcap=self.softcap,
            mask_mod=_tree_mask(self.window is not None),
            aux_tensors=self._bounds(),
            block_sparse_tensors=_sparse_tensors(by_queries, BLOCK_SIZES[q_NHD.shape[2]]),
            return_lse=True,
        )
        return out.squeeze(0), lse.squeeze(0)

    def backward(
        self,
        grad_out_NHD: Tensor,
        q_NHD: Tensor,
        k_NKD: Tensor,
        v_NKD: Tensor,
        out_NHD: Tensor,
        lse_HN: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """See `RowAttention`."""
        # The backward walks keys first: the forward's lists there give wrong gradients without a word.
        _, by_keys = self._lists(q_NHD.shape[2])
        dq, dk, dv = _interface()._flash_attn_bwd(
            *(tensor.unsqueeze(0) for tensor in (q_NHD, k_NKD, v_NKD, out_NHD, grad_out_NHD, lse_HN.contiguous())),
            softmax_scale=self.scale,
            softcap=self.softcap or 0.0,
            mask_mod=_tree_mask(self.window is not None),
            aux_tensors=self._bounds(),
            block_sparse_tensors=_sparse_tensors(by_keys, BLOCK_SIZES[q_NHD.shape[2]]),
        )
        return dq.squeeze(0), dk.squeeze(0), dv.squeeze(0)

    def _lists(self, head_dim: int) -> tuple[BlockLists, BlockLists]:
        block_q, block_k = BLOCK_SIZES[head_dim]
        return block_lists(self.plan, block_q=block_q, block_k=block_k, window=self.window)

    def _bounds(self) -> list[Tensor]:
        """What the mask reads; the window goes in as a tensor, so that no value of it compiles anew."""
        if self.window is None:
            return [self.plan.subtree_end]
        return [self.plan.subtree_end, self.plan.depth, self.plan.depth + self.window]


def check_fa4(q_NHD: Tensor, v_NKV: Tensor) -> None:
    """Check that FlashAttention 4 can serve these tensors.

    Raises:
        NotImplementedError: the package is missing, or the GPU or the head dims are others than those it is known for.
    """
    if q_NHD.shape[2] not in BLOCK_SIZES or v_NKV.shape[2] != q_NHD.shape[2]:
        raise NotImplementedError(
            f"q and v must have one head dim out of {', '.join(map(str, BLOCK_SIZES))} for backend 'fa4', "
            f"got {q_NHD.shape[2]} and {v_NKV.shape[2]}"
        )
    capability = torch.cuda.get_device_capability(q_NHD.device)
    if capability[0] != 9:
        raise NotImplementedError(
            "q must be on a GPU of compute capability 9 (Hopper) for backend 'fa4', "
            f"got {capability[0]}.{capability[1]}"
        )
    if not _HAS_FLASH_ATTN_4:
        raise NotImplementedError(
            "backend 'fa4' must have the flash-attn-4 package (pip install 'treepack[flash]'), which is not installed"
        )


@cache
def _interface() -> Any:
    return importlib.import_module("flash_attn.cute.interface")


def _sparse_tensors(lists: BlockLists, block_size: tuple[int, int]) -> Any:
    """One list for all heads: a batch and a head dim of one."""
    sparsity = importlib.import_module("flash_attn.cute.block_sparsity")
    return sparsity.BlockSparseTensorsTorch(
        mask_block_cnt=lists.partial_count.view(1, 1, -1),
        mask_block_idx=lists.partial_index.view(1, 1, *lists.partial_index.shape),
        full_block_cnt=lists.full_count.view(1, 1, -1),
        full_block_idx=lists.full_index.view(1, 1, *lists.full_index.shape),
        block_size=block_size,
    )


@cache
def _tree_mask(windowed: bool) -> Any:
    """`mask_mod` of FlashAttention 4: n <= m < subtree_end[n] and, in a window, depth[m] < depth[n] + window."""
    cutlass: Any = importlib.import_module("cutlass")
    cute: Any = importlib.import_module("cutlass.cute")
    utils: Any = importlib.import_module("flash_attn.cute.utils")

    def load(tensor: Any, index: Any) -> Any:
        return utils.scalar_to_ssa(tensor[index[0]], cutlass.Int32)

    def below(batch: Any, head: Any, m_idx: Any, n_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        return (n_idx <= m_idx) & (m_idx < load(aux_tensors[0], n_idx))

    def near(batch: Any, head: Any, m_idx: Any, n_idx: Any, seqlen_info: Any, aux_tensors: Any) -> Any:
        visible = (n_idx <= m_idx) & (m_idx < load(aux_tensors[0], n_idx))
        return visible & (load(aux_tensors[1], m_idx) < load(aux_tensors[2], n_idx))

    mask = cute.jit(near if windowed else below)
    # SM90 evaluates masks one pair at a time.
    mask.__vec_size__ = 1
    return mask
