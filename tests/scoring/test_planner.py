"""StepPlanner: whole groups, every sample once, no empty row, the bounds held; cases 21-25 by their kind."""

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from support.samples import group, groups_of, sample, sample_streams
from treepack import StepPlanner, TrainerScorer, check_step_capacity


def planner(samples, **options):
    defaults = {
        "num_processes": 2,
        "steps": 2,
        "token_budget": 64,
        "samples_per_row": 0,
        "scorers": [],
        "metrics": defaultdict(list),
    }
    return StepPlanner(samples, **{**defaults, **options})


def steps_of(plan):
    """The planned steps: lists of all their rows."""
    batches = list(plan)
    assert len(batches) % plan.steps == 0
    assert all(len(batch) == plan.num_processes for batch in batches)
    return [[row for batch in batches[i : i + plan.steps] for row in batch] for i in range(0, len(batches), plan.steps)]


def uids(rows):
    return [[s["uid"] for s in row.samples] for row in rows]


def forest_nodes(samples):
    """Nodes of the forest of these samples: (prefix up to the token, next token), as TRL keys them."""
    nodes = set()
    for s in samples:
        ids = [*s["input_ids"].tolist(), None]
        nodes |= {(tuple(ids[: i + 1]), ids[i + 1]) for i in range(len(ids) - 1)}
    return nodes


def unique_tokens(samples):
    return len(forest_nodes(samples))


@given(
    stream=sample_streams(),
    num_processes=st.integers(1, 3),
    steps=st.integers(1, 3),
    bound=st.one_of(st.tuples(st.integers(6, 30), st.just(0)), st.tuples(st.just(0), st.integers(1, 4))),
    share=st.booleans(),
    groups_per_step=st.sampled_from([None, 1, 2]),
    placement=st.sampled_from(["least_loaded", "balanced"]),
)
@settings(max_examples=100)
def test_invariants(stream, num_processes, steps, bound, share, groups_per_step, placement):
    dropped = []
    plan = planner(
        stream,
        num_processes=num_processes,
        steps=steps,
        token_budget=bound[0],
        samples_per_row=bound[1],
        share_prefixes=share,
        groups_per_step=groups_per_step,
        placement=placement,
        on_dropped=lambda group, reason: dropped.append((reason, group)),
    )
    planned = steps_of(plan)
    seen = [s["uid"] for rows in planned for row in rows for s in row.samples if s["uid"] >= 0]
    lost = [s["uid"] for _, group in dropped for s in group]
    assert sorted(seen + lost) == [s["uid"] for s in stream]  # every sample exactly once
    step_of_group = defaultdict(set)
    for i, rows in enumerate(planned):
        fillers = 0
        for row in rows:
            assert row.samples
            if bound[0] > 0:
                nodes = unique_tokens(row.samples) if share else sum(len(s["input_ids"]) for s in row.samples)
                assert row.num_tokens == nodes <= bound[0]
                assert sum(int(s["completion_mask"].sum()) for s in row.samples) <= bound[0]
            else:
                assert len(row.samples) <= bound[1]
            for s in row.samples:
                step_of_group[s["group_id"]].add(i)
                if s["uid"] == -1:
                    fillers += 1
                    assert len(row.samples) == 1
                    assert not s["completion_mask"].any()
                    assert s["rewards"] == {}
        real = sum(s["uid"] >= 0 for row in rows for s in row.samples)
        assert fillers == max(0, len(rows) - real)  # filler only when there are fewer samples than rows
        if groups_per_step:
            assert len({s["group_id"] for row in rows for s in row.samples}) <= groups_per_step
    assert all(len(indices) == 1 for indices in step_of_group.values())
    order = [min(step_of_group[g]) for g in sorted(step_of_group)]
    assert order == sorted(order)  # groups keep their order
    counted = sum(sum(values) for name, values in plan.metrics.items() if "dropped" in name)
    assert counted == len(lost)


