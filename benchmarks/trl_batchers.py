"""TRL's planners as the benchmarks run them, and its loop around ours."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

from synthetic_rollouts import Samples

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # TRL warns that async GRPO is experimental
    from trl.experimental.async_grpo.async_grpo_trainer import FixedCountBatcher, TokenBudgetBatcher
    from trl.experimental.async_grpo.packing import TreeRow as TRLRow

Place = Callable[[list[Any], dict[str, Any]], Any]


def fill_micro_batches(samples: Samples, ranks: int, place: Place, row: type) -> Iterator[list[Any]]:
    """TokenBudgetBatcher's loop, except that what is left at the end is emitted too, on every rank."""
    rows = [row() for _ in range(ranks)]
    for sample in samples:
        while (placed := place(rows, sample)) is None:
            yield rows
            rows = [row() for _ in range(ranks)]
        placed.add(sample)
    for open_row in rows:
        if not open_row.samples:
            open_row.add(samples[-1])
    yield rows


def by_token_budget(samples: Samples, ranks: int, token_budget: int) -> Iterator[list[TRLRow]]:
    """TRL's micro-batches of rows within a token budget."""
    return fill_micro_batches(samples, ranks, TokenBudgetBatcher([], ranks, token_budget, {})._place, TRLRow)


def by_count(samples: Samples, ranks: int, micro_batches: int) -> Iterator[list[TRLRow]]:
    """TRL's micro-batches of a fixed number of samples, whatever their tokens; it leaves a remainder in its buffer."""
    return iter(FixedCountBatcher(samples, ranks, max(ranks, len(samples) // micro_batches)))
