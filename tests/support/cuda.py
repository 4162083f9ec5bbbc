"""Tests on a GPU: the mark that skips them elsewhere, and inputs and checks that live there."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from support.forests import Inputs, assert_close, exact_results, plain_attention, run
from treepack.kernels.ops import tree_attention
from treepack.kernels.plan import TreePlan

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm GPU")


def on_gpu(inputs: Inputs) -> Inputs:
    """The same values as leaf tensors on the GPU."""
    moved = {
        name: None if t is None else t.detach().cuda().requires_grad_(t.requires_grad)
        for name, t in vars(inputs).items()
    }
    return Inputs(**moved)


def attend(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, *, plan: TreePlan, **options: Any
) -> tuple[Tensor, Tensor]:
    """The public op with its lse."""
    return tree_attention(q, k, v, plan=plan, sinks=sinks, return_lse=True, **options)


def check(
    position_ids: Tensor,
    inputs: Inputs,
    *,
    backend: str | None = None,
    deterministic: bool = False,
    **options: Any,
) -> dict[str, Tensor]:
    """Compare outputs and every gradient with the float64 oracle, both computed on the GPU, segment by segment."""
    inputs = on_gpu(inputs)
    plan = TreePlan.from_position_ids(position_ids.cuda())
    found = run(partial(attend, plan=plan, backend=backend, deterministic=deterministic, **options), inputs)
    plain = run(partial(plain_attention, plan=plan, **options), inputs)
    exact = exact_results(inputs, plan, **options)
    found, exact, plain = ({name: t.cpu() for name, t in results.items()} for results in (found, exact, plain))
    assert_close(found, exact, plain, TreePlan.from_position_ids(position_ids))
    return found
