"""How much rollouts share: per group, and across groups."""

from dataclasses import dataclass

import numpy as np

from treepack.scoring.inspect_rows import Ints, SortedRows


@dataclass(frozen=True)
class Sharing:
    """Tokens and attention with and without shared prefixes, if all the rows were one packed row.

    Attributes:
        rows: sequences.
        raw_tokens, tokens: tokens of the rows, each alone; unique ones, which are forwarded.
        raw_pairs, pairs: (query, key) pairs of attention, the same two ways.
    """

    rows: int
    raw_tokens: int
    tokens: int
    raw_pairs: int
    pairs: int

    @property
    def packing_ratio(self) -> float:
        """Raw tokens a unique one."""
        return self.raw_tokens / self.tokens

    @property
    def pair_ratio(self) -> float:
        """Raw pairs a remaining one."""
        return self.raw_pairs / self.pairs

    def __add__(self, other: "Sharing") -> "Sharing":
        return Sharing(
            self.rows + other.rows,
            self.raw_tokens + other.raw_tokens,
            self.tokens + other.tokens,
            self.raw_pairs + other.raw_pairs,
            self.pairs + other.pairs,
        )


def sharing(rows: SortedRows) -> Sharing:
    """What the sorted rows share with one another."""
    lengths, shared = rows.lengths, rows.shared_nodes()
    return Sharing(
        rows=len(rows),
        raw_tokens=int(lengths.sum()),
        tokens=int((lengths - shared).sum()),
        raw_pairs=int(_pairs(lengths).sum()),
        pairs=int((_pairs(lengths) - _pairs(shared)).sum()),
    )


def _pairs(lengths: Ints) -> Ints:
    """Pairs that a causal sequence of each length has."""
    return np.asarray(lengths * (lengths + 1) // 2, np.int64)
