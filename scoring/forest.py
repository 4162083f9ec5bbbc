"""The prefix forest of a packed row, kept as one tail a sequence instead of one object a token.

A node of the forest stands for a token *and* the one after it; a sequence's last token is keyed on "nothing follows".
So two sequences that agree on their first L tokens share max(L - 1, 0) nodes, identical ones share all, and a fork lies
one token before the sequences differ (TRL 1.16's `TreeRow`; every node then has one next-token label).

Sequence i shares its first `shared[i]` nodes with earlier sequences and owns the rest, its tail. In depth-first
pre-order with children in insertion order a tail is contiguous: whatever branches off it comes after its end, deepest
branch first. A row is therefore a permutation of tails, and everything that is packed is copied in slices.

N: unique tokens, S: segments, K: keys gathered over all segments, B: sequences.
"""

from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from operator import sub
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.integer[Any]]

INT32_MAX = 2**31 - 1

# Tokens compared at once, at first and further on: a call costs more than a thousand tokens.
FIRST_STEP, NEXT_STEP = 1024, 4096


class Match(NamedTuple):
    """How much of a sequence a forest holds already."""

    shared: int  # nodes
    parent: int  # the sequence that owns the last of them, -1 when there is none
    branch: int  # a key for that node and the token after the first one not shared; means nothing without a parent


class PrefixForest:
    """Sequences folded into a prefix forest. State is append-only, so a rollback is a truncation.

    Args:
        share_prefixes: False keeps every sequence a chain of its own.

    Attributes:
        sequences: the sequences in insertion order, each (n,), not copied: they must not be changed in place.
        shared: nodes of each sequence that earlier ones own.
        parents: the sequence that owns the last of these, -1 when there is none.
        num_tokens: N, the nodes of the forest.
    """

    __slots__ = (
        "_children",
        "_node_at_depth_0",
        "_roots",
        "num_tokens",
        "parents",
        "sequences",
        "share_prefixes",
        "shared",
    )

    def __init__(self, *, share_prefixes: bool = True) -> None:
        self.share_prefixes = share_prefixes
        self.sequences: list[Tokens] = []
        self.shared = array("i")
        self.parents = array("i")
        self.num_tokens = 0
        # Nodes are counted in insertion order; each tail's minus its depth, so that adding a depth gives the node.
        self._node_at_depth_0 = array("i")
        self._roots: dict[tuple[int, ...], int] = {}  # first two tokens -> sequence
        self._children: dict[int, int] = {}  # `Match.branch` -> sequence whose tail starts there

    def match(self, sequence: Tokens) -> Match:
        """The nodes of `sequence` (n,) that are here already: one array comparison a branch on its path."""
        if not self.share_prefixes:
            return Match(0, -1, -1)
        sequences, children, node_at_depth_0 = self.sequences, self._children, self._node_at_depth_0
        length, shared, parent, branch = len(sequence), 0, -1, -1
        child = self._roots.get(tuple(sequence[:2].tolist()))
        # Sequences of a group follow each other: this one shares about as much as the last one.
        agreed, step = min(2, length), (self.shared[-1] if self.shared else 0) + 64
        while child is not None:
            parent, other = child, sequences[child]
            agreed = _common_prefix(sequence, other, agreed, step)
            if agreed == length == len(other):
                return Match(length, parent, branch)
            shared = agreed - 1
            branch = node_at_depth_0[parent] + shared - 1 << 1
            if agreed < length:
                # The token at `shared` agrees with the parent's, or the two would have parted one node earlier.
                branch |= sequence.item(agreed) << 33 | 1
                agreed += 1
            child, step = children.get(branch), FIRST_STEP
        return Match(shared, parent, branch)

    def append(self, sequence: Tokens, match: Match) -> None:
        """Add `sequence` (n,), n > 0, given its `match` with the forest as it is now.

        Raises:
            ValueError: the forest would hold more than 2^31 - 1 tokens.
        """
        index, (shared, parent, branch) = len(self.sequences), match
        num_tokens = self.num_tokens + len(sequence) - shared
        if num_tokens > INT32_MAX:
            raise ValueError(f"a packed row must hold at most {INT32_MAX} tokens, got {num_tokens} at sequence {index}")
        if self.share_prefixes and shared < len(sequence):
            if parent < 0:
                self._roots[tuple(sequence[:2].tolist())] = index
            else:
                self._children[branch] = index
        self.sequences.append(sequence)
        self.shared.append(shared)
        self.parents.append(parent)
        self._node_at_depth_0.append(self.num_tokens - shared)
        self.num_tokens = num_tokens

    def truncate(self, count: int) -> None:
        """Drop all but the first `count` sequences; the forest is then as it was when it held only these."""
        assert 0 <= count <= len(self.sequences)
        for index in range(len(self.sequences) - 1, count - 1, -1):
            shared = self.shared[index]
            if self.share_prefixes and shared < len(self.sequences[index]):
                (self._roots if self.parents[index] < 0 else self._children).popitem()  # the last one put there
            self.num_tokens = self._node_at_depth_0[index] + shared
        for state in (self.sequences, self.shared, self.parents, self._node_at_depth_0):
            del state[count:]

    def layout(self) -> "ForestLayout":
        """Order and sizes of the packed forest, which must not be empty.

        Raises:
            ValueError: the paths of all segments together hold more than 2^31 - 1 tokens (int32 offsets).
        """
        assert self.sequences
        return _lay_out(self)


def shared_nodes(a: Tokens, b: Tokens) -> int:
    """Nodes that two sequences share in a forest: all where they are identical, else one less than they agree on."""
    agreed = _common_prefix(a, b, 0, FIRST_STEP)
    return agreed if agreed == len(a) == len(b) else max(agreed - 1, 0)


