"""The reference answers that `treepack score --scorer ebft` draws from the rollouts."""

import numpy as np

from support.samples import sample
from treepack.scoring.references import with_references

NAN = float("nan")


def references(samples):
    return [s["reference_ids"].tolist() if "reference_ids" in s else None for s in with_references(samples)]


def test_the_best_rewarded_row_after_its_prompt():
    rewards = [{"a": 1.0, "b": NAN}, {"a": 1.0, "b": 0.5}, {"a": 2.0, "b": -1.0}, {"a": 1.0, "b": 0.5}]
    group = [sample(i, 0, 4, [9, 9, i, i + 1], prompt=2, rewards=r) for i, r in enumerate(rewards)]
    other = [sample(4, 1, 1, [5, 6, 7], rewards={"a": -3.0, "b": NAN})]
    assert references([*group, *other]) == [[1, 2]] * 4 + [[6, 7]]


def test_groups_without_a_usable_row_get_none():
    no_reward = [sample(0, 0, 1, [1, 2], rewards={"a": NAN})]
    no_completion = [sample(1, 1, 1, [1, 2], prompt=2, rewards={"a": 1.0})]
    nothing_at_all = [sample(2, 2, 1, [1, 2], rewards={})]
    assert references([*no_reward, *no_completion, *nothing_at_all]) == [None] * 3


def test_a_row_without_a_completion_is_not_the_reference():
    rows = [sample(0, 0, 2, [1, 2], prompt=2, rewards={"a": 5.0}), sample(1, 0, 2, [1, 3], rewards={"a": 1.0})]
    assert references(rows) == [[3], [3]]
    assert all(np.issubdtype(s["reference_ids"].dtype, np.integer) for s in with_references(rows))
