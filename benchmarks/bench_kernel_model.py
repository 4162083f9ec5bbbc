"""Counted work of one attention layer on the kernel workloads: bf16, 32:8 heads, D 128, the tiles shipped for sm_90.

    pytest benchmarks/bench_kernel_model.py

Nothing here needs a GPU. The counts come from the schedules that the kernels walk and the boundaries that the varlen
calls get (kernels/work.py). "waste" is computed (query, key) pairs over visible ones, padding of tiles included; 1 is
ideal. For each workload a table shows, of the forward and of the backward:

- tiles: of a kv head (triton, whose tiles hold its 4 query heads) or a query head (the others)
- TFLOP: of all heads, in tiles as computed
- GB: the least that crosses the device's memory: tensors once, and whatever is copied, gathered or merged besides

The timed part, on one CPU thread: plan, schedules and bounds of a new row, against the index that a gather needs.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from harness import Compare, Comparison, Figure
from treepack.kernels import levels, work
from treepack.kernels.configs import AttentionConfig, Device, Tile, attention_config
from treepack.kernels.plan import TreePlan
from workloads import Workload, all_workloads

HEADS = work.HeadShape(query=32, kv=8, dim=128)
CONFIG = attention_config(128, 128, torch.bfloat16, group=4, device=Device("sm_90", 232448))

# Waste we want of the forward, of dQ and of dK and dV; the rest has no target.
TARGETS = {"W1": 1.15, "W2": 1.15, "W4": 1.15, "W6": 1.15, "W8": 2.0}
SMOKE_SCALE = 1 / 16


@dataclass(frozen=True)
class Pass:
    """Forward or backward of one method.

    Attributes:
        work: what is computed, each part with the factor of its matrix products: 4 floating-point operations a pair and
            column forward, 6 for dQ, 8 for dK and dV, 10 for a backward that computes all three at once.
        tile_pairs: pairs of a tile of each part.
        bytes: least traffic.
    """

    work: tuple[tuple[work.Work, int], ...]
    tile_pairs: tuple[int, ...]
    bytes: float

    @property
    def tiles(self) -> int:
        return sum(part.pairs // pairs for (part, _), pairs in zip(self.work, self.tile_pairs))

    @property
    def flops(self) -> int:
        return sum(part.pairs * factor * HEADS.dim * HEADS.query for part, factor in self.work)

    def waste(self, visible_pairs: int, ideal_factor: int) -> float:
        """Computed over necessary floating-point operations."""
        return self.flops / (visible_pairs * ideal_factor * HEADS.dim * HEADS.query)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def token_tile(tile: Tile, config: AttentionConfig) -> work.TileShape:
    """A shipped tile in tokens, as the launcher asks the plan for it."""
    return work.TileShape(tile.block_m // config.pack, tile.block_n)


def tensor_bytes(queries: int, keys: int) -> tuple[float, float]:
    """q, k, v and the output once; backward, these, the output's gradient and three gradients. 16 bits each."""
    q, kv = (2.0 * HEADS.dim * rows for rows in (HEADS.query * queries, 2 * HEADS.kv * keys))
    return 2 * q + kv, 4 * q + 2 * kv


def copied_bytes(counted: work.Work) -> float:
    """A gathered key and value are written and read; a merge reads a 16-bit part and reads and writes float32."""
    gathered = 8 * HEADS.dim * HEADS.kv * counted.gathered_rows
    return gathered + 14 * HEADS.dim * HEADS.query * counted.merged_rows


def methods(workload: Workload) -> dict[str, tuple[Pass, Pass]]:
    """Forward and backward of every method."""
    plan = workload.plan
    tokens, unshared_tokens = plan.num_tokens, sum(workload.sequence_lengths)
    tiles = [token_tile(tile, CONFIG) for tile in (CONFIG.forward, CONFIG.query_grad, CONFIG.key_grad)]
    forward, query_grad = (work.triton_query_work(plan, tile) for tile in tiles[:2])
    key_grad = work.triton_key_work(plan, tiles[2])
    sizes = [tile.q * tile.k for tile in tiles]
    read, read_backward = tensor_bytes(tokens, tokens)
    found = {
        "triton": (
            Pass(((forward, 4),), (sizes[0],), read),
            Pass(((query_grad, 6), (key_grad, 8)), (sizes[1], sizes[2]), read_backward),
        )
    }
    flash_pairs = work.FLASH_TILE.q * work.FLASH_TILE.k
    for name, counted, rows in (
        ("cascade", work.cascade_work(plan), tokens),
        ("gather + varlen", work.gather_work(plan), tokens),
        ("unshared", work.unshared_work(plan), unshared_tokens),
        ("dense", work.dense_work(plan), tokens),
    ):
        read, read_backward = tensor_bytes(rows, rows)
        copied = copied_bytes(counted)
        found[name] = (
            Pass(((counted, 4),), (flash_pairs,), read + copied),
            # The gather's gradients are written once and added up; merged gradients likewise.
            Pass(((counted, 10),), (flash_pairs,), read_backward + copied),
        )
    return found


