"""The GPU runner without a GPU: its dry run, its workloads, its peers' masks, and that a wrong result gets no speed."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import workloads
from attention_paths import GatherPath, Inputs, TreePath, UnsharedPath, block_mask
from attention_section import measure_workload
from device_timer import DeviceTimer
from exact_attention import error_of_budget, exact_results
from measured_rows import Row, RowFile
from support.forests import FORESTS, make_inputs, positions_of
from support.forests import exact_results as dense_results
from support.traces import FULL
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import visible_pairs
from workloads import Workload, all_workloads, dry_workloads

ROOT = Path(__file__).resolve().parents[1]
RUN = ROOT / "benchmarks" / "gpu" / "run.py"
CPU = torch.device("cpu")
SMALL = Workload("W0", "small", ((0, 40), (40, 30), (40, 7), (47, 5), (47, 1), (0, 20)))


def test_the_dry_run(tmp_path: Path) -> None:
    command = [sys.executable, str(RUN), "--dry-run", "--out", str(tmp_path)]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    found = {path.name for path in tmp_path.iterdir()}
    assert found == {"rows.jsonl", "results.json", "results.md", "attention.png", "tests.log"}
    assert (tmp_path / "attention.png").stat().st_size > 1000
    rows = [Row(**row) for row in json.loads((tmp_path / "results.json").read_text())["rows"]]
    every = [workload.name for workload in all_workloads()]
    some = [workload.name for workload in dry_workloads()]
    for section, names, paths in (
        ("schedule", every, ["treepack triton"]),
        ("attention", some, ["treepack cpu", "gather + varlen", "unshared varlen"]),
        ("packing", some, ["pack", "gather and gradient"]),
    ):
        ok = {(row.case, row.path) for row in rows if row.section == section and row.status == "ok"}
        assert ok == {(name, path) for name in names for path in paths}, section
    # FlexAttention has no backward on a CPU; its forward was checked.
    assert sum(row.path == "flex" and "forward_ms" in row.values for row in rows) == len(some)
    assert "test_head_dims" in (tmp_path / "tests.log").read_text()
    page = (tmp_path / "results.md").read_text()
    assert all(name in page for name in every)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    result = subprocess.run([sys.executable, str(RUN), "--out", str(tmp_path)], capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stderr.strip() == "run.py needs a CUDA GPU; --dry-run checks what does not"


def test_the_workloads_are_those_of_the_page() -> None:
    by_name = {workload.name: workload for workload in all_workloads()}
    assert list(by_name) == [f"W{number}" for number in range(1, 9)]
    assert (by_name["W1"].num_tokens, by_name["W1"].gathered_rows) == (24_576, 155_648)
    assert by_name["W2"].num_tokens == 36_864
    assert len(by_name["W4"].leaves) == 512
    assert max(by_name["W4"].sequence_lengths) <= 16_384
    assert by_name["W6"].gathered_rows == by_name["W6"].num_tokens
    for workload in by_name.values():
        table = workload.plan.segments
        assert list(zip(table.depth.tolist(), (table.stop - table.start).tolist())) == list(workload.segments)
        small = workload.scaled(1 / 64)
        assert len(small.leaves) == len(workload.leaves)
        assert small.plan.num_tokens == small.num_tokens


def test_paths_and_sequences() -> None:
    assert [path.tolist() for path in replace(SMALL, segments=((0, 2), (2, 1), (2, 2), (0, 1))).paths()] == [
        [0, 1],
        [0, 1, 2],
        [0, 1, 3, 4],
        [5],
    ]
    assert SMALL.leaves == [1, 3, 4, 5]
    assert SMALL.sequence_lengths == [70, 52, 48, 20]


@pytest.mark.skipif(not (FULL / "airline_turns.npz").exists(), reason="the traces are not beside the checkout")
def test_the_stored_segments_are_those_of_the_traces() -> None:
    stored = json.loads(workloads.TRACE_SEGMENTS.read_text())
    for name, segments in stored.items():
        cut = workloads.cut_trace(FULL / f"{name}.npz")
        assert [list(segment) for segment in cut] == segments, name


@pytest.mark.parametrize("forest", [name for name in FORESTS if name != "empty"])
def test_the_block_mask_of_flex_is_the_trees(forest: str) -> None:
    plan = TreePlan.from_position_ids(positions_of(FORESTS[forest]))
    mask, num_tokens = block_mask(plan), plan.num_tokens
    blocks = -(-num_tokens // 128)
    tokens = torch.arange(num_tokens)
    seen = mask.mask_mod(torch.zeros(()), torch.zeros(()), tokens[:, None], tokens[None, :])
    assert torch.equal(seen, visible_pairs(plan))
    padded = torch.zeros(blocks * 128, blocks * 128, dtype=torch.bool)
    padded[:num_tokens, :num_tokens] = seen
    tiles = padded.view(blocks, 128, blocks, 128).transpose(1, 2).flatten(2)
    for kind, counts, indices in (
        (tiles.any(2) & ~tiles.all(2), mask.kv_num_blocks, mask.kv_indices),
        (tiles.all(2), mask.full_kv_num_blocks, mask.full_kv_indices),
    ):
        for block in range(blocks):
            chosen = indices[0, 0, block, : int(counts[0, 0, block])]
            assert chosen.tolist() == kind[block].nonzero().flatten().tolist()


def test_the_chunked_exact_results_are_the_oracles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("exact_attention._CHUNK_SCORES", 3000)
    plan = SMALL.plan
    inputs = make_inputs(plan.num_tokens, heads=(3, 1), dims=(8, 8), lse=False)
    found = exact_results(inputs.q, inputs.k[:, 0], inputs.v[:, 0], inputs.grad_out, plan)
    dense = dense_results(inputs, plan)
    for name in ("out", "dq", "dk", "dv"):
        torch.testing.assert_close(getattr(found, name).detach(), dense[name])


def test_one_wrong_token_is_beyond_the_budget() -> None:
    exact = torch.randn(SMALL.num_tokens, 2, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = exact.bfloat16()
    assert error_of_budget(found, exact, SMALL.plan) < 1
    found[78] *= 1.1
    assert error_of_budget(found, exact, SMALL.plan) > 1
    found[78] = torch.nan
    assert error_of_budget(found, exact, SMALL.plan) == float("inf")


class WrongPath(TreePath):
    """Lets one segment see its sibling."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "wrong"

    def prepare(self, workload: Workload, device: torch.device) -> TreePlan:
        position_ids = workload.position_ids.clone()
        position_ids[70:77] += 30
        return TreePlan.from_position_ids(position_ids)


