"""Compile FlashAttention 4 with our mask and lists for sm_90a, on fake tensors: no GPU is needed.

Run as a script, since the environment decides the target before anything is imported:
`python -P compile_fa4.py HEAD_DIM WINDOW SOFTCAP`, 0 for none.
"""

import os
import sys

os.environ |= {"FLASH_ATTENTION_ARCH": "sm_90", "CUTE_DSL_ARCH": "sm_90a", "FLASH_ATTENTION_NUM_SMS": "132"}

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from treepack.kernels import fa4, fa4_lists
from treepack.kernels.plan import TreePlan

NUM_TOKENS, HEADS, KV_HEADS = 4096, 32, 8


def fake_lists(plan: TreePlan, *, block_q: int, block_k: int, window: int | None) -> tuple[fa4_lists.BlockLists, ...]:
    """Lists of a shape that occurs; their lengths depend on values, which fake tensors have none of."""
    rows, columns = NUM_TOKENS // block_q, NUM_TOKENS // block_k

    def lists(rows: int, widest: int) -> fa4_lists.BlockLists:
        shapes = (rows,), (rows, widest), (rows,), (rows, widest)
        return fa4_lists.BlockLists(*(torch.empty(shape, dtype=torch.int32, device="cuda") for shape in shapes))

    return lists(rows, columns - 1), lists(columns, rows - 1)


def main(head_dim: int, window: int, softcap: float) -> None:
    fa4.block_lists = fake_lists
    with FakeTensorMode():
        plan = TreePlan(*(torch.empty(NUM_TOKENS, dtype=torch.int32, device="cuda") for _ in range(2)))
        q, k, v = (
            torch.empty(NUM_TOKENS, heads, head_dim, dtype=torch.bfloat16, device="cuda")
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        row = fa4.Fa4Attention(plan, 0.1, window or None, softcap or None)
        out, lse = row.forward(q, k, v)
        assert (out.shape, lse.shape, lse.dtype) == (q.shape, (HEADS, NUM_TOKENS), torch.float32)
        grads = row.backward(torch.empty_like(out), q, k, v, out, lse)
        assert [grad.shape for grad in grads] == [q.shape, k.shape, v.shape]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