def table(workload: Workload, found: dict[str, tuple[Pass, Pass]]) -> list[str]:
    """Every method's counts as lines of text."""
    pairs = workload.num_pairs
    lines = [
        f"{workload.name}: {workload.description}; {workload.num_tokens:,} tokens, {len(workload.segments)} segments, "
        f"{pairs / 1e6:,.1f} M visible pairs",
        f"  {'':16} " + " |".join([f"{'tiles':>10} {'TFLOP':>8} {'GB':>7} {'waste':>7}"] * 2),
    ]
    for name, passes in found.items():
        cells = [
            f"{p.tiles:>10,} {p.flops / 1e12:>8.3g} {p.bytes / 1e9:>7.3g} {p.waste(pairs, ideal):>7.3g}"
            for p, ideal in zip(passes, (4, 10))
        ]
        lines.append(f"  {name:16} {' |'.join(cells)}")
    return lines


def planned(position_ids: torch.Tensor) -> TreePlan:
    """A new row's plan with all that the kernels read of it."""
    plan = TreePlan.from_position_ids(position_ids)
    for tile in (CONFIG.forward, CONFIG.query_grad):
        plan.schedule(tile.block_m // CONFIG.pack, tile.block_n)
    plan.query_stops()
    return plan


def plan_bytes(plan: TreePlan) -> int:
    """Bytes of the plan and its schedules."""
    shapes = {token_tile(tile, CONFIG) for tile in (CONFIG.forward, CONFIG.query_grad)}
    schedules = [plan.schedule(shape.q, shape.k) for shape in shapes]
    tensors = [plan.subtree_end, plan.depth, *(t for s in schedules for t in (s.range_ptr, s.ranges))]
    return sum(t.numel() * t.element_size() for t in tensors)


@pytest.mark.parametrize("workload", all_workloads(), ids=lambda workload: workload.name)
def test_counted_work(workload: Workload, compare: Compare, smoke: bool, capsys: pytest.CaptureFixture[str]) -> None:
    workload = workload.scaled(SMOKE_SCALE) if smoke else workload
    found = methods(workload)
    with capsys.disabled():
        print("\n" + "\n".join(table(workload, found)))
    position_ids, pairs = workload.position_ids, workload.num_pairs
    (forward, _), (query_grad, _), (key_grad, _) = (part for passes in found["triton"] for part in passes.work)
    at_most = None if smoke else TARGETS.get(workload.name)

    def gather_index() -> object:
        return levels.path_index(TreePlan.from_position_ids(position_ids.clone()).segments, None)

    def check() -> None:
        assert len(levels.path_index(workload.plan.segments, None)) == workload.gathered_rows
        assert all(part.pairs >= pairs for passes in found.values() for p in passes for part, _ in p.work)
        assert work.unshared_work(workload.plan).pairs >= sum(n * (n + 1) // 2 for n in workload.sequence_lengths)

    def figures(_: Comparison) -> dict[str, Figure]:
        def waste(name: str) -> float:
            return found[name][0].waste(pairs, 4)

        return {
            "forward waste": Figure(forward.waste(pairs), at_most=at_most),
            "dQ waste": Figure(query_grad.waste(pairs), at_most=at_most),
            "dK/dV waste": Figure(key_grad.waste(pairs), at_most=at_most),
            "cascade": Figure(waste("cascade")),
            "gather": Figure(waste("gather + varlen")),
            "unshared": Figure(waste("unshared")),
            "dense": Figure(waste("dense")),
            "plan": Figure(plan_bytes(planned(position_ids)) / workload.num_tokens, "B/token"),
        }

    compare(
        f"{workload.name} {workload.description}",
        ours=lambda: planned(position_ids.clone()),
        peers={"gather index": gather_index},
        check=check,
        figures=figures,
    )
