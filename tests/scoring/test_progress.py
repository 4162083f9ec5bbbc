"""GroupProgress: what a resume skips, under prefetch and out-of-order groups; the waiting line; IdRanges."""

import json
import time
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from treepack import GroupProgress
from treepack.scoring.progress import IdRanges


@given(st.lists(st.integers(-5, 30)))
def test_id_ranges_are_a_set(members):
    ranges = IdRanges()
    for member in members:
        ranges.add(member)
    assert [member for member in range(-7, 33) if member in ranges] == sorted(set(members))
    found = list(ranges)
    assert sorted(set(members)) == [member for start, stop in found for member in range(start, stop)]
    assert all(stop < start for (_, stop), (start, _) in pairwise(found)), "neighbouring ranges are one"
    assert list(IdRanges((member, member + 1) for member in members)) == found


def test_the_watermark_is_the_lowest_group_not_consumed():
    progress = GroupProgress()
    assert progress.watermark == 0
    progress.trained([1, 3, 4])
    assert progress.watermark == 0
    assert progress.consumed_past_watermark == [1, 3, 4]
    progress.dropped(0, "stale")
    assert progress.watermark == 2
    assert progress.consumed_past_watermark == [3, 4]
    assert [group for group in range(7) if progress.is_consumed(group)] == [0, 1, 3, 4]
    progress.trained([2])
    assert progress.watermark == 5
    assert progress.consumed_past_watermark == []
    assert progress.num_trained == 4
    assert progress.num_dropped == {"stale": 1}


def test_a_planned_group_is_not_consumed():
    progress = GroupProgress()
    progress.started(0)
    progress.completed(0)
    progress.planned([0])
    assert progress.watermark == 0
    assert not progress.is_consumed(0)
    assert progress.state_dict()["consumed_past_watermark"] == []


def prefetching_steps(groups, size):
    """Steps as the dispatcher hands them out: it takes step i + 1 before it yields step i."""
    groups = iter(groups)
    ahead = list(islice(groups, size))
    while ahead:
        current, ahead = ahead, list(islice(groups, size))
        yield current


@given(st.permutations(range(12)), st.integers(1, 4), st.integers(0, 5), st.sets(st.integers(0, 11)))
def test_a_resume_neither_skips_nor_repeats(order, size, steps_before, unlucky):
    """Groups finish in any order, some are dropped, step i + 1 is planned before i trains; then a crash."""
    consumed = []

    def arriving(progress, ids):
        for group in ids:
            progress.started(group)
            progress.completed(group)
            if group in unlucky:
                progress.dropped(group, "stale")
                consumed.append(group)
            else:
                progress.planned([group])
                yield group

    def train(progress, ids, max_steps):
        for step in islice(prefetching_steps(arriving(progress, ids), size), max_steps):
            progress.trained(step)
            consumed.extend(step)

    first = GroupProgress()
    train(first, order, steps_before)
    state = json.loads(json.dumps(first.state_dict()))
    resumed = GroupProgress()
    resumed.load_state_dict(state)
    assert resumed.watermark == first.watermark
    assert resumed.num_trained == first.num_trained
    again = [group for group in range(resumed.watermark, 12) if not resumed.is_consumed(group)]
    train(resumed, again, None)
    assert sorted(consumed) == list(range(12))
    assert resumed.watermark == 12
    assert resumed.num_trained + resumed.num_dropped.total() == 12


def test_the_state_stays_small():
    progress = GroupProgress()
    for group in range(10_000):
        progress.started(group)
        progress.completed(group)
        progress.planned([group])
        if group % 1000:
            progress.trained([group])
    assert len(json.dumps(progress.state_dict())) < 500
    assert progress.count("planned") == 10


def test_ids_go_on_from_the_first_group():
    progress = GroupProgress(first_group=100)
    assert progress.watermark == 100
    assert progress.is_consumed(99)
    assert not progress.is_consumed(100)
    progress.trained([100, 102])
    assert progress.watermark == 101
    assert progress.consumed_past_watermark == [102]


@pytest.mark.parametrize("how", ["trained", "dropped", "below"])
def test_a_group_is_consumed_once(how):
    progress = GroupProgress(first_group=1)
    group = 0 if how == "below" else 3
    if how == "trained":
        progress.trained([3])
    if how == "dropped":
        progress.dropped(3, "stale")
    with pytest.raises(ValueError, match=f"group_id must be of a group not consumed yet, got {group}"):
        progress.trained([group])
    with pytest.raises(ValueError, match=f"group_id must be of a group not consumed yet, got {group}"):
        progress.dropped(group, "stale")


def test_the_waiting_line(monkeypatch, caplog):
    now = 1000.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    progress = GroupProgress(waiting_line_s=40)
    for group in range(10):
        progress.started(group)
    for group in range(7):
        progress.completed(group)
    progress.planned([0, 1])
    progress.waiting()
    now += 39
    progress.waiting()
    assert caplog.messages == []
    now += 3
    progress.waiting()
    assert caplog.messages == ["waiting: 5/8 groups complete, 3 in flight, 42 s"]  # where logging is not set up, too
    now += 39
    progress.waiting()
    assert len(caplog.messages) == 1
    now += 1
    progress.waiting()
    assert caplog.messages[1:] == ["waiting: 5/8 groups complete, 3 in flight, 82 s"]
    progress.arrived()
    now += 39
    progress.waiting()  # a new wait begins
    now += 39
    progress.waiting()
    assert len(caplog.messages) == 2


def test_refusals():
    with pytest.raises(ValueError, match="first_group must be at least 0, got -1"):
        GroupProgress(first_group=-1)
    with pytest.raises(ValueError, match="waiting_line_s must be at least 0"):
        GroupProgress(waiting_line_s=-0.5)
    with pytest.raises(ValueError, match=r"state must have .* got none of \['consumed_past_watermark'"):
        GroupProgress().load_state_dict({"watermark": 3})