@given(stream=sample_streams(max_groups=3), budget=st.integers(9, 20))
@settings(max_examples=40)
def test_least_loaded_placement_equals_definition(stream, budget):
    """Home rows first, then the least loaded that fits, ties to the lowest index; the step as TRL's load prices it."""
    first = steps_of(planner(stream, num_processes=3, steps=1, token_budget=budget))[:1]
    if not first or any(s["uid"] < 0 for row in first[0] for s in row.samples):
        return

    def load(row):
        return sum(len(prefix) for prefix, _ in forest_nodes(row))

    rows = [[] for _ in range(3)]
    for s in stream:
        if s["group_id"] not in {x["group_id"] for row in first[0] for x in row.samples}:
            continue
        ok = [
            i
            for i, row in enumerate(rows)
            if unique_tokens([*row, s]) <= budget and sum(int(x["completion_mask"].sum()) for x in [*row, s]) <= budget
        ]
        home = [i for i in ok if any(x["group_id"] == s["group_id"] for x in rows[i])]
        if not ok:
            return
        rows[min(home or ok, key=lambda i: (load(rows[i]), i))].append(s)
    if all(rows):
        assert uids(first[0]) == [[s["uid"] for s in row] for row in rows]


def test_nine_samples_on_four_ranks():
    # case 22 (verl#6869): [3, 2, 2, 2], never [3, 3, 3, 0]; in both budget modes, one group or nine
    for options in ({"token_budget": 0, "samples_per_row": 3}, {"token_budget": 100}):
        for sizes in ([9], [1] * 9):
            (rows,) = steps_of(planner(groups_of(sizes), num_processes=4, steps=1, **options))
            assert sorted(len(row.samples) for row in rows) == [2, 2, 2, 3], (options, sizes)


@pytest.mark.parametrize(("samples", "ranks"), [(5, 4), (206, 4), (4, 4), (7, 3)])
@pytest.mark.parametrize("mode", ["samples", "tokens"])
def test_every_sample_exactly_once(samples, ranks, mode):
    # case 24 (OpenRLHF#1296, miles#1356)
    options = {"token_budget": 0, "samples_per_row": 60} if mode == "samples" else {"token_budget": 2000}
    planned = steps_of(planner(groups_of([samples]), num_processes=ranks, steps=1, **options))
    assert sorted(u for rows in planned for row in uids(rows) for u in row) == list(range(samples))
    assert all(row.samples for rows in planned for row in rows)


def test_filler_when_a_rank_has_no_sample():
    # case 23: an untrained, unscored, independent copy of the step's shortest sample
    stream = [*group(0, [9, 6, 8])]
    plan = planner(stream, num_processes=4, steps=1)
    (rows,) = steps_of(plan)
    assert sorted(uids(rows)) == [[-1], [0], [1], [2]]
    (filler,) = [s for row in rows for s in row.samples if s["uid"] == -1]
    np.testing.assert_array_equal(filler["input_ids"], stream[1]["input_ids"])
    assert not np.shares_memory(filler["input_ids"], stream[1]["input_ids"])
    assert plan.metrics["batch/filler_rows_total"] == [1.0]


def test_rows_per_group_vary_and_groups_stay_whole():
    # case 25 (SkyRL#1529): forks give a rollout several rows
    stream = groups_of([7, 1, 3, 12, 2, 5])
    planned = steps_of(planner(stream, num_processes=2, steps=1, token_budget=60))
    assert len(planned) > 1
    where = {s["group_id"]: i for i, rows in enumerate(planned) for row in rows for s in row.samples}
    for i, rows in enumerate(planned):
        for row in rows:
            assert all(where[s["group_id"]] == i for s in row.samples)


def test_first_sample_oversize():
    # case 21 (TRL#6092): dropped with its whole group and counted, and the next group trains
    dropped = []
    plan = planner(
        [*group(0, [100, 8]), *group(1, [8, 8, 8, 8], first_uid=2)],
        on_dropped=lambda samples, reason: dropped.append((reason, [s["uid"] for s in samples])),
    )
    (rows,) = steps_of(plan)
    assert sorted(u for row in uids(rows) for u in row) == [2, 3, 4, 5]
    assert dropped == [("oversize", [0, 1])]
    assert plan.metrics["batch/dropped_oversize_total"] == [2.0]


def test_every_sample_oversize_ends():
    # case 21 (TRL#6218): no empty row, no endless wait
    plan = planner([*group(0, [100, 90]), *group(1, [99], first_uid=2)])
    assert list(plan) == []
    assert sum(plan.metrics["batch/dropped_oversize_total"]) == 3


def test_oversize_refused():
    with pytest.raises(ValueError, match=r"input_ids must be at most token_budget \(64\) tokens long, got 100 .*uid 0"):
        list(planner(group(0, [100]), oversize="raise"))


