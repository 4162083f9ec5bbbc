"""Tree attention on W1 to W8, forward and backward, ours beside the peers: 32:8 heads of 128, bf16.

A path is timed only after its output and gradients were checked against one kv head's float64 result; a red check
leaves a row without speeds. Rates are on visible pairs: 4 floating-point operations a pair and column forward and
10 backward, whatever a path computes beside them. `run.py` starts this file.
"""

import argparse
import time
from pathlib import Path as FilePath

import torch
from torch import Tensor

from attention_paths import FlexPath, GatherPath, Inputs, Path, TreePath, UnsharedPath
from device_timer import DeviceTimer
from exact_attention import error_of_budget, exact_results
from measured_rows import Row, RowFile
from treepack.kernels import work
from treepack.kernels.checks import Backend
from treepack.kernels.configs import Device, attention_config
from treepack.kernels.plan import TreePlan
from workloads import Workload, all_workloads, dry_workloads

HEADS, HEAD_DIM = (32, 8), 128
# Short rows first: should the time run out, the fewest rows are missing.
ORDER = ("W3", "W7", "W5", "W1", "W8", "W6", "W2", "W4")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=FilePath, required=True, help="file of JSON lines to append to")
    parser.add_argument("--seconds", type=float, required=True, help="no new row starts after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny rows on the CPU")
    options = parser.parse_args()
    device = torch.device("cpu" if options.dry_run else "cuda")
    rows, timer, deadline = RowFile(options.rows), DeviceTimer(device), time.monotonic() + options.seconds
    # Gradients are taken several times from one forward.
    torch._functorch.config.donated_buffer = False
    # FlexAttention beyond it would run eager, and build all N x N scores.
    torch._dynamo.config.recompile_limit = 64
    paths = device_paths(device)
    measure_ceilings(rows, timer)
    if options.dry_run:
        schedule_all(rows)
    workloads = dry_workloads() if options.dry_run else all_workloads()
    for workload in sorted(workloads, key=lambda workload: ORDER.index(workload.name)):
        measure_workload(workload, paths, timer, rows, deadline)


def device_paths(device: torch.device) -> list[Path]:
    """Ours first. One that is not to be had here says so in its row."""
    backends: list[Backend] = ["cpu"] if device.type == "cpu" else ["triton", "flash", "fa4"]
    return [*map(TreePath, backends), FlexPath(device), GatherPath(), UnsharedPath()]


def schedule_all(rows: RowFile) -> None:
    """Plan and schedule a sixteenth of every workload as the kernels would on a Hopper GPU."""
    config = attention_config(HEAD_DIM, HEAD_DIM, torch.bfloat16, group=4, device=Device("sm_90", 232448))
    tile = work.TileShape(config.forward.block_m // config.pack, config.forward.block_n)
    for workload in all_workloads():
        small = workload.scaled(1 / 16)
        waste = work.triton_query_work(small.plan, tile).waste(small.num_pairs)
        rows.append(Row("schedule", workload.name, "treepack triton", values={"waste": waste}))


def measure_ceilings(rows: RowFile, timer: DeviceTimer) -> None:
    """What the device can do at best, measured here and now."""
    values = {"matmul_tflops": timer.matmul_tflops(), "copy_gb_per_s": timer.copy_gb_per_s()}
    rows.append(Row("ceilings", "bf16 product 8192^3, copy of 4 GB", "torch", values=values))


def measure_workload(workload: Workload, paths: list[Path], timer: DeviceTimer, rows: RowFile, deadline: float) -> None:
    """A row a path; nothing that a path does can keep the others from theirs."""
    if time.monotonic() > deadline:
        rows.append(Row("attention", workload.name, "all", "out of time"))
        return
    inputs = Inputs.draw(workload.num_tokens, HEADS, HEAD_DIM, timer.device)
    check = Check(workload, inputs)
    for path in paths:
        if time.monotonic() > deadline:
            rows.append(Row("attention", workload.name, path.name, "out of time"))
            continue
        values: dict[str, float] = {}
        try:
            measure_path(path, workload, inputs, check, timer, values)
            status = "ok"
        except RedCheckError as error:
            values, status = {}, f"red check: {error}"
        # Whatever else fails in a path, a peer's compiler included, is that row's result.
        except Exception as error:
            status = f"{type(error).__name__}: {first_line(error)}"
        rows.append(Row("attention", workload.name, path.name, status, values))
        if timer.device.type == "cuda":
            torch.cuda.empty_cache()


class RedCheckError(Exception):
    """A result is wrong."""


class Check:
    """Compares results with the exact ones of the last kv head."""

    def __init__(self, workload: Workload, inputs: Inputs) -> None:
        self._plan = TreePlan.from_position_ids(workload.position_ids.to(inputs.q.device))
        heads, kv_heads = inputs.q.shape[1], inputs.k.shape[1]
        self._queries = slice(heads - heads // kv_heads, heads)
        q, grad_out = inputs.q[:, self._queries], inputs.grad_out[:, self._queries]
        self._exact = exact_results(q, inputs.k[:, -1], inputs.v[:, -1], grad_out, self._plan)

    def __call__(self, name: str, found: Tensor, allowance: float) -> float:
        """The largest error of any segment, in units of `error_of_budget`.

        Raises:
            RedCheckError: it is above the allowance.
        """
        one_head = found[:, self._queries] if name in ("out", "dq") else found[:, -1:]
        error = error_of_budget(one_head, getattr(self._exact, name), self._plan)
        if error > allowance:
            raise RedCheckError(f"{name} is off by {error:.3g}, allowed {allowance:g}")
        return error


def measure_path(
    path: Path, workload: Workload, inputs: Inputs, check: Check, timer: DeviceTimer, values: dict[str, float]
) -> None:
    """Check, then time forward and backward apart, peak memory, and what a new row's preparation adds."""
    own = path.lay_out(workload, inputs)
    leaves = [t.detach().requires_grad_() for t in (own.q, own.k, own.v)]
    prepared = path.prepare(workload, timer.device)
    flops = workload.num_pairs * HEADS[0] * HEAD_DIM

    def forward() -> Tensor:
        return path.attend(own.q, own.k, own.v, prepared)

    def forward_and_backward(prepared: object) -> tuple[Tensor, ...]:
        return torch.autograd.grad(path.attend(*leaves, prepared), leaves, own.grad_out)

    values["out_error"] = check("out", path.packed_out(workload, forward()), path.error_allowance)
    values["forward_ms"] = timer.median_ms(forward)
    values["forward_tflops"] = 4 * flops / values["forward_ms"] / 1e9

    for name, grad in zip(("dq", "dk", "dv"), forward_and_backward(prepared)):
        values[f"{name}_error"] = check(name, path.packed_grad(workload, grad), path.error_allowance)
    values["peak_gb"] = timer.peak_gb(lambda: forward_and_backward(prepared))
    out = path.attend(*leaves, prepared)
    values["backward_ms"] = timer.median_ms(lambda: torch.autograd.grad(out, leaves, own.grad_out, retain_graph=True))
    values["backward_tflops"] = 10 * flops / values["backward_ms"] / 1e9
    known_row = timer.wall_ms(lambda: forward_and_backward(prepared))
    new_row = timer.wall_ms(lambda: forward_and_backward(path.prepare(workload, timer.device)))
    values["prepare_ms"] = max(new_row - known_row, 0.0)


def first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else ""


if __name__ == "__main__":
    main()
