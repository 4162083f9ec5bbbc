"""What is made of the rows: results.json, results.md, and bars of speed and memory. `run.py` starts this file."""

import argparse
import json
from collections.abc import Iterable
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from matplotlib.figure import Figure

from measured_rows import Row, RowFile
from workloads import all_workloads

_ATTENTION_COLUMNS = {
    "forward_ms": "forward ms",
    "forward_tflops": "forward TFLOP/s",
    "backward_ms": "backward ms",
    "backward_tflops": "backward TFLOP/s",
    "peak_gb": "peak GB",
    "prepare_ms": "new row ms",
}
_BARS = {
    "forward_tflops": "forward, TFLOP/s",
    "backward_tflops": "backward, TFLOP/s",
    "peak_gb": "peak memory, GB",
}
_NOTES = """\
bf16, 32:8 heads of 128. Medians with a cold L2. Rates count visible pairs alone: 4 floating-point operations a pair and
column forward, 10 backward. In brackets: the share of the measured matrix rate. "new row" is the time that a row
not seen before adds: plan and schedule, block mask, or index, copied to the device. "error" is the largest of any
segment of output and gradients against float64; 1 is four roundings of the segment's largest value, and a path that
is off by more (gather: 16, since it adds up gradients in bf16) has no speeds. "ours is faster": the first treepack
row against this one, forward and backward. "unshared varlen" runs equal sequences of a group once.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="file of JSON lines; the report goes beside it")
    rows = parser.parse_args().rows
    for path in write_report(RowFile(rows).read(), device_facts(), rows.parent):
        print(f"wrote {path}")


def device_facts() -> dict[str, str]:
    """What the numbers hold for."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "none: a dry run, times mean nothing"
    return {"GPU": device, "torch": torch.__version__, "triton": installed("triton"), "FA4": installed("flash-attn-4")}


def installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def write_report(rows: list[Row], facts: dict[str, str], directory: Path) -> list[Path]:
    """Write all files into `directory`; returns their paths."""
    paths = [directory / name for name in ("results.json", "results.md")]
    paths[0].write_text(json.dumps({"facts": facts, "rows": [asdict(row) for row in rows]}, indent=2) + "\n")
    paths[1].write_text(markdown(rows, facts))
    measured = [row for row in _of("attention", rows) if "forward_tflops" in row.values]
    if measured:
        paths.append(draw(measured, directory / "attention.png"))
    return paths


def markdown(rows: list[Row], facts: dict[str, str]) -> str:
    """The results as one page."""
    lines = ["# treepack on a GPU", "", *(f"- {name}: {value}" for name, value in facts.items()), ""]
    matmul_tflops = None
    for row in _of("ceilings", rows):
        matmul_tflops = row.values["matmul_tflops"]
        lines += [f"Measured ceilings: {matmul_tflops:.0f} TFLOP/s in a bf16 matrix product, "]
        lines[-1] += f"{row.values['copy_gb_per_s']:.0f} GB/s in a copy."
    workloads = ([w.name, w.description, f"{w.num_tokens:,}", f"{w.num_pairs / 1e6:,.1f} M"] for w in all_workloads())
    lines += ["", *_table(["workload", "", "tokens", "visible pairs"], workloads)]
    lines += ["", "## Tests", "", *_table(["tests", "result"], ([row.path, row.status] for row in _of("tests", rows)))]
    header = ["workload", "path", *_ATTENTION_COLUMNS.values(), "error", "ours is faster", "status"]
    lines += ["", "## Attention", "", _NOTES, *_table(header, _attention_cells(rows, matmul_tflops))]
    columns = list(dict.fromkeys(name for row in _of("packing", rows) for name in row.values))
    cells = (
        [row.case, row.path, row.status, *(_number(row.values.get(name)) for name in columns)]
        for row in _of("packing", rows)
    )
    lines += ["", "## Packing on the device", "", *_table(["case", "what", "status", *columns], cells), ""]
    return "\n".join(lines)


def draw(rows: list[Row], path: Path) -> Path:
    """Bars of speed and memory, a group a workload."""
    cases = sorted({row.case for row in rows})
    names = list(dict.fromkeys(row.path for row in rows))
    canvas = Figure(figsize=(11, 9), layout="constrained")
    all_axes = canvas.subplots(len(_BARS), 1, sharex=True)
    width = 0.8 / len(names)
    for axes, (value, label) in zip(all_axes, _BARS.items()):
        for position, name in enumerate(names):
            shown = [(cases.index(r.case), r.values[value]) for r in rows if r.path == name and value in r.values]
            where = [case + (position - (len(names) - 1) / 2) * width for case, _ in shown]
            axes.bar(where, [height for _, height in shown], 0.9 * width, label=name)
        axes.set_ylabel(label, fontsize=8)
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[-1].set_xticks(range(len(cases)), cases)
    all_axes[0].legend(frameon=False, ncols=len(names), loc="lower left", bbox_to_anchor=(0, 1))
    all_axes[0].set_title("tree attention, bf16, 32:8 heads of 128", loc="right", fontsize=10)
    canvas.savefig(path, dpi=150)
    return path


def _attention_cells(rows: list[Row], matmul_tflops: float | None) -> Iterable[list[str]]:
    ours = {row.case: row for row in reversed(_of("attention", rows)) if row.path.startswith("treepack")}
    for row in _of("attention", rows):
        cells = [row.case, row.path]
        for name in _ATTENTION_COLUMNS:
            cell = _number(row.values.get(name))
            if matmul_tflops and name.endswith("tflops") and name in row.values:
                cell += f" ({row.values[name] / matmul_tflops:.0%})"
            cells.append(cell)
        errors = [value for name, value in row.values.items() if name.endswith("_error")]
        yield [*cells, _number(max(errors, default=None)), _speedup(ours.get(row.case), row), row.status]


def _speedup(ours: Row | None, peer: Row) -> str:
    """How many times faster ours is, forward and backward."""
    if ours is None or ours is peer:
        return ""
    names = ("forward_ms", "backward_ms")
    if not all(name in row.values for name in names for row in (ours, peer)):
        return ""
    return ", ".join(f"{peer.values[name] / ours.values[name]:.2f}x" for name in names)


def _of(section: str, rows: list[Row]) -> list[Row]:
    return [row for row in rows if row.section == section]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _table(header: list[str], rows: Iterable[list[str]]) -> list[str]:
    body = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return [f"| {' | '.join(header)} |", f"|{'---|' * len(header)}", *body] if body else ["nothing measured"]


if __name__ == "__main__":
    main()