def test_group_that_never_fits_is_dropped_without_closing_the_step():
    dropped = []
    stream = [*groups_of([2, 2]), *group(2, [60] * 9, first_uid=4), *group(3, [8, 8], first_uid=13)]
    plan = planner(stream, on_dropped=lambda samples, reason: dropped.append((reason, samples[0]["group_id"])))
    (rows,) = steps_of(plan)
    assert dropped == [("group_too_large", 2)]
    assert sorted(u for row in uids(rows) for u in row) == [0, 1, 2, 3, 13, 14]
    assert plan.metrics["batch/dropped_group_too_large_total"] == [9.0]


def test_longest_first_saves_a_group_that_arrival_order_does_not_fit():
    lengths = [4, 4, 6, 6]  # 4 + 4 on one row leaves no room for both sixes
    stream = [sample(i, 0, 4, np.arange(n) + 100 * i) for i, n in enumerate(lengths)]
    (rows,) = steps_of(planner(stream, num_processes=2, steps=1, token_budget=10))
    assert sorted(row.num_tokens for row in rows) == [10, 10]


def test_surplus_opens_the_next_step_in_order():
    # case 30
    planned = steps_of(planner(groups_of([2] * 7), num_processes=1, steps=1, token_budget=0, samples_per_row=4))
    assert [[s["group_id"] for s in rows[0].samples] for rows in planned] == [
        [0, 0, 1, 1],
        [2, 2, 3, 3],
        [4, 4, 5, 5],
        [6, 6],
    ]


def test_groups_per_step():
    planned = steps_of(planner(groups_of([4] * 5), groups_per_step=2))
    assert [sorted({s["group_id"] for row in rows for s in row.samples}) for rows in planned] == [[0, 1], [2, 3], [4]]


def test_groups_per_step_does_not_wait_for_the_next_group():
    def source():
        yield from groups_of([4])
        raise AssertionError("pulled past a complete step")

    assert next(iter(planner(source(), groups_per_step=1)))


def test_stall_emits_once_every_row_can_have_a_sample():
    events = []

    def source():
        samples = groups_of([1, 2, 1])
        for i, s in enumerate([samples[0], None, samples[1], samples[2], None, samples[3], None]):
            events.append(i)
            yield s

    batches = iter(planner(source(), num_processes=3, steps=1, token_budget=1000))
    assert sorted(uids(next(batches))) == [[0], [1], [2]]
    assert events[-1] == 4  # at the second None: one sample was too few at the first
    assert sorted(uids(next(batches))) == [[-1], [-1], [3]]  # the rest at the end of the source
    assert next(batches, None) is None


def test_same_group_id_again_opens_the_next_step():
    stream = [*group(0, [8, 8]), *group(0, [8, 8], first_uid=2)]
    assert [sorted(u for row in uids(rows) for u in row if u >= 0) for rows in steps_of(planner(stream))] == [
        [0, 1],
        [2, 3],
    ]


def test_rollouts_become_ints_and_the_source_is_left_alone():
    stream = [sample(i, 0, 3, [1, 2, i], rollout_id=r) for i, r in enumerate(["b", "a", "b"])]
    (rows,) = steps_of(planner(stream, num_processes=1, steps=1))
    assert [s["rollout_id"] for s in rows[0].samples] == [0, 1, 0]
    assert [s["rollout_id"] for s in stream] == ["b", "a", "b"]
    assert "truncated" not in stream[0]


@pytest.mark.parametrize(
    ("stop_token_ids", "finished", "truncated"),
    [
        ([9], None, False),
        ([8], None, True),
        ([8], True, True),
        (None, None, False),
        (None, True, False),
        (None, False, True),
    ],
)
def test_truncated(stop_token_ids, finished, truncated):
    more = {} if finished is None else {"finished": finished}
    stream = [sample(0, 0, 1, [1, 2, 9], **more)]
    ((row,),) = steps_of(planner(stream, num_processes=1, steps=1, stop_token_ids=stop_token_ids))
    assert row.samples[0]["truncated"] is truncated


class Reference(TrainerScorer):
    def __init__(self, name, extras):
        self.name, self.extras, self.calls = name, extras, []

    def group_extras(self, samples):
        self.calls.append([s["uid"] for s in samples])
        return [{"input_ids": np.array([7, i])} for i in range(self.extras)]

    def collate(self, rows, index):
        raise NotImplementedError

    def features(self, trainer, inputs):
        raise NotImplementedError

    def group_rewards(self, sample_features, extra_features):
        raise NotImplementedError


