"""`treepack doctor --shape`: the counted work of a forest, and which attention path would serve it."""

import re
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from treepack.kernels import work
from treepack.kernels.configs import Device, Tile, attention_config
from treepack.kernels.plan import TreePlan
from treepack.scoring.doctor import DEFAULT_BACKENDS
from treepack.scoring.errors import OptionError

HEADS = work.HeadShape(query=32, kv=8, dim=128)
HOPPER = Device("sm_90", 232448)
MAX_TOKENS = 2**22


@dataclass(frozen=True)
class MethodWork:
    """Counts of one way of computing the forest's attention, forward.

    Attributes:
        pairs: (query, key) pairs a head computes, the padding of tiles included.
        waste: these over the visible ones.
        calls: attention kernels launched one after the other.
        merged_rows: queries whose partial results are merged.
        gathered_rows: keys that are copied.
        predicted_ms: the model's milliseconds on an H200; nothing is measured.
    """

    pairs: int
    waste: float
    calls: int
    merged_rows: int
    gathered_rows: int
    predicted_ms: float


@dataclass(frozen=True)
class ShapeFindings:
    """The counted work of a forest.

    Attributes:
        shape: as given.
        tokens: unique tokens of the row.
        raw_tokens: tokens of its sequences.
        sequences: root-to-leaf sequences.
        segments: runs without a branch.
        visible_pairs: (query, key) pairs that a head must compute.
        methods: by name.
        flash_path: what backend="flash" takes.
        backends: by kind of device, the backend where none is named.
    """

    shape: str
    tokens: int
    raw_tokens: int
    sequences: int
    segments: int
    visible_pairs: int
    methods: dict[str, MethodWork]
    flash_path: str
    backends: dict[str, str]

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        return asdict(self)


def examine_shape(shape: str) -> ShapeFindings:
    """Count the work of a forest.

    Args:
        shape: trees separated by commas. A tree is its levels from the root down, joined by "+", each a length in
            tokens or a number of branches "x" a length: "1024+12x256" is a prompt and twelve completions, "16x64+4x48"
            sixteen prompts of four completions each.

    Raises:
        OptionError: `shape` is not written like this, or has more than 2^22 tokens.
    """
    plan = TreePlan.from_position_ids(parse_shape(shape))
    config = attention_config(HEADS.dim, HEADS.dim, torch.bfloat16, group=HEADS.query // HEADS.kv, device=HOPPER)
    methods = {
        "triton": (work.triton_query_work(plan, _token_tile(config.forward, config.pack)), work.TRITON_RATES),
        "cascade": (work.cascade_work(plan), work.FLASH_RATES),
        "gather + varlen": (work.gather_work(plan), work.FLASH_RATES),
        "unshared varlen": (work.unshared_work(plan), work.FLASH_RATES),
        "dense mask": (work.dense_work(plan), work.FLASH_RATES),
    }
    visible, lengths = plan.num_pairs(), work.sequence_lengths(plan.segments)
    return ShapeFindings(
        shape=shape,
        tokens=plan.num_tokens,
        raw_tokens=int(lengths.sum()),
        sequences=len(lengths),
        segments=len(plan.segments),
        visible_pairs=visible,
        methods={name: _method_work(counted, rates, visible) for name, (counted, rates) in methods.items()},
        flash_path=work.flash_path(plan, window=None, heads=HEADS),
        backends=dict(DEFAULT_BACKENDS),
    )


def parse_shape(shape: str) -> torch.Tensor:
    """(N,) int64, the depth of each token of the forest that `examine_shape` describes."""
    trees = [_parse_tree(tree, shape) for tree in shape.split(",")]
    tokens = sum(
        length * prod(count for count, _ in tree[: level + 1])
        for tree in trees
        for level, (_, length) in enumerate(tree)
    )
    if tokens > MAX_TOKENS:
        raise OptionError(f"--shape must have at most {MAX_TOKENS:,} tokens, got {tokens:,}")
    return torch.cat([_depths(tree, 0) for tree in trees])


def print_shape(findings: ShapeFindings, console: Console) -> None:
    """Print the findings for people."""
    console.print(
        f"{findings.shape}: {findings.tokens:,} tokens in {findings.segments:,} segments, "
        f"{findings.raw_tokens:,} tokens in {findings.sequences:,} sequences; "
        f"{findings.visible_pairs:,} visible pairs a head",
        highlight=False,
    )
    table = Table(title="counted work, forward", title_justify="left", box=box.SIMPLE)
    table.add_column("method", no_wrap=True)
    for column in ("M pairs", "waste", "calls", "merged q", "copied k", "model ms"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, method in findings.methods.items():
        counts = (f"{count:,}" for count in (method.calls, method.merged_rows, method.gathered_rows))
        table.add_row(name, f"{method.pairs / 1e6:,.2f}", f"{method.waste:.2f}", *counts, f"{method.predicted_ms:.3f}")
    console.print(table)
    console.print(
        f"model: an H200 at assumed rates, {HEADS.query}:{HEADS.kv} heads, D {HEADS.dim}, bf16; nothing is measured",
        f'backend="flash" takes the {findings.flash_path} (the path predicted to train faster)',
        *(f"where no backend is named, a {device} takes {name!r}" for device, name in findings.backends.items()),
        sep="\n",
        highlight=False,
    )


def _parse_tree(tree: str, shape: str) -> list[tuple[int, int]]:
    """(branches, tokens) of each level."""
    levels = []
    for level in tree.split("+"):
        found = re.fullmatch(r"\s*(?:(\d{1,9})\s*x\s*)?(\d{1,9})\s*", level)
        count, length = (0, 0) if found is None else (int(found[1] or 1), int(found[2]))
        if count < 1 or length < 1:
            raise OptionError(f'--shape must be like "1024+12x256" or "16x64+4x48,500", got {shape!r}')
        levels.append((count, length))
    return levels


def _depths(tree: list[tuple[int, int]], depth: int) -> torch.Tensor:
    if not tree:
        return torch.zeros(0, dtype=torch.int64)
    (count, length), *below = tree
    branch = torch.cat([torch.arange(depth, depth + length), _depths(below, depth + length)])
    return branch.repeat(count)


def _token_tile(tile: Tile, pack: int) -> work.TileShape:
    return work.TileShape(tile.block_m // pack, tile.block_n)


def _method_work(counted: work.Work, rates: work.Rates, visible_pairs: int) -> MethodWork:
    return MethodWork(
        pairs=counted.pairs,
        waste=counted.waste(visible_pairs),
        calls=counted.calls,
        merged_rows=counted.merged_rows,
        gathered_rows=counted.gathered_rows,
        predicted_ms=1e3 * work.predicted_seconds(counted, HEADS, rates),
    )
