"""GroupProgress told by the planner and the collator, under a dispatcher that is one micro-batch ahead."""

import json
from collections import Counter
from itertools import islice

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from support.samples import group, groups_of
from treepack import GroupProgress, ScoringCollator, StepPlanner, score_step
from treepack.scoring.trainer import LocalTrainer

STEPS, RANKS, BUDGET = 2, 2, 40


def prefetching(items):
    """Like accelerate's DataLoaderDispatcher: item i + 1 is made before item i is handed out."""
    items = iter(items)
    for ahead in islice(items, 1):
        for following in items:
            yield ahead
            ahead = following
        yield ahead


def train(progress, groups, *, max_steps, trained):
    """A training run over `groups` that are not consumed yet, cut off after `max_steps` optimizer steps."""
    source = (s for g in groups if not progress.is_consumed(g[0]["group_id"]) for s in g)
    planner = StepPlanner(
        source,
        num_processes=RANKS,
        steps=STEPS,
        token_budget=BUDGET,
        samples_per_row=0,
        scorers=[],
        metrics={},
        progress=progress,
    )
    collate = ScoringCollator(0, RANKS, token_budget=BUDGET)
    batches = prefetching(collate([rows]) for rows in planner)
    for _ in range(max_steps):
        if not (step := list(islice(batches, STEPS))):
            break
        scores = score_step(LocalTrainer(torch.nn.Identity(), []), step)
        trained.update(set(scores.groups.tolist()))
        progress.trained(scores.groups)


@given(
    lengths=st.lists(st.lists(st.integers(4, 48), min_size=2, max_size=5), min_size=1, max_size=7),
    crashes=st.lists(st.integers(0, 3), max_size=3),
)
@settings(max_examples=40)
def test_a_resume_neither_skips_nor_repeats(lengths, crashes):
    groups = [group(i, of_group, first_uid=100 * i) for i, of_group in enumerate(lengths)]
    trained, progress = Counter(), GroupProgress()
    for max_steps in [*crashes, len(groups)]:
        train(progress, groups, max_steps=max_steps, trained=trained)
        state = json.loads(json.dumps(progress.state_dict()))
        progress = GroupProgress()
        progress.load_state_dict(state)
    assert set(trained.values()) <= {1}
    assert progress.num_trained == len(trained)
    assert progress.num_trained + progress.num_dropped.total() == len(groups)
    assert set(progress.num_dropped) <= {"oversize", "group_too_large"}
    assert progress.watermark == len(groups)
    oversize = {i for i, of_group in enumerate(lengths) if max(of_group) > BUDGET}
    assert progress.num_dropped["oversize"] == len(oversize)
    assert not oversize & set(trained)


def test_what_is_planned_ahead_is_not_consumed():
    groups = [group(i, [20] * 5, first_uid=5 * i) for i in range(4)]
    progress, trained = GroupProgress(), Counter()
    train(progress, groups, max_steps=1, trained=trained)
    assert set(trained) == {0}
    assert progress.watermark == 1
    assert progress.count("planned") == 1  # the dispatcher's


def test_the_collator_tells_for_other_planners():
    planner = StepPlanner(
        groups_of([3, 3]), num_processes=1, steps=1, token_budget=100, samples_per_row=0, scorers=[], metrics={}
    )
    progress = GroupProgress()
    ScoringCollator(0, progress=progress)([next(iter(planner))])
    assert progress.count("planned") == 2
    assert progress.watermark == 0