def test_group_extras_once_a_group_on_the_row_of_its_lowest_uid():
    scorers = [Reference("none", 0), Reference("two", 2), Reference("one", 1)]
    # group 1 fits only a second step, and is placed twice: its extras must be asked for once
    stream = [*group(0, [30, 30, 30]), *group(1, [30, 30, 30], first_uid=3)]
    planned = steps_of(planner(stream, num_processes=2, steps=1, token_budget=60, scorers=scorers))
    assert [scorer.calls for scorer in scorers] == [[[0, 1, 2], [3, 4, 5]]] * 3
    for rows, lowest in zip(planned, (0, 3), strict=True):
        holders = [row for row in rows if row.extras]
        assert [lowest in [s["uid"] for s in row.samples] for row in holders] == [True]
        assert [(scorer, uid) for scorer, _, uid, _ in holders[0].extras] == [(1, -2), (1, -3), (2, -4)]
        assert {group_id for _, group_id, _, _ in holders[0].extras} == {lowest // 3}


def test_reward_names_are_those_of_the_step_on_every_row():
    stream = [sample(0, 0, 1, [1, 2], rewards={"b": 1.0}), sample(1, 1, 1, [3, 4], rewards={"a": 2.0})]
    (rows,) = steps_of(planner(stream, num_processes=3, steps=1))
    assert [row.reward_names for row in rows] == [("a", "b")] * 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_processes": 0}, "num_processes must be at least 1, got 0"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"groups_per_step": 0}, "groups_per_step must be at least 1, got 0"),
        ({"token_budget": 0}, "samples_per_row must be at least 1 where token_budget is <= 0, got 0"),
        ({"placement": "random"}, "placement must be one of \\('least_loaded', 'balanced'\\), got 'random'"),
        ({"token_cost": -1.0}, "token_cost must be finite and at least 0, got -1.0"),
        ({"oversize": "keep"}, "oversize must be 'drop' or 'raise', got 'keep'"),
        ({"scorers": [Reference("x", 0), Reference("x", 0)]}, "scorers must have distinct names"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        planner([], **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"uid": -1}, "uid must be at least 0, got -1"),
        ({"input_ids": np.zeros((1, 2), int)}, "input_ids must be a non-empty 1-D array"),
        ({"completion_mask": np.ones(3)}, r"completion_mask must have the shape \(2,\) of input_ids, got \(3,\)"),
        ({"old_log_probs": np.array([0.0, np.nan])}, "old_log_probs must be finite on trained tokens"),  # TRL#6868
        ({"rewards": {"x": float("inf")}}, "rewards must be finite floats or NaN, got x inf"),
        ({"rewards": {"x": None}}, "rewards must be finite floats or NaN, got x None"),
    ],
)
def test_bad_samples(change, message):
    with pytest.raises(ValueError, match=message):
        list(planner([{**sample(5, 0, 1, [1, 2]), **change}]))


def test_missing_key():
    broken = sample(5, 0, 1, [1, 2])
    del broken["rewards"]
    with pytest.raises(ValueError, match="sample uid 5 lacks \\['rewards'\\]"):
        list(planner([broken]))


@pytest.mark.parametrize("then", [[], [None], groups_of([1])])
def test_incomplete_group(then):
    first = [{**s, "group_id": 9} for s in groups_of([3])[:2]]
    with pytest.raises(ValueError, match="in a run of group_size, got 2 of 3 samples of group 9"):
        list(planner([*first, *then]))


def test_scorer_name_taken_by_a_column():
    with pytest.raises(ValueError, match=r"name of a reward column .*\['reward'\]"):
        list(planner(groups_of([2]), scorers=[Reference("reward", 0)]))


def test_check_step_capacity():
    check_step_capacity(8, 2, 2, 0, 2)
    check_step_capacity(400, 2, 2, 100, 1)
    with pytest.raises(ValueError, match="group_rows must be at most 8 .*got 9"):
        check_step_capacity(9, 2, 2, 0, 2)
    with pytest.raises(ValueError, match="group_rows must be at most 400 .*got 401"):
        check_step_capacity(401, 2, 2, 100, 1)
