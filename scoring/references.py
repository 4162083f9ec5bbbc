"""Reference answers for `EBFTScorer` out of the rollouts themselves."""

from collections.abc import Iterable, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.samples import Sample


def with_references(samples: Iterable[Sample]) -> Iterator[Sample]:
    """Samples that also have `reference_ids`: what their group's best-rewarded sample says after its prompt.

    Best is the largest sum of the rewards that apply, the earliest of equals; it is read from its first completion
    token on. A group in which no sample has both a reward and a completion token gets no reference.

    Args:
        samples: as `StepPlanner` takes them, a group's in a run.
    """
    for _, run in groupby(samples, key=lambda sample: sample["group_id"]):
        group = list(run)
        answer = _best_answer(group)
        yield from group if answer is None else ({**sample, "reference_ids": answer} for sample in group)


def _best_answer(group: list[Sample]) -> NDArray[np.int64] | None:
    rewarded = [(reward, sample) for sample in group if (reward := _reward(sample)) is not None]
    if not rewarded:
        return None
    _, best = max(rewarded, key=lambda entry: entry[0])  # the first of equals
    answer: NDArray[np.int64] = best["input_ids"][int(np.argmax(best["completion_mask"] != 0)) :]
    return answer


def _reward(sample: Sample) -> float | None:
    """The sum of the rewards that apply, None without one or without a completion token."""
    known = [reward for reward in sample["rewards"].values() if not np.isnan(reward)]
    return sum(known) if known and np.any(sample["completion_mask"]) else None
