"""The pictures of a scored run: tokens a step, how full and even the rows are, and one prefix tree."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.collections import PatchCollection
from matplotlib.colors import BoundaryNorm, LogNorm
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, MaxNLocator
from numpy.typing import NDArray

from treepack.scoring.report import ScoreReport
from treepack.scoring.samples import Sample
from treepack.scoring.sequences import pack_sequences

RAW, PACKED, TRAINED, LIMIT = "#c3ccd5", "#1f6f8b", "#e0952b", "#b03a2e"
MAX_LABELLED_STEPS = 24
DPI = 130


def plot_tokens(path: Path, report: ScoreReport) -> None:
    """Bars of raw and forwarded tokens of each optimizer step, with their ratio."""
    raw = np.array([step.total("raw_tokens") for step in report.steps])
    packed = np.array([step.total("tokens") for step in report.steps])
    x = np.arange(len(raw))
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.add_subplot()
    axes.bar(x - 0.2, raw, 0.4, color=RAW, label="raw: each sample alone")
    axes.bar(x + 0.2, packed, 0.4, color=PACKED, label="forwarded: prefixes shared")
    if len(raw) <= MAX_LABELLED_STEPS:
        for at, (alone, shared) in enumerate(zip(raw, packed)):
            axes.annotate(
                f"{alone / shared:.1f}x",
                (at + 0.2, shared),
                xytext=(0, 3),
                textcoords="offset points",
                ha="center",
                color=PACKED,
            )
    axes.set(xlabel="optimizer step", ylabel="tokens")
    axes.set_title(f"{raw.sum():,} raw tokens, {packed.sum():,} forwarded: {report.packing_ratio:.2f}x", loc="left")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.legend(frameon=False)
    _save(figure, path)


def plot_rows(path: Path, report: ScoreReport, token_budget: int) -> None:
    """Each row's tokens against the budget, and its attention work against the largest of its micro-batch."""
    rows = [row for step in report.steps for row in step.rows]
    per_step = len(rows) // len(report.steps)
    ranks = 1 + max(row.rank for row in rows)
    x = np.arange(len(rows))
    figure = Figure(figsize=(8, 6), layout="constrained")
    fill, balance = figure.subplots(2, 1, sharex=True)

    fill.bar(x, [row.tokens for row in rows], 0.8, color=PACKED, label="unique tokens")
    fill.plot(x, [row.trained_tokens for row in rows], "o", ms=4, color=TRAINED, label="trained tokens")
    fill.axhline(token_budget, color=LIMIT, lw=1.2, ls="--", label="token budget")
    fill.set(ylabel="tokens", ylim=(0, token_budget * 1.25))
    fill.set_title(f"Row fill; padding of micro-batches {100 * (report.padding or 0):.1f} %", loc="left")
    fill.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    fill.legend(facecolor="white", framealpha=1, edgecolor="none", ncols=3, loc="upper right")

    pairs = np.array([row.pairs for row in rows]).reshape(-1, ranks)
    share = (pairs / pairs.max(axis=1, keepdims=True)).reshape(-1)
    balance.bar(x, share, 0.8, color=PACKED)
    balance.bar(x, 1 - share, 0.8, bottom=share, color=RAW, label="waiting for the slowest rank")
    balance.set(ylabel="attention work, of the\nmicro-batch's largest row", ylim=(0, 1.25), yticks=np.linspace(0, 1, 5))
    balance.set_title(f"Balance; idle share of attention {100 * (report.imbalance or 0):.1f} %", loc="left")
    balance.legend(facecolor="white", framealpha=1, edgecolor="none", loc="upper right")
    balance.set_xlim(-0.6, len(rows) - 0.4)
    if len(report.steps) <= MAX_LABELLED_STEPS:
        for axes in (fill, balance):
            for step in range(1, len(report.steps)):
                axes.axvline(step * per_step - 0.5, color="#888888", lw=0.6)
        middles = per_step * np.arange(len(report.steps)) + (per_step - 1) / 2
        balance.set_xticks(middles, labels=[str(step.step) for step in report.steps])
        balance.tick_params(axis="x", length=0)
        balance.set_xlabel(f"optimizer step, a bar a row ({ranks} ranks x {per_step // ranks} micro-batches)")
    else:
        balance.set_xlabel(f"row, {per_step} an optimizer step")
    _save(figure, path)


def plot_tree(path: Path, samples: Sequence[Sample]) -> None:
    """One group's prefix tree, drawn like a flame graph that hangs down: a column a sample, its depth in tokens.

    A segment that several samples share spans all their columns, so the area is the raw tokens and the colour tells how
    often each forwarded token is used.
    """
    sequences = [sample["input_ids"] for sample in samples]
    packed = {name: value.numpy() for name, value in pack_sequences(sequences, kv_index=False).items()}
    first, count = _columns(packed)
    bounds = packed["tree_cu_seqlens_q"]
    depth = packed["position_ids"][bounds[:-1]]
    length = np.diff(bounds)
    num_samples = len(sequences)
    norm = BoundaryNorm([0.5, 1.5], 1) if num_samples == 1 else LogNorm(1, num_samples)
    colours = colormaps["YlGnBu"]
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    boxes = [Rectangle((x, y), width, height) for x, y, width, height in zip(first, depth, count, length)]
    axes.add_collection(PatchCollection(boxes, facecolor=colours(norm(count)), edgecolor="white", linewidth=0.5))
    axes.set(xlim=(0, num_samples), ylim=(int((depth + length).max()), 0))
    axes.set(xlabel="sample, in packed order", ylabel="depth, tokens")
    raw, forwarded = sum(map(len, sequences)), int(bounds[-1])
    axes.set_title(
        f"Group {samples[0]['group_id']} on one row: {num_samples} samples, {raw:,} tokens, {forwarded:,} forwarded, "
        f"{len(boxes)} segments",
        loc="left",
    )
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    bar = figure.colorbar(ScalarMappable(norm, colours), ax=axes, label="samples that share the segment")
    ticks = sorted({1, *(2**i for i in range(1, 20) if 2**i < num_samples), num_samples})
    bar.set_ticks(ticks, labels=[str(tick) for tick in ticks])
    bar.minorticks_off()
    _save(figure, path)


def _columns(packed: dict[str, NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """First column and number of columns of each segment, a column a sample, in the order of their last tokens.

    Pre-order makes the samples below a segment neighbours.
    """
    positions, offsets = packed["positions"], packed["offsets"]
    bounds = packed["tree_cu_seqlens_q"]
    column = np.empty(len(offsets) - 1, np.int64)
    column[np.argsort(positions[offsets[1:] - 1], kind="stable")] = np.arange(len(column))
    sample = np.repeat(np.arange(len(column)), np.diff(offsets))
    # A sample runs through whole segments, so it is counted where it meets a segment's first token.
    segment_of_start = np.full(bounds[-1], -1)
    segment_of_start[bounds[:-1]] = np.arange(len(bounds) - 1)
    segment = segment_of_start[positions]
    met = segment >= 0
    first = np.full(len(bounds) - 1, len(column))
    np.minimum.at(first, segment[met], column[sample[met]])
    return first, np.bincount(segment[met], minlength=len(first))


def _save(figure: Figure, path: Path) -> None:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=DPI)
