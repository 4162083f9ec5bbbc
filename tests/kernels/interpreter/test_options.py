"""Every option in both directions, on any forest: forward and each gradient against float64, worst segment first."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.forests import group, karied, make_inputs, positions_of
from support.triton_kernels import check, small_config

TILES = st.sampled_from([(16, 16), (32, 16), (16, 32), (64, 32)])


@st.composite
def small_forests(draw: st.DrawFn) -> torch.Tensor:
    """Up to about 100 tokens whose segments crowd around 1 and 16."""
    segments: list[tuple[int, int]] = []
    open_tokens = 0
    for _ in range(draw(st.integers(1, 9))):
        depth = draw(st.one_of(st.integers(0, open_tokens), st.just(open_tokens), st.just(0)))
        length = draw(st.sampled_from([1, 1, 2, 5, 15, 16, 17]))
        segments.append((depth, length))
        open_tokens = depth + length
    return positions_of(segments)


@settings(max_examples=25)
@given(
    small_forests(),
    st.tuples(TILES, TILES, TILES),
    st.sampled_from([(1, 1), (2, 1), (3, 1), (4, 2)]),
    st.sampled_from([None, 1.0, -0.3]),
    st.sampled_from([None, 1, 4, 20]),
    st.sampled_from([None, 1.5]),
    st.booleans(),
    st.booleans(),
)
def test_any_forest_with_any_options(
    position_ids: torch.Tensor,
    tiles: tuple[tuple[int, int], ...],
    heads: tuple[int, int],
    scale: float | None,
    window: int | None,
    softcap: float | None,
    sinks: bool,
    lse: bool,
) -> None:
    inputs = make_inputs(len(position_ids), heads=heads, dims=(16, 16), sinks=sinks, lse=lse)
    config = small_config(inputs, forward=tiles[0], query_grad=tiles[1], key_grad=tiles[2])
    check(position_ids, inputs, config, scale=scale, sliding_window=window, softcap=softcap)


@pytest.mark.parametrize(
    "options",
    [{}, {"sliding_window": 7}, {"softcap": 2.0}, {"scale": 1.0}, {"sliding_window": 20, "softcap": 1.0}],
    ids=str,
)
def test_float16(options: dict[str, Any]) -> None:
    position_ids = positions_of([*group(21, [9, 1, 30]), (0, 3)])
    inputs = make_inputs(len(position_ids), heads=(2, 1), dims=(32, 16), dtype=torch.float16, sinks=True)
    check(
        position_ids, inputs, small_config(inputs, forward=(32, 16), query_grad=(32, 16), key_grad=(16, 32)), **options
    )


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")  # numpy's; tanh is 1 there
def test_softcap_saturates_without_nan() -> None:
    position_ids = positions_of(karied(2, 3, 5))
    inputs = make_inputs(len(position_ids))
    with torch.no_grad():
        inputs.q.mul_(40)
    found = check(
        position_ids,
        inputs,
        small_config(inputs, forward=(32, 16), query_grad=(32, 16), key_grad=(16, 32)),
        softcap=0.5,
    )
    assert all(result.isfinite().all() for result in found.values())


@pytest.mark.parametrize("sink", [-1e4, 30.0, 1e4])
def test_sinks_of_any_size(sink: float) -> None:
    position_ids = positions_of(group(20, [7, 1]))
    inputs = make_inputs(len(position_ids), sinks=True, lse=False)
    with torch.no_grad():
        inputs.sinks.fill_(sink)
    check(position_ids, inputs, small_config(inputs, forward=(32, 16), query_grad=(32, 16), key_grad=(16, 32)))


def test_rows_without_queries_have_zero_gradients() -> None:
    """Keys that get no gradient from any later query: exact zeros where the output's own gradient is zero."""
    position_ids = positions_of([(0, 40), (0, 9)])
    inputs = make_inputs(len(position_ids), lse=False)
    inputs.grad_out[30:] = 0
    found = check(position_ids, inputs, small_config(inputs, forward=(32, 16), query_grad=(32, 16), key_grad=(16, 32)))
    for name in ("dq", "dk", "dv"):
        assert (found[name][30:] == 0).all()
