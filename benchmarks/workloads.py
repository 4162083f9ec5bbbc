"""The attention workloads of the kernel benchmarks: W1 to W7, and a tree of short edges.

Each is a forest given by its segments. W5 and W7 are real rollouts; only the shape of their forests is kept, in
`trace_segments.json`, so that they are the same where the traces are not at hand. To cut that file anew:

    python benchmarks/workloads.py TRACES
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from treepack.kernels.plan import TreePlan

Segments = Sequence[tuple[int, int]]
Indices = NDArray[np.int64]

TRACE_SEGMENTS = Path(__file__).with_name("trace_segments.json")
TRACE_GROUP = 0


@dataclass(frozen=True)
class Workload:
    """A prefix forest in depth-first pre-order.

    Attributes:
        name: "W1" and so on.
        description: what the row is, in a few words.
        segments: (depth of the first token, number of tokens) of each segment. One ends at a branch or a path's end.
    """

    name: str
    description: str
    segments: Segments

    @cached_property
    def num_tokens(self) -> int:
        """Tokens of the packed row."""
        return sum(length for _, length in self.segments)

    @cached_property
    def position_ids(self) -> Tensor:
        """(N,) int64, depth of each token."""
        return torch.cat([torch.arange(depth, depth + length) for depth, length in self.segments])

    @cached_property
    def plan(self) -> TreePlan:
        """The forest's plan, on the CPU."""
        return TreePlan.from_position_ids(self.position_ids)

    @cached_property
    def num_pairs(self) -> int:
        """Visible (query, key) pairs of a head."""
        return self.plan.num_pairs()

    @cached_property
    def leaves(self) -> list[int]:
        """Segments that end a path."""
        following = [depth for depth, _ in self.segments[1:]] + [0]
        return [s for s, (depth, length) in enumerate(self.segments) if following[s] < depth + length]

    @cached_property
    def sequence_lengths(self) -> list[int]:
        """Tokens of each root-to-leaf sequence."""
        return [sum(self.segments[leaf]) for leaf in self.leaves]

    @property
    def gathered_rows(self) -> int:
        """Keys that a gather copies: those of every segment's whole path."""
        return sum(depth + length for depth, length in self.segments)

    def paths(self) -> list[Indices]:
        """Packed indices of every segment's path from its root, its own tokens included."""
        paths: list[Indices] = []
        start = 0
        for parent, (_, length) in zip(_parents(self.segments), self.segments):
            above = paths[parent] if parent >= 0 else np.arange(0)
            paths.append(np.concatenate([above, np.arange(start, start + length)]))
            start += length
        return paths

    def scaled(self, factor: float) -> "Workload":
        """The same tree with every segment's length times `factor`, but at least one token."""
        segments: list[tuple[int, int]] = []
        for parent, (_, length) in zip(_parents(self.segments), self.segments):
            depth = sum(segments[parent]) if parent >= 0 else 0
            segments.append((depth, max(1, round(length * factor))))
        return Workload(self.name, self.description, tuple(segments))


def dry_workloads() -> list[Workload]:
    """The first segments of a prompt's group, a trace and a deep tree, a few tokens each: what a dry run measures."""
    chosen = (w for w in all_workloads() if w.name in ("W3", "W5", "W8"))
    return [replace(w, segments=w.segments[:12]).scaled(1 / 512) for w in chosen]


def all_workloads() -> list[Workload]:
    """W1 to W7 at full size, and W8, the short edges."""
    return [build() for build in _BUILDERS]


def _group(prompt: int, completions: int, length: int) -> Segments:
    return ((0, prompt), *[(prompt, length)] * completions)


def _karied(children: int, levels: int, length: int, depth: int = 0) -> Segments:
    below = tuple(_karied(children, levels - 1, length, depth + length)) if levels > 1 else ()
    return ((depth, length), *(below * children))


def _binary(leaves: int, levels: int, rng: np.random.Generator, depth: int = 0) -> Segments:
    """A binary tree of that many leaves on at most that many levels, its leaves split at random at each node."""
    length = int(rng.integers(64, 449))
    if leaves == 1:
        return ((depth, length),)
    most = 2 ** (levels - 2)
    left = int(rng.integers(max(1, leaves - most), min(leaves - 1, most) + 1))
    children = (_binary(part, levels - 1, rng, depth + length) for part in (left, leaves - left))
    return ((depth, length), *next(children), *next(children))


def _parents(segments: Segments) -> list[int]:
    """Index of the segment that each one continues, -1 for roots."""
    parents, path = [], []
    for index, (depth, _) in enumerate(segments):
        while path and sum(segments[path[-1]]) > depth:
            path.pop()
        parents.append(path[-1] if path else -1)
        path.append(index)
    return parents


def _traced(name: str) -> Segments:
    return tuple((depth, length) for depth, length in json.loads(TRACE_SEGMENTS.read_text())[name])


def _alone() -> Segments:
    return tuple((0, int(length)) for length in np.random.default_rng(0).integers(512, 4097, 16))


_BUILDERS: tuple[Callable[[], Workload], ...] = (
    lambda: Workload("W1", "prompt 8192, 16 x 1024", _group(8192, 16, 1024)),
    lambda: Workload("W2", "prompt 32768, 8 x 512", _group(32768, 8, 512)),
    lambda: Workload("W3", "prompt 1024, 8 x 256", _group(1024, 8, 256)),
    lambda: Workload("W4", "binary tree, 16 levels, 512 leaves", _binary(512, 16, np.random.default_rng(0))),
    lambda: Workload("W5", "airline agent, a task's 60 turns", _traced("airline_turns")),
    lambda: Workload("W6", "16 sequences, nothing shared", _alone()),
    lambda: Workload("W7", "game of 24, a puzzle's 100 rows", _traced("game24_samples")),
    lambda: Workload("W8", "4-ary tree of 32-token edges", _karied(4, 6, 32)),
)


def cut_trace(path: Path) -> Segments:
    """Segments of the first group of a trace, packed as treepack packs it."""
    from treepack.scoring.sequences import pack_sequences

    with np.load(path) as trace:
        ids, offsets, group_id = trace["input_ids"].astype(np.int64), trace["offsets"], trace["group_id"]
    rows = [ids[offsets[row] : offsets[row + 1]] for row in np.flatnonzero(group_id == TRACE_GROUP)]
    table = TreePlan.from_position_ids(pack_sequences(rows, kv_index=False)["position_ids"]).segments
    return tuple(zip(table.depth.tolist(), (table.stop - table.start).tolist()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path, help="folder of airline_turns.npz and game24_samples.npz")
    traces = parser.parse_args().traces
    cut = {name: cut_trace(traces / f"{name}.npz") for name in ("airline_turns", "game24_samples")}
    TRACE_SEGMENTS.write_text(json.dumps(cut) + "\n")


if __name__ == "__main__":
    main()
