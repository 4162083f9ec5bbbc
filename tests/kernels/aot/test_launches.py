"""What a launch asks for: how often it compiles, its grid, the kernels behind the public op's GPU entry."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support.aot import TARGETS, Case, compile_only, launch_all
from treepack.kernels import gpu, ops
from treepack.kernels.tree_bwd import key_kernel, query_kernel
from treepack.kernels.tree_fwd import forward_kernel

CASE = Case("sm_80", (64, 64), features=False)


def test_twenty_lengths_compile_once() -> None:
    compiled: dict[str, set[int]] = defaultdict(set)

    def launched(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        compiled[name].add(id(kernel))

    with compile_only(TARGETS[CASE.arch].gpu, launched):
        for num_tokens in (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 100, 127, 128, 129, 500, 512, 1000, 1024, 4097):
            launch_all(CASE, num_tokens)
    assert {name: len(kernels) for name, kernels in compiled.items()} == dict.fromkeys(
        ("forward_kernel", "prepare_kernel", "key_kernel", "query_kernel"), 1
    )


def test_counts_lie_on_the_first_grid_axis_only() -> None:
    """The other axes end at 65,535."""
    num_tokens = 65_536 * 64 // 32
    grids: dict[str, tuple[int, ...]] = {}

    def launched(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        grids[name] = grid

    with compile_only(TARGETS[CASE.arch].gpu, launched):
        launch_all(CASE, num_tokens)
    assert grids == {
        "forward_kernel": (num_tokens // 32, 2),
        "prepare_kernel": (num_tokens // 64, 8),
        "key_kernel": (num_tokens // 64, 2),
        "query_kernel": (num_tokens // 32, 2),
    }


def test_the_public_op_launches_these_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    launches: list[str] = []
    target = TARGETS[CASE.arch]
    monkeypatch.setattr(gpu, "device_limits", lambda device: target.device)
    q, k = torch.zeros(100, 8, 64, dtype=torch.bfloat16), torch.zeros(100, 2, 64, dtype=torch.bfloat16)
    depth = torch.arange(100, dtype=torch.int32)
    end = torch.full_like(depth, 100)
    options = (0.1, None, None)
    with compile_only(target.gpu, lambda name, grid, kernel: launches.append(name)):
        out, lse = ops._attention_on_gpu(q, k, k, None, end, depth, *options)
        grads = ops._attention_backward_on_gpu(out, None, q, k, k, None, end, depth, out, lse, *options)
    assert launches == ["forward_kernel", "prepare_kernel", "key_kernel", "query_kernel"]
    assert [tuple(t.shape) for t in (out, lse, *grads)] == [
        (100, 8, 64),
        (8, 100),
        (100, 8, 64),
        *[(100, 2, 64)] * 2,
        (0,),
    ]


@pytest.mark.parametrize(("window", "pairs"), [(None, 5050), (10, 955)])
def test_profilers_see_the_visible_pairs_work(window: int | None, pairs: int) -> None:
    q, k, v = (torch.zeros(100, heads, columns, dtype=torch.bfloat16) for heads, columns in ((8, 64), (2, 64), (2, 32)))
    names = ("Q", "GRAD_Q", "K", "GRAD_K", "V", "GRAD_V", "OUT", "GRAD_OUT", "LSE", "NORM", "DELTA")
    tensors = dict.fromkeys(names, torch.zeros(8, 100)) | {"Q": q, "K": k, "V": v}
    args = {
        **tensors,
        "DEPTH": torch.arange(100, dtype=torch.int32),
        "HAS_WINDOW": window is not None,
        "window": window,
        "HEAD_DIM": 64,
        "VALUE_DIM": 32,
    }
    for kernel, columns in ((forward_kernel, 96), (query_kernel, 160), (key_kernel, 192)):
        seen = kernel.launch_metadata((1,), SimpleNamespace(name=kernel.__name__), args)
        assert seen["flops16"] == 2 * pairs * 8 * columns
        assert seen["name"] == f"{kernel.__name__} N=100 H=8 D=64:32"
    seen = forward_kernel.launch_metadata((1,), SimpleNamespace(name="forward_kernel"), args)
    assert seen["bytes"] == 2 * (q.numel() + k.numel() + v.numel()) + 2 * 4 * 800
