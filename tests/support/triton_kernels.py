"""The Triton kernels under the interpreter: called through autograd, in poisoned memory, judged against the oracle."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from support.forests import Inputs, assert_close, exact_results, plain_attention, run
from treepack.kernels import gpu
from treepack.kernels.configs import AttentionConfig, Tile
from treepack.kernels.plan import TreePlan

CANARY = -77.0
_EXTRA_COLUMNS = 24


def small_config(
    inputs: Inputs, *, forward: tuple[int, int], query_grad: tuple[int, int], key_grad: tuple[int, int]
) -> AttentionConfig:
    """Tiles (rows, keys) that are small enough for a short row to have many."""
    group = inputs.q.shape[1] // inputs.k.shape[1]
    chunks = -(-group // 16)
    return AttentionConfig(
        group=group,
        pack=-(-group // chunks),
        head_dim=inputs.q.shape[2],
        value_dim=inputs.v.shape[2],
        precision="ieee",
        forward=Tile(*forward, num_warps=4, num_stages=1),
        query_grad=Tile(*query_grad, num_warps=4, num_stages=1),
        key_grad=Tile(*key_grad, num_warps=4, num_stages=1),
    )


def triton_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    *,
    plan: TreePlan,
    config: AttentionConfig,
    scale: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Out and lse, differentiable, through the kernels' launchers."""
    options = {
        "scale": q.shape[-1] ** -0.5 if scale is None else scale,
        "window": sliding_window,
        "softcap": softcap,
        "config": config,
    }
    out, lse = _Attention.apply(q, k, v, sinks, plan, options)
    return out, lse


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, plan: TreePlan, options: Any) -> Any:
        out, lse = gpu.attention_forward(q, k, v, sinks, plan, **options)
        ctx.saved, ctx.options = (q, k, v, sinks, out, lse, plan), options
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor | None, grad_lse: Tensor | None) -> Any:
        grads = gpu.attention_backward(grad_out, grad_lse, *ctx.saved, **ctx.options)
        return *grads, None, None


def check(position_ids: Tensor, inputs: Inputs, config: AttentionConfig, **options: Any) -> dict[str, Tensor]:
    """Compare outputs and every gradient with the oracle, and look for writes where nothing may be written."""
    plan = TreePlan.from_position_ids(position_ids)
    with guarded_memory():
        found = run(partial(triton_attention, plan=plan, config=config, **options), inputs)
    plain = run(partial(plain_attention, plan=plan, **options), inputs)
    assert_close(found, exact_results(inputs, plan, **options), plain, plan)
    return found


@contextmanager
def guarded_memory() -> Iterator[None]:
    """New tensors start as NaN, and those with columns have canaries beyond their last column and row."""
    guarded: list[tuple[Tensor, Tensor]] = []
    original = torch.Tensor.new_empty

    def new_empty(like: Tensor, *size: Any, dtype: torch.dtype | None = None, **options: Any) -> Tensor:
        if options:  # The interpreter's own.
            return original(like, *size, **options)
        shape = torch.Size(size[0] if isinstance(size[0], torch.Size | tuple) else size)
        dtype = like.dtype if dtype is None else dtype
        if len(shape) < 3:
            return torch.full(shape, torch.nan, dtype=dtype, device=like.device)
        storage = torch.full(
            (shape[0] + 1, shape[1], shape[2] + _EXTRA_COLUMNS), CANARY, dtype=dtype, device=like.device
        )
        inside = torch.zeros(storage.shape, dtype=torch.bool, device=like.device)
        inside[:-1, :, : shape[2]] = True
        guarded.append((storage, inside))
        return storage[:-1, :, : shape[2]].fill_(torch.nan)

    with mock.patch.object(torch.Tensor, "new_empty", new_empty):
        yield
    assert guarded
    for storage, inside in guarded:
        assert (storage[~inside] == CANARY).all(), "a kernel wrote past its columns or rows"
        assert not storage[inside].isnan().any(), "a kernel left an output unwritten"
