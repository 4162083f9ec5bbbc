"""The prefix trees of packed rows as an icicle chart draws them: a node a segment, the largest ones kept."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.html_report_data import PlacedRow
from treepack.scoring.inspect_text import Decode
from treepack.scoring.sequences import pack_sequences

MAX_TREES = 40
MAX_NODES = 12_000
MAX_NODES_OF_TREE = 1_000
SHOWN_TOKENS = 64
SHOWN_CHARS = 240

Tree = dict[str, Any]


def draw_trees(rows: Sequence[PlacedRow], decode: Decode | None = None) -> tuple[list[Tree], str]:
    """The trees of rows, of the last ones where there are too many, and what was left out, in words.

    Args:
        rows: the rows, in order of place.
        decode: shows the first tokens of each segment.

    Returns:
        A tree is {"step", "micro_batch", "rank", "groups", and, a value a node: "parent" (index of a node, -1 for the
        row's own roots), "samples" (that pass through), "tokens", "depth" (of the first token), "reward", "advantage"
        (means of these samples, None = none), "uid" (of the first one), "text"}. Nodes follow their parents.
    """
    trees: list[Tree] = []
    nodes = cut = 0
    for row in reversed(rows[-MAX_TREES:]):
        tree, segments = _tree(row, decode, MAX_NODES_OF_TREE)
        size = len(tree["parent"])
        if trees and nodes + size > MAX_NODES:
            break
        nodes += size
        cut += segments - size
        trees.append(tree)
    left_out = []
    if len(trees) < len(rows):
        left_out.append(f"the last {len(trees):,} of {len(rows):,} rows are drawn")
    if cut:
        left_out.append(f"{cut:,} of their {nodes + cut:,} segments, those with the fewest tokens below, are left out")
    return trees[::-1], "; ".join(left_out)


def _tree(row: PlacedRow, decode: Decode | None, max_nodes: int) -> tuple[Tree, int]:
    """The tree of one row, and how many segments it has."""
    offsets = row.rollouts.offsets
    sequences = [row.rollouts.input_ids[offsets[at] : offsets[at + 1]].astype(np.int64) for at in row.rows]
    packed = {name: value.numpy() for name, value in pack_sequences(sequences, kv_index=False).items()}
    bounds = packed["tree_cu_seqlens_q"]
    depth, tokens = packed["position_ids"][bounds[:-1]], np.diff(bounds)
    parent = _parents(depth, tokens)
    sample, segment = _visits(packed)
    samples = np.bincount(segment, minlength=len(tokens))
    first_sample = np.full(len(tokens), len(sequences))
    np.minimum.at(first_sample, segment, sample)
    kept = _largest(parent, samples * tokens, max_nodes)
    number = np.full(len(tokens) + 1, -1)  # the last entry is the parent of roots
    number[kept] = np.arange(len(kept))
    ids = packed["input_ids"]
    groups = np.unique(row.rollouts.group_id[row.rows]).tolist()
    tree = {
        **dict(zip(("step", "micro_batch", "rank"), row.place)),
        "groups": groups,
        "parent": number[parent[kept]].tolist(),
        "samples": samples[kept].tolist(),
        "tokens": tokens[kept].tolist(),
        "depth": depth[kept].tolist(),
        "reward": _means(row.rewards, sample, segment, len(tokens), kept),
        "advantage": _means(row.advantages, sample, segment, len(tokens), kept),
        "uid": row.rollouts.uid[row.rows[first_sample[kept]]].tolist(),
        "text": [_text(decode, ids[bounds[at] : bounds[at + 1]]) for at in kept.tolist()],
    }
    return tree, len(tokens)


def _parents(depth: NDArray[np.int64], tokens: NDArray[np.int64]) -> NDArray[np.int64]:
    """The segment that each segment continues, -1 for roots: of those before it, the last that ends where it starts."""
    parents: list[int] = []
    path: list[int] = []
    ends = (depth + tokens).tolist()
    for segment, start in enumerate(depth.tolist()):
        while path and ends[path[-1]] > start:
            path.pop()
        parents.append(path[-1] if start else -1)
        path.append(segment)
    return np.array(parents, np.int64)


def _visits(packed: dict[str, NDArray[np.int64]]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sample and segment, wherever a sample runs through a segment, which it enters at the segment's first token."""
    bounds = packed["tree_cu_seqlens_q"]
    segment_of_start = np.full(bounds[-1], -1)
    segment_of_start[bounds[:-1]] = np.arange(len(bounds) - 1)
    segment = segment_of_start[packed["positions"]]
    sample = np.repeat(np.arange(len(packed["offsets"]) - 1), np.diff(packed["offsets"]))
    entered = segment >= 0
    return sample[entered], segment[entered]


def _largest(parent: NDArray[np.int64], raw_tokens: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """The `count` segments with the most raw tokens in and below them; these include their parents."""
    below = raw_tokens.copy()
    for segment in range(len(parent) - 1, -1, -1):
        if parent[segment] >= 0:
            below[parent[segment]] += below[segment]
    return np.sort(np.argsort(-below, kind="stable")[:count])


def _means(
    values: NDArray[np.float64],
    sample: NDArray[np.int64],
    segment: NDArray[np.int64],
    num_segments: int,
    kept: NDArray[np.int64],
) -> list[float | None]:
    """Means over the samples of each kept segment that have a value."""
    known = ~np.isnan(values[sample])
    totals = np.bincount(segment[known], weights=values[sample[known]], minlength=num_segments)[kept]
    counts = np.bincount(segment[known], minlength=num_segments)[kept]
    return [total / count if count else None for total, count in zip(totals.tolist(), counts.tolist())]


def _text(decode: Decode | None, ids: NDArray[np.int64]) -> str:
    if decode is None:
        shown = " ".join(map(str, ids[:16].tolist()))
        return f"{shown} ..." if len(ids) > 16 else shown
    text = decode(ids[:SHOWN_TOKENS])
    cut = len(ids) > SHOWN_TOKENS or len(text) > SHOWN_CHARS
    return f"{text[:SHOWN_CHARS]} ..." if cut else text
