"""The oracle itself, against attention of every sequence alone and against masks written by hand."""

import pytest
import torch
from torch import Tensor

from support.forests import FORESTS, make_inputs, paths_of, positions_of
from treepack.kernels.plan import TreePlan
from treepack.kernels.reference import reference_attention, visible_pairs


def test_the_mask_of_a_small_forest() -> None:
    plan = TreePlan.from_position_ids(torch.tensor([0, 1, 2, 1, 2, 0]))
    assert visible_pairs(plan).int().tolist() == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],
        [1, 0, 0, 1, 0, 0],
        [1, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 0, 1],
    ]


def test_a_window_is_measured_along_the_path() -> None:
    plan = TreePlan.from_position_ids(torch.tensor([0, 1, 2, 2, 2]))
    # The last token is 3 packed tokens from its parent and one step of the path.
    assert visible_pairs(plan, 2).int()[4].tolist() == [0, 1, 0, 0, 1]


def alone(q: Tensor, k: Tensor, v: Tensor, window: int | None, softcap: float | None, sinks: Tensor) -> tuple:
    """Causal attention of one sequence, written with explicit sinks as an extra column."""
    length, heads, dim = q.shape
    k, v = (t.repeat_interleave(heads // t.shape[1], 1) for t in (k, v))
    scores = torch.einsum("ihd,jhd->hij", q, k) * dim**-0.5
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    age = torch.arange(length)[:, None] - torch.arange(length)
    seen = (age >= 0) & (age < (window or length))
    scores = scores.masked_fill(~seen, -torch.inf)
    with_sink = torch.cat([scores, sinks[:, None, None].expand(-1, length, 1)], -1)
    probs = torch.softmax(with_sink, -1)[..., :-1]
    return torch.einsum("hij,jhd->ihd", probs, v), torch.logsumexp(scores, -1)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (5, None), (None, 2.0), (40, 3.0)])
@pytest.mark.parametrize("name", ["group", "prompts", "binary", "unwinding"])
def test_packed_attention_equals_every_sequence_alone(name: str, window: int | None, softcap: float | None) -> None:
    position_ids = positions_of(FORESTS[name])
    inputs = make_inputs(len(position_ids), heads=(4, 2), dims=(8, 4), dtype=torch.float64, sinks=True)
    q, k, v, sinks = (inputs.leaves[name].detach() for name in ("q", "k", "v", "sinks"))
    out, lse = reference_attention(
        q, k, v, TreePlan.from_position_ids(position_ids), sliding_window=window, softcap=softcap, sinks=sinks
    )
    for path in paths_of(position_ids):
        expected_out, expected_lse = alone(q[path], k[path], v[path], window, softcap, sinks)
        torch.testing.assert_close(out[path], expected_out, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(lse[:, path], expected_lse, rtol=1e-12, atol=1e-12)
