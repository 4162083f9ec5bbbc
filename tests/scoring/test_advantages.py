"""group_advantages against the formulas written out, and the cases 31-35 of public bug reports by their kind."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from treepack import group_advantages
from treepack.scoring.advantages import combine_rewards

NAN = float("nan")


def plain(rewards, groups, rollouts, estimator, scale):
    """The definition, one rollout at a time."""
    voters: dict[int, dict[int, float]] = {}
    for r, g, k in zip(rewards, groups, rollouts, strict=True):
        voters.setdefault(g, {})[k] = r
    everyone = [r for members in voters.values() for r in members.values() if not np.isnan(r)]
    out = []
    for g, k in zip(groups, rollouts, strict=True):
        own = voters[g][k]
        valid = [r for r in voters[g].values() if not np.isnan(r)]
        if np.isnan(own) or len(valid) < 2 or max(valid) == min(valid):
            out.append(0.0)
            continue
        baseline = np.mean(valid) if estimator == "grpo" else (sum(valid) - own) / (len(valid) - 1)
        value = own - baseline
        out.append(value / {"group": np.std(valid) + 1e-8, "batch": np.std(everyone) + 1e-8, "none": 1.0}[scale])
    return np.array(out)


ROWS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 1.0, -2.0, NAN]), st.integers(-3, 3), st.integers(0, 4)),
    min_size=1,
    max_size=40,
)


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@given(rows=ROWS)
def test_equals_definition(estimator, scale, rows):
    rewards, groups, rollouts = (np.array(column) for column in zip(*rows, strict=True))
    got = group_advantages(rewards, groups, rollouts, estimator=estimator, scale=scale)
    np.testing.assert_allclose(got, plain(rewards, groups, rollouts, estimator, scale), rtol=1e-12, atol=1e-12)


def test_population_std():
    # case 33: AsyncGRPO divides by the population standard deviation + 1e-8
    np.testing.assert_allclose(
        group_advantages(np.array([1.0, 0, 0]), [5, 5, 5]), [1.41421356, -0.70710678, -0.70710678]
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("count", [2, 3, 7, 8, 100])
@pytest.mark.parametrize("value", [0.2, 0.1, 1e-3, -7.7, 1e20])
@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_equal_rewards_give_exact_zero(dtype, count, value, estimator):
    # case 31: a mean of equal rewards is off by rounding, which 1e-8 turns into a signal
    rewards = torch.full((count,), min(value, 1e4) if dtype == torch.float16 else value, dtype=dtype)
    assert group_advantages(rewards, [0] * count, estimator=estimator).tolist() == [0.0] * count


def test_sums_that_are_equal_up_to_rounding_give_exact_zero():
    assert group_advantages(np.array([[0.1, 0.2], [0.3, 0.0], [0.0, 0.3]]), [0, 0, 0]).tolist() == [0.0] * 3


def test_unscorable_stays_out_of_mean_and_std():
    # case 32: one of eight has no reward at all
    rewards = np.array([1.0, 0, 1, 0, NAN, 1, 0, 1])
    got = group_advantages(rewards, np.zeros(8, int))
    assert got[4] == 0.0
    np.testing.assert_allclose(np.delete(got, 4), group_advantages(np.delete(rewards, 4), np.zeros(7, int)))


def test_one_missing_column_stays_local():
    # case 32: a None in one column of one sample changes that sample's sum only
    rewards = np.array([[1.0, 2.0], [3.0, NAN], [NAN, 5.0]])
    np.testing.assert_array_equal(combine_rewards(rewards, [1.0, 10.0]), [21.0, 3.0, 50.0])


def test_conversation_of_several_rows_votes_once():
    # case 35: rollout 0 has three rows, the last of which carries its reward
    got = group_advantages(np.array([9.0, 9.0, 1.0, 0.0, 0.0]), [4] * 5, [0, 0, 0, 1, 2])
    np.testing.assert_allclose(got, [1.41421356] * 3 + [-0.70710678] * 2)


def test_same_rollout_id_in_two_groups_is_two_rollouts():
    got = group_advantages(np.array([1.0, 0.0, 0.0, 1.0]), [0, 1, 0, 1], [0, 0, 1, 1], scale="none")
    np.testing.assert_allclose(got, [0.5, -0.5, -0.5, 0.5])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_input_is_computed_in_float64(dtype):
    rewards = torch.tensor([100.0, 100.5, 101.0, 99.0], dtype=dtype)
    got = group_advantages(rewards, torch.zeros(4, dtype=torch.int64))
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float64
    np.testing.assert_array_equal(got.numpy(), group_advantages(rewards.double().numpy(), np.zeros(4, int)))


def test_order_of_rows_does_not_matter():
    rng = np.random.default_rng(0)
    rewards, groups = rng.normal(size=200), rng.integers(0, 9, 200)
    shuffle = rng.permutation(200)
    np.testing.assert_allclose(
        group_advantages(rewards, groups)[shuffle],
        group_advantages(rewards[shuffle], groups[shuffle]),
        atol=1e-12,
    )


def test_empty():
    assert group_advantages(np.empty(0), np.empty(0, int)).shape == (0,)


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"rewards": np.zeros((2, 1, 1))}, "rewards must be of shape"),
        ({"rewards": np.array([1.0, np.inf])}, "rewards must be finite or NaN, got an infinite one in row 1"),
        ({"group_ids": [0]}, "group_ids must be 2 integers"),
        ({"group_ids": [0.5, 1.0]}, "group_ids must be 2 integers"),
        ({"rollout_ids": [0, 1, 2]}, "rollout_ids must be 2 integers"),
        ({"weights": [1.0, 2.0]}, "weights must be 1 finite numbers"),
        ({"weights": [NAN]}, "weights must be 1 finite numbers"),
        ({"estimator": "ppo"}, "estimator must be one of"),
        ({"scale": "std"}, "scale must be one of"),
    ],
)
def test_errors_name_the_argument(kwargs, message):
    arguments = {"rewards": np.array([1.0, 2.0]), "group_ids": [0, 0], **kwargs}
    with pytest.raises(ValueError, match=message):
        group_advantages(**arguments)
