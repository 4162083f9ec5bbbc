"""The "balanced" placement against brute force: the best contiguous cut of the sorted samples, priced exactly."""

from collections import defaultdict
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, LlamaConfig, Qwen3MoeConfig

from support.samples import groups_of, sample, sample_streams
from treepack import StepPlanner, TreeRow, token_cost
from treepack.scoring.token_cost import DENSE_8B_TOKEN_COST


def planned_step(stream, **options):
    defaults = {"num_processes": 2, "steps": 2, "token_budget": 1000, "samples_per_row": 0, "scorers": []}
    plan = StepPlanner(stream, placement="balanced", metrics=defaultdict(list), **{**defaults, **options})
    return [row for micro_batch in list(plan)[: plan.steps] for row in micro_batch]


def packed(samples):
    row = TreeRow()
    for s in samples:
        row.add(s)
    return row


def price(row, cost):
    return cost * row.num_tokens + row.load


@given(stream=sample_streams(max_groups=3, max_rows=3), cost=st.sampled_from([0.0, 3.0, 100.0]), rows=st.integers(1, 3))
@settings(max_examples=60)
def test_best_contiguous_cut(stream, cost, rows):
    planned = planned_step(stream, num_processes=rows, steps=1, token_cost=cost)
    if any(s["uid"] < 0 for row in planned for s in row.samples):
        assert len(stream) < rows
        return
    ordered = sorted(stream, key=lambda s: s["input_ids"].astype(">i8").tobytes())
    best = min(
        max(price(packed(ordered[a:b]), cost) for a, b in zip((0, *cuts), (*cuts, len(ordered)), strict=True))
        for cuts in combinations(range(1, len(ordered)), rows - 1)
    )
    got = [price(row, cost) for row in planned]
    assert max(got) <= best * 1.001 + 1e-9
    assert got == sorted(got, reverse=True)  # rows of similar cost share a micro-batch


def test_a_group_is_refused_only_when_no_contiguous_cut_holds_it():
    stream = groups_of([4, 4, 4], length=11, prompt=3)  # 3 - 1 shared + 4 x 9 = 38 tokens a group
    rows = planned_step(stream, num_processes=3, steps=1, token_budget=38)
    assert [len(row.samples) for row in rows] == [4, 4, 4]
    rows = planned_step(stream, num_processes=2, steps=1, token_budget=38)
    assert sorted(s["group_id"] for row in rows for s in row.samples) == [0] * 4 + [1] * 4


def test_rows_begin_between_groups_where_that_costs_nothing():
    groups = [[[g, *range(10, 20), 100 * g + i] for i in range(3)] for g in (1, 2)]
    stream = [sample(3 * g + i, g, 3, ids) for g, of_group in enumerate(groups) for i, ids in enumerate(of_group)]
    stream.append(sample(6, 2, 1, [3] * 60))  # so costly that filling rows up to it would split group 1
    rows = planned_step(stream, num_processes=3, steps=1)
    assert sorted(sorted(s["uid"] for s in row.samples) for row in rows) == [[0, 1, 2], [3, 4, 5], [6]]


def test_identical_samples_stay_in_order_of_arrival():
    stream = [{**s, "input_ids": s["input_ids"] * 0} for s in groups_of([5])]
    ((first, *_),) = [planned_step(stream, num_processes=1, steps=1)]
    assert [s["uid"] for s in first.samples] == [0, 1, 2, 3, 4]


def test_token_cost_of_a_dense_8b_model():
    config = LlamaConfig(
        vocab_size=128_256,
        hidden_size=4096,
        intermediate_size=14_336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    attention, mlp = 4096 * 128 * (32 + 32 + 8 + 8), 3 * 4096 * 14_336
    weights = 32 * (attention + mlp) + 4096 * 128_256
    assert token_cost(config) == pytest.approx(2 * weights / (4 * 32 * 32 * 128))
    assert token_cost(config) == pytest.approx(DENSE_8B_TOKEN_COST, rel=0.1)


def test_token_cost_counts_the_experts_a_token_passes():
    base = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 10}
    moe = Qwen3MoeConfig(**base, num_experts=64, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=16)
    dense = LlamaConfig(**base, intermediate_size=64, num_key_value_heads=moe.num_key_value_heads, head_dim=16)
    assert token_cost(moe) == token_cost(dense)


def test_token_cost_of_a_configuration_that_does_not_tell():
    with pytest.raises(ValueError, match=r"config must have hidden_size, .* without \['intermediate_size'\]"):
        token_cost(GPT2Config())
