"""What a launch asks for: how often it compiles, its grid, the kernels behind the public op's GPU entry."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from support.aot import TARGETS, Case, compile_only, launch_all
from treepack.kernels import gpu, ops

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
        "key_kernel": (num_tokens // 128, 2),
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
