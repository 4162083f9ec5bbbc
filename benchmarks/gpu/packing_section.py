"""Packing, gathering and its gradient on the device, in bytes a second beside a copy. `run.py` starts this file.

Bytes are the least that the work needs: tokens read once and outputs written once (pack); rows read and written once
(gather, and its gradient, in bf16). Packing must equal the CPU's bit for bit and the gradient its float64 sum; a red
check leaves a row without speeds.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from device_timer import DeviceTimer
from measured_rows import Row, RowFile
from treepack import gather_positions, pack_sequences
from workloads import Workload, all_workloads, dry_workloads

VOCABULARY, HIDDEN, DRY_HIDDEN = 151_936, 4096, 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="file of JSON lines to append to")
    parser.add_argument("--seconds", type=float, required=True, help="no new row starts after so many")
    parser.add_argument("--dry-run", action="store_true", help="tiny rows on the CPU")
    options = parser.parse_args()
    timer = DeviceTimer(torch.device("cpu" if options.dry_run else "cuda"))
    rows, deadline = RowFile(options.rows), time.monotonic() + options.seconds
    copy_gb_per_s = timer.copy_gb_per_s()
    for workload in dry_workloads() if options.dry_run else all_workloads():
        if time.monotonic() > deadline:
            rows.append(Row("packing", workload.name, "all", "out of time"))
            continue
        for measure in (measure_pack, measure_gather):
            row = measure(workload, timer, DRY_HIDDEN if options.dry_run else HIDDEN)
            share = {"of_copy": row.values["gb_per_s"] / copy_gb_per_s} if "gb_per_s" in row.values else {}
            rows.append(Row(row.section, row.case, row.path, row.status, {**row.values, **share}))


def sequences_of(workload: Workload) -> list[Tensor]:
    """Random tokens that share what the workload's sequences share; packed, a fork lies one token earlier."""
    tokens = np.random.default_rng(0).integers(0, VOCABULARY, workload.num_tokens)
    paths = workload.paths()
    return [torch.from_numpy(tokens[paths[leaf]]) for leaf in workload.leaves]


def measure_pack(workload: Workload, timer: DeviceTimer, hidden: int) -> Row:
    """`pack_sequences` of tensors on the device."""
    on_cpu = sequences_of(workload)
    sequences: Sequence[Tensor] = [tokens.to(timer.device) for tokens in on_cpu]
    expected, found = (pack_sequences(s, kv_index=False) for s in (on_cpu, sequences))
    wrong = [name for name, tensor in expected.items() if not torch.equal(found[name].cpu(), tensor)]
    if wrong:
        return Row("packing", workload.name, "pack", f"red check: {', '.join(wrong)}")
    num_bytes = sum(t.numel() * t.element_size() for t in [*sequences, *found.values()])
    return timed_row(workload, "pack", lambda: pack_sequences(sequences, kv_index=False), num_bytes, timer)


def measure_gather(workload: Workload, timer: DeviceTimer, hidden: int) -> Row:
    """`gather_positions` and its gradient, back to back."""
    sequences = [tokens.to(timer.device) for tokens in sequences_of(workload)]
    row = pack_sequences(sequences, kv_index=False)
    # Few enough rows to fit, as chunks of a scorer would be.
    num_tokens, positions = len(row["input_ids"]), row["positions"][: 2**18]
    packed = torch.randn(num_tokens, hidden, device=timer.device, dtype=torch.bfloat16, requires_grad=True)
    out = gather_positions(packed, positions)
    grad_out = torch.randn_like(out)
    (grad,) = torch.autograd.grad(out, packed, grad_out, retain_graph=True)
    total = torch.zeros(num_tokens, hidden, dtype=torch.float64, device=timer.device)
    total.index_add_(0, positions, grad_out.double())
    wrong = [] if torch.equal(out, packed[positions]) else ["gathered rows"]
    if not torch.allclose(grad.double(), total, rtol=2**-7, atol=2**-7):
        wrong.append("gradient")
    if wrong:
        return Row("packing", workload.name, "gather", f"red check: {', '.join(wrong)}")
    del total

    def run() -> object:
        return torch.autograd.grad(gather_positions(packed, positions), packed, grad_out)

    # Read: each shared row once, the gradients; written: the gathered rows, a gradient for every packed row.
    num_bytes = 2 * hidden * (len(positions.unique()) + 2 * len(positions) + num_tokens)
    return timed_row(workload, "gather and gradient", run, num_bytes, timer)


def timed_row(workload: Workload, name: str, run: Callable[[], object], num_bytes: int, timer: DeviceTimer) -> Row:
    milliseconds = timer.median_ms(run)
    values = {"ms": milliseconds, "gb_per_s": num_bytes / milliseconds / 1e6}
    return Row("packing", workload.name, name, values=values)


if __name__ == "__main__":
    main()