def _common_prefix(a: Tokens, b: Tokens, agreed: int, step: int) -> int:
    """Length of the longest common prefix of `a` and `b`, which agree on `agreed` tokens; `step` are compared first."""
    end = min(len(a), len(b))
    while agreed < end:
        stop = min(agreed + step, end)
        differs = np.not_equal(a[agreed:stop], b[agreed:stop])
        first = differs.argmax()
        if differs[first]:
            return agreed + int(first)
        agreed, step = stop, NEXT_STEP
    return end


@cache
def _counting(bits: int) -> NDArray[np.int64]:
    """0, 1, ..., 2^bits - 1, made once: rows are filled from it over and over."""
    counting = np.arange(1 << bits)
    counting.flags.writeable = False
    return counting


class Tail(NamedTuple):
    """One tail on its way into the packed row."""

    owner: int  # the sequence
    start: int  # packed index of its first token
    shared: int  # depth of its first token
    path: NDArray[np.int64]  # (n,) packed index of every token of the sequence; a buffer reused by the next tail
    pieces: list[tuple[int, int]]  # (depth, packed index) where each run of consecutive ones in `path` starts; likewise
    copies: list[int]  # later sequences identical to this one


@dataclass(frozen=True, slots=True)
class ForestLayout:
    """A forest in depth-first pre-order: what a packed row needs to know before it is written."""

    forest: PrefixForest
    order: list[int]  # owners of a tail, in pre-order
    ends: dict[int, list[int]]  # owner -> depths at which a segment of its tail ends, rising
    copies: dict[int, list[int]]  # owner -> later sequences identical to it
    cu_seqlens_q: list[int]  # (S + 1) segment bounds in the row
    cu_seqlens_k: list[int]  # (S + 1) bounds of the segments' root paths laid end to end
    max_seqlens: tuple[int, int]  # the longest segment and the longest path

    def write_tokens(self, input_ids: NDArray[np.int64], position_ids: NDArray[np.int64]) -> None:
        """Copy every tail's tokens and depths into the row, (N,) each."""
        shared, sequences = self.forest.shared, self.forest.sequences
        counting = self._counting()
        np.concatenate([sequences[index][shared[index] :] for index in self.order], out=input_ids)
        np.concatenate([counting[shared[index] : len(sequences[index])] for index in self.order], out=position_ids)

    def tails(self) -> Iterator[Tail]:
        """Every tail in packed order."""
        shared, sequences = self.forest.shared, self.forest.sequences
        # Pre-order keeps the part of this buffer that a tail shares: all since its parent branched off deeper.
        path = np.empty(self.max_seqlens[1], dtype=np.int64)
        pieces: list[tuple[int, int]] = []
        counting, start = self._counting(), 0
        for index in self.order:
            depth, length = shared[index], len(sequences[index])
            stop = start + length - depth
            path[depth:length] = counting[start:stop]
            while pieces and pieces[-1][0] >= depth:
                pieces.pop()
            pieces.append((depth, start))
            yield Tail(index, start, depth, path[:length], pieces, self.copies.get(index, []))
            start = stop

    def write_kv_index(self, tail: Tail, segment: int, kv_index: NDArray[np.int64]) -> int:
        """Copy the root paths of one tail's segments, the first of which is number `segment`, into `kv_index` (K,).

        Returns the number of the next tail's first segment.
        """
        for end in self.ends[tail.owner]:
            start = self.cu_seqlens_k[segment]
            kv_index[start : start + end] = tail.path[:end]
            segment += 1
        return segment

    def _counting(self) -> NDArray[np.int64]:
        """0, 1, ... beyond every packed index and depth, which are slices of it."""
        return _counting(max(self.cu_seqlens_q[-1], self.max_seqlens[1]).bit_length())


def _lay_out(forest: PrefixForest) -> ForestLayout:
    roots: list[int] = []
    children: dict[int, list[int]] = {}
    copies: dict[int, list[int]] = {}
    for index, (sequence, shared, parent) in enumerate(zip(forest.sequences, forest.shared, forest.parents)):
        if shared == len(sequence):
            copies.setdefault(parent, []).append(index)
        elif parent < 0:
            roots.append(index)
        else:
            children.setdefault(parent, []).append(index)

    order: list[int] = []
    ends: dict[int, list[int]] = {}
    cu_seqlens_q, path_lengths = [0], [0]
    start = 0
    stack = roots[::-1]
    while stack:
        index = stack.pop()
        order.append(index)
        shared, length = forest.shared[index], len(forest.sequences[index])
        ends[index] = [length]
        if own := children.get(index):  # few have any
            # The deepest branch first, equal depths in insertion order (the sort is stable); a stack wants the reverse.
            stack.extend(sorted(own, key=forest.shared.__getitem__, reverse=True)[::-1])
            ends[index][:0] = sorted({forest.shared[child] for child in own})
        path_lengths += ends[index]
        cu_seqlens_q += [start + end - shared for end in ends[index]]
        start += length - shared
    cu_seqlens_k = list(accumulate(path_lengths))
    max_seqlens = max(map(sub, cu_seqlens_q[1:], cu_seqlens_q)), max(path_lengths)
    if cu_seqlens_k[-1] > INT32_MAX:
        raise ValueError(
            f"the segments' paths in a packed row must hold at most {INT32_MAX} tokens, got {cu_seqlens_k[-1]}"
        )
    return ForestLayout(forest, order, ends, copies, cu_seqlens_q, cu_seqlens_k, max_seqlens)