class BrokenPath(TreePath):
    """Fails after its forward was measured."""

    def __init__(self) -> None:
        super().__init__("cpu")
        self.name = "broken"

    def attend(self, q: Tensor, k: Tensor, v: Tensor, prepared: TreePlan) -> Tensor:
        if q.requires_grad:
            raise RuntimeError("out of memory\nmore lines")
        return super().attend(q, k, v, prepared)


def test_a_red_check_and_a_failure_stay_in_their_rows(tmp_path: Path) -> None:
    rows = RowFile(tmp_path / "rows.jsonl")
    deadline = time.monotonic() + 600
    paths = [WrongPath(), BrokenPath(), TreePath("cpu"), GatherPath(), UnsharedPath()]
    measure_workload(SMALL, paths, DeviceTimer(CPU), rows, deadline)
    measure_workload(SMALL, paths, DeviceTimer(CPU), rows, deadline=0.0)
    wrong, broken, *good, late = rows.read()
    assert wrong.status.startswith("red check: out is off by")
    assert wrong.values == {}
    assert broken.status == "RuntimeError: out of memory"
    assert "forward_ms" in broken.values
    assert "backward_ms" not in broken.values
    assert [row.status for row in good] == ["ok"] * 3
    assert all(row.values["backward_tflops"] > 0 for row in good)
    assert late.status == "out of time"


def test_rows_survive_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path)
    rows.append(Row("attention", "W1", "ours", values={"forward_ms": 1.0}))
    with path.open("a") as file:
        file.write('{"section": "attention", "ca')
    assert rows.read() == [Row("attention", "W1", "ours", values={"forward_ms": 1.0})]


def test_inputs_repeat() -> None:
    assert torch.equal(Inputs.draw(5, (2, 1), 8, CPU).q, Inputs.draw(5, (2, 1), 8, CPU).q)
