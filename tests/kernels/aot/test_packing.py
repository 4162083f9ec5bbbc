"""The kernels that pack and gather: they compile for every GPU, spill nothing, and launch as sizes of any kind need."""

from collections import defaultdict
from typing import Any

import pytest
import torch

from support.aot import TARGETS, Target, compile_only, judge
from support.packing import flat
from treepack.kernels import pack
from treepack.kernels.gather import _gather_backward_on_gpu, _gather_on_gpu

PACKING = {
    "match_kernel",
    "size_kernel",
    "branch_kernel",
    "place_kernel",
    "segment_kernel",
    "write_kernel",
    "kv_index_kernel",
}
KERNELS = {*PACKING, "gather_kernel", "gather_sum_kernel"}


def launch_packing(sequences: list[list[int]], *, num_keys: int = 10) -> None:
    tokens, lengths = flat(sequences)
    pack.pack_tokens(tokens, lengths, share_prefixes=True, kv_index=False, capacity=len(tokens))
    # Nothing runs, so no number of keys is ever read.
    offsets = torch.tensor([0, *lengths]).cumsum(0)
    layout = pack._lay_out(tokens, offsets, share_prefixes=False, tile=pack.PackTile())
    pack._kv_index(layout, len(lengths), num_keys, pack.PackTile())


def launch_gather(num_rows: int, gathered: int, columns: int, dtype: torch.dtype) -> None:
    positions = torch.zeros(gathered, dtype=torch.int64)
    _gather_on_gpu(torch.zeros(num_rows, columns, dtype=dtype), positions)
    _gather_backward_on_gpu(torch.zeros(gathered, columns, dtype=dtype), positions, num_rows)


def check(target: Target) -> None:
    problems = []
    seen: dict[Any, str] = {}

    def launched(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        if kernel in seen:
            return
        seen[kernel] = name
        found = judge(kernel, "", target)
        # An eighth of a multiprocessor: occupancy hides the latency of loads that depend on each other.
        if found.spill or found.shared > 16 * 1024 or found.registers > 128:
            problems.append(f"{name}: {found}")

    with compile_only(target.gpu, launched):
        launch_packing([[1, 2], [1, 3]])
        launch_gather(7, 9, 4096, torch.bfloat16)
        launch_gather(7, 9, 72, torch.float64)
    assert set(seen.values()) == KERNELS
    assert not problems, "\n".join(problems)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_resources(arch: str) -> None:
    check(TARGETS[arch])


@pytest.mark.slow
@pytest.mark.parametrize("arch", sorted(set(TARGETS) - {"sm_80", "sm_90"}))
def test_resources_elsewhere(arch: str) -> None:
    check(TARGETS[arch])


def test_sizes_never_recompile() -> None:
    compiled = defaultdict(set)

    def launched(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        compiled[name].add(id(kernel))

    with compile_only(TARGETS["sm_80"].gpu, launched):
        for count in (1, 2, 3, 15, 16, 17, 100, 128, 129):
            launch_packing([[1] * count] * count, num_keys=count)
            launch_gather(count, 2 * count, 64, torch.bfloat16)
    assert {name: len(kernels) for name, kernels in compiled.items()} == dict.fromkeys(KERNELS, 1)


def test_counts_lie_on_the_first_grid_axis_only() -> None:
    """Case 8 (fla#1077, Liger#1294): the other axes end at 65,535."""
    count = 70_000
    grids = {}

    def launched(name: str, grid: tuple[int, ...], kernel: Any) -> None:
        grids[name] = grid

    with compile_only(TARGETS["sm_80"].gpu, launched):
        launch_packing([[1]] * count, num_keys=count)
        launch_gather(count, count, 1024, torch.float16)
    blocks, written = -(-count // 128), -(-count // 512)
    assert grids == {
        "match_kernel": (count,),
        "size_kernel": (blocks,),
        "branch_kernel": (count,),
        "place_kernel": (blocks,),
        "segment_kernel": (2 * count,),
        "write_kernel": (written,),
        "kv_index_kernel": (written,),
        "gather_kernel": (count // 8, 2),
        "gather_sum_kernel": (count, 2),
    }
