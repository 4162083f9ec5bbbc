"""What breaks sharing: the places where rows part, by what parts them, ranked by the tokens that are computed again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from treepack.scoring.inspect_kinds import GRAM, Cause, Example, Kind, Parting, cause_of
from treepack.scoring.inspect_rows import Fork, Ints, SortedRows
from treepack.scoring.inspect_text import Decode


@dataclass(frozen=True)
class Divergence:
    """A cause that parts rows which would otherwise share more.

    Attributes:
        kind: what it is (see `inspect_kinds.TITLES`).
        tokens: tokens that are computed again behind it, though the row beside holds them behind it too: what sharing
            stands to gain. Where no history differs, these are tokens of the prompt alone.
        tokens_within_groups: those that groups by themselves would share; the others, groups on one row.
        places: forks that it makes in the prefix trees of the groups, and between groups.
        places_within_groups: the former.
        groups: groups that it touches.
        depth: index in the row of the first token that differs, at its earliest.
        uids: the two rows of the example, the place that costs most.
        example: what stands there.
    """

    kind: Kind
    tokens: int
    tokens_within_groups: int
    places: int
    places_within_groups: int
    groups: int
    depth: int
    uids: tuple[int, int]
    example: Example


@dataclass(frozen=True)
class Divergences:
    """All places where rows part.

    Attributes:
        causes: the divergences that cost tokens, the costliest first, earlier ones first among equals; "text", which is
            hardly an accident, comes last.
        sampled: forks where rollouts go their own ways, which is what a group is for.
        free: other forks behind which fewer tokens than an n-gram has are computed again.
    """

    causes: tuple[Divergence, ...]
    sampled: int
    free: int


@dataclass(frozen=True)
class _Found:
    """One fork and what makes it."""

    cause: Cause
    tokens: int
    within: bool
    groups: frozenset[int]
    depth: int
    uids: tuple[int, int]


def find_divergences(rows: SortedRows, decode: Decode | None = None) -> Divergences:
    """Examine every fork of the prefix trees: of each group by itself, and, of all rows, where groups part.

    Args:
        rows: the sorted rows.
        decode: the tokenizer, which tells dates, ids and re-tokenised text.
    """
    by_cause: dict[tuple[Kind, str], list[_Found]] = {}
    sampled = free = 0
    for forked, fork in _forks(rows):
        history = _is_history(forked, fork)
        if history is None:
            sampled += 1
            continue
        found = _examine(forked, fork, decode, history=history)
        if found is None:
            free += 1
        else:
            by_cause.setdefault((found.cause.kind, found.cause.place), []).append(found)
    causes = sorted(
        map(_gather, by_cause.values()), key=lambda cause: (cause.kind == "text", -cause.tokens, cause.depth)
    )
    return Divergences(tuple(causes), sampled, free)


def _forks(rows: SortedRows) -> Iterator[tuple[SortedRows, Fork]]:
    for group in rows.by_group().values():
        yield from ((group, fork) for fork in group.forks())
    yield from ((rows, fork) for fork in rows.forks() if not _overlap(rows.groups, fork))


def _is_history(rows: SortedRows, fork: Fork) -> bool | None:
    """Whether one branch holds as history what was sampled in the other; None where rollouts go their own ways.

    They do where the token was sampled in each branch, and, behind their first sampled token, wherever they part.
    """
    branches = (fork.left, fork.right)
    sampled = [rows.sampled(branch, fork.depth) for branch in branches]
    if all(sampled):
        return None
    if _overlap(rows.trajectories, fork):
        return any(sampled)
    begun = all(rows.begun[branch.start : branch.stop].max() <= fork.depth for branch in branches)
    return None if begun or any(sampled) else False


def _overlap(values: Ints, fork: Fork) -> bool:
    """Whether both branches hold a row with the same value."""
    left, right = (values[branch.start : branch.stop] for branch in (fork.left, fork.right))
    return bool(np.isin(left, right).any())


def _examine(rows: SortedRows, fork: Fork, decode: Decode | None, *, history: bool) -> _Found | None:
    """What the fork costs, and why it is there; None where hardly anything is repeated behind it."""
    costs = {pair: _repeated(rows, *pair, fork.depth, history=history) for pair in _pairs(rows, fork, history=history)}
    tokens = sum(costs.values())
    if tokens < GRAM:
        return None
    left, right = max(costs, key=costs.__getitem__)
    parting = Parting(rows.ids(left), rows.ids(right), fork.depth)
    return _Found(
        cause=cause_of(parting, decode, history=history),
        tokens=tokens,
        within=bool(rows.groups[left] == rows.groups[right]),
        groups=frozenset({int(rows.groups[left]), int(rows.groups[right])}),
        depth=fork.depth,
        uids=(int(rows.rollouts.uid[rows.order[left]]), int(rows.rollouts.uid[rows.order[right]])),
    )


def _pairs(rows: SortedRows, fork: Fork, *, history: bool) -> list[tuple[int, int]]:
    """The rows to compare, by place: the longest of each branch; of a rewritten history those of each rollout."""
    if not history:
        return [(rows.longest(fork.left), rows.longest(fork.right))]
    longest: list[dict[int, int]] = []
    for branch in (fork.left, fork.right):
        by_length = branch.start + np.argsort(rows.lengths[branch.start : branch.stop], kind="stable")
        longest.append(dict(zip(rows.trajectories[by_length].tolist(), by_length.tolist())))  # the last one stays
    left, right = longest
    return [(left[rollout], right[rollout]) for rollout in left if rollout in right]


def _repeated(rows: SortedRows, left: int, right: int, depth: int, *, history: bool) -> int:
    """Tokens of the right row behind the fork that the left row holds there too.

    Unless histories differ, only what stands before its rollout's first sampled token: from there on rollouts go their
    own ways, whatever stands before.
    """
    repeated = Parting(rows.ids(left), rows.ids(right), depth).repeated
    return int(np.count_nonzero(repeated if history else repeated[: rows.begun[right]]))


def _gather(found: Iterable[_Found]) -> Divergence:
    """The forks of one cause together."""
    forks = list(found)
    costliest = max(forks, key=lambda fork: fork.tokens)
    return Divergence(
        kind=costliest.cause.kind,
        tokens=sum(fork.tokens for fork in forks),
        tokens_within_groups=sum(fork.tokens for fork in forks if fork.within),
        places=len(forks),
        places_within_groups=sum(fork.within for fork in forks),
        groups=len(frozenset().union(*(fork.groups for fork in forks))),
        depth=min(fork.depth for fork in forks),
        uids=costliest.uids,
        example=costliest.cause.example,
    )
