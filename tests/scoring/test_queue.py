"""GroupedQueue: whole groups in order of completion; shrinks, staleness, drops, waits and refusals, case by case."""

import multiprocessing
import queue
import threading
import time
from types import SimpleNamespace

import pytest

from support.queue_rows import Row, rows_of, uids
from treepack import GroupedQueue, GroupProgress, GroupShrunk


def filled(*items, maxsize=0):
    inner = queue.Queue(maxsize)
    for item in items:
        inner.put_nowait(item)
    return inner


def drained(grouped):
    out = []
    while not grouped.empty():
        out.append(grouped.get_nowait())
    return out


def test_groups_leave_whole_in_order_of_completion():
    a, b, c = rows_of(0, 3), rows_of(1, 2), rows_of(2, 1)
    grouped = GroupedQueue(filled(a[0], b[0], a[1], c[0], b[1], a[2]))
    assert uids(drained(grouped)) == uids(c + b + a)
    assert grouped.dropped == {}


def test_a_complete_group_holds_the_inner_queue_back():
    # case 30 (slime#2238)
    inner = filled(*rows_of(0, 2), *rows_of(1, 2), *rows_of(2, 2))
    grouped = GroupedQueue(inner)
    assert grouped.get_nowait().group_id == 0
    assert inner.qsize() == 4, "the surplus stays where the producer is held back by it"
    assert grouped.get_nowait().group_id == 0
    assert inner.qsize() == 4
    assert grouped.get_nowait().group_id == 1
    assert inner.qsize() == 2
    assert grouped.qsize() == 3
    assert uids(drained(grouped)) == [101, 200, 201]


def test_a_group_larger_than_the_inner_queue_completes():
    inner = queue.Queue(maxsize=2)
    rows = rows_of(0, 20)
    producer = threading.Thread(target=lambda: [inner.put(row) for row in rows])
    producer.start()
    grouped = GroupedQueue(inner)
    assert [grouped.get(timeout=30).uid for _ in rows] == uids(rows)
    producer.join()


def test_parts_that_trickle_in_do_not_outlast_the_timeout():
    inner, stop = queue.Queue(), threading.Event()

    def trickle():
        for group_id in range(10**6):
            inner.put(rows_of(group_id, 2)[0])
            if stop.wait(0.001):
                return

    producer = threading.Thread(target=trickle)
    producer.start()
    grouped = GroupedQueue(inner)
    try:
        start = time.monotonic()
        with pytest.raises(queue.Empty):
            grouped.get(timeout=0.2)
        assert 0.2 <= time.monotonic() - start < 5
        assert grouped.groups_waiting > 1
        with pytest.raises(queue.Empty):
            grouped.get_nowait()
    finally:
        stop.set()
        producer.join()


def test_one_thread_does_not_keep_another_past_its_timeout():
    grouped = GroupedQueue(queue.Queue())

    def wait():
        with pytest.raises(queue.Empty):
            grouped.get(timeout=1.5)

    other = threading.Thread(target=wait)
    other.start()
    start = time.monotonic()
    with pytest.raises(queue.Empty):
        grouped.get(timeout=0.1)
    with pytest.raises(queue.Empty):
        grouped.get_nowait()
    assert grouped.empty()
    assert grouped.qsize() == 0
    assert time.monotonic() - start < 1.2
    other.join()


@pytest.mark.parametrize("announced", [0, 2, 4])
def test_a_shrunken_group_is_released_at_its_new_size(announced):
    """Announced before, between and after the rows that come: case 27 (TRL#7176)."""
    rows = rows_of(0, 8)[:4]
    grouped = GroupedQueue(filled(*rows[:announced], GroupShrunk(0, 4), *rows[announced:]))
    out = drained(grouped)
    assert uids(out) == uids(rows)
    assert [row.group_size for row in out] == [4] * 4
    assert grouped.dropped == {}


def test_a_group_may_shrink_again():
    grouped = GroupedQueue(filled(GroupShrunk(0, 5), *rows_of(0, 8)[:3], GroupShrunk(0, 3)))
    assert len(drained(grouped)) == 3


@pytest.mark.parametrize("rows", [rows_of(0, 4)[:1], rows_of(0, 4, rollouts=[7, 7, 7, 8])[:3]])
def test_one_survivor_is_dropped(rows):
    """A rollout may have several rows (forks): it is rollouts that must survive. Cases 27 and 28 (TRL#5320)."""
    progress = GroupProgress()
    grouped = GroupedQueue(filled(*rows, GroupShrunk(0, len(rows))), progress=progress)
    assert grouped.empty()
    assert grouped.dropped == {"shrunk": len(rows)}
    assert progress.num_dropped == {"shrunk": 1}
    assert progress.watermark == 1
    assert grouped.groups_waiting == 0


def test_no_survivor():
    progress = GroupProgress()
    grouped = GroupedQueue(filled(GroupShrunk(0, 0), *rows_of(1, 2)), progress=progress)
    assert len(drained(grouped)) == 2
    assert progress.num_dropped == {"shrunk": 1}


def test_a_group_of_one_row_from_the_start_is_no_shrunken_group():
    assert len(drained(GroupedQueue(filled(*rows_of(0, 1))))) == 1


def test_staleness_is_that_of_the_oldest_row():
    mixed = rows_of(0, 3, version=5)
    mixed[1].model_version = 4
    grouped = GroupedQueue(
        filled(*mixed, *rows_of(1, 2, version=5)), model_version=lambda: 8, max_staleness=3, progress=GroupProgress()
    )
    assert uids(drained(grouped)) == [100, 101]
    assert grouped.dropped == {"stale": 3}


def test_a_group_kept_stays_whole_when_the_version_advances_while_it_is_read():
    # case 26 (TRL#7206)
    version = 3
    grouped = GroupedQueue(filled(*rows_of(0, 3), *rows_of(1, 2)), model_version=lambda: version, max_staleness=3)
    assert grouped.get_nowait().uid == 0
    version = 9
    assert uids(drained(grouped)) == [1, 2]
    assert grouped.dropped == {"stale": 2}


def test_a_group_that_goes_stale_while_it_comes_in_goes_whole():
    # case 26 (TRL#7206)
    version = 3
    inner = filled(*rows_of(0, 4)[:2], *rows_of(1, 2, version=3))
    progress = GroupProgress()
    grouped = GroupedQueue(inner, model_version=lambda: version, max_staleness=3, progress=progress)
    assert uids(drained(grouped)) == [100, 101]
    assert grouped.rows_waiting == 2
    version = 4
    inner.put(rows_of(2, 2, version=4)[0])
    assert grouped.empty()
    assert grouped.rows_waiting == 1, "the stale half is let go of before its rest comes"
    inner.put(rows_of(0, 4)[2])
    assert grouped.empty()
    assert grouped.dropped == {"stale": 2, "late": 1}
    assert progress.num_dropped == {"stale": 1}


def test_late_rows_are_counted():
    progress = GroupProgress(first_group=1)
    inner = filled(GroupShrunk(1, 2), *rows_of(1, 3), *rows_of(0, 2))
    grouped = GroupedQueue(inner, progress=progress)
    assert uids(drained(grouped)) == [100, 101]
    assert grouped.dropped == {"late": 3}  # one of the group already released, two of a group before the resume
    assert progress.num_dropped == {}
    assert grouped.groups_waiting == 0


def test_what_waits_is_bounded():
    progress = GroupProgress()
    grouped = GroupedQueue(
        filled(*(rows_of(group_id, 2)[0] for group_id in range(9)), rows_of(7, 2)[1]),
        progress=progress,
        max_waiting_groups=4,
    )
    assert uids(drained(grouped)) == [700, 701]
    assert grouped.groups_waiting == 3
    assert grouped.dropped == {"incomplete": 5}
    assert progress.watermark == 5


def test_metrics_are_gauges_and_counts_since_the_last_call():
    grouped = GroupedQueue(filled(*rows_of(0, 3)[:2], GroupShrunk(1, 1), *rows_of(1, 1)))
    assert grouped.empty()
    waiting = {"batch/groups_waiting": 1.0, "batch/rows_waiting": 2.0}
    assert grouped.pop_metrics() == {**waiting, "batch/dropped_shrunk_total": 1.0}
    assert grouped.pop_metrics() == waiting
    assert grouped.dropped == {"shrunk": 1}


@pytest.mark.parametrize("timeout", [0, 0.05, None])
def test_a_dead_producer_is_noticed_within_one_poll(timeout):
    # case 29 (RL#3488)
    def check_health():
        raise RuntimeError("the rollout worker has died")

    grouped = GroupedQueue(filled(*rows_of(0, 2), rows_of(1, 2)[0]), check_health=check_health)
    assert uids([grouped.get(timeout), grouped.get(timeout)]) == [0, 1], "what came before still counts"
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="the rollout worker has died"):
        grouped.get(timeout)
    assert time.monotonic() - start < 5


def test_waits_reach_progress(monkeypatch):
    calls = []
    progress = GroupProgress()
    monkeypatch.setattr(progress, "waiting", lambda: calls.append("waiting"))
    monkeypatch.setattr(progress, "arrived", lambda: calls.append("arrived"))
    grouped = GroupedQueue(filled(*rows_of(0, 1)), progress=progress)
    grouped.get_nowait()
    with pytest.raises(queue.Empty):
        grouped.get_nowait()
    assert calls == ["arrived", "waiting"]


def test_progress_follows_a_group():
    progress = GroupProgress()
    inner = filled(*rows_of(0, 2), rows_of(1, 2)[0])
    grouped = GroupedQueue(inner, progress=progress)
    grouped.get_nowait()
    assert (progress.count("in_flight"), progress.count("complete")) == (0, 1)
    grouped.get_nowait()
    assert grouped.empty()
    assert (progress.count("in_flight"), progress.count("complete")) == (1, 1)
    assert progress.watermark == 0


def test_a_multiprocessing_queue():
    """Rows and announcements are pickled on their way, and come through a pipe."""
    inner = multiprocessing.get_context("spawn").Queue(maxsize=2)

    def produce():
        for item in (*rows_of(0, 3), *rows_of(1, 4)[:3], GroupShrunk(1, 3), GroupShrunk(2, 0)):
            inner.put(item)

    producer = threading.Thread(target=produce)
    producer.start()
    grouped = GroupedQueue(inner)
    assert [grouped.get(timeout=60).uid for _ in range(6)] == [0, 1, 2, 100, 101, 102]
    producer.join()
    with pytest.raises(queue.Empty):
        grouped.get(timeout=0.05)
    inner.close()


def test_several_producers_and_consumers():
    inner = queue.Queue(maxsize=5)
    grouped = GroupedQueue(inner)
    groups = {group_id: 1 + group_id % 4 for group_id in range(60)}
    got = [[] for _ in range(3)]

    def produce(part):
        for group_id in list(groups)[part::2]:
            for row in rows_of(group_id, groups[group_id]):
                inner.put(row)

    def consume(mine):
        while True:
            try:
                mine.append(grouped.get(timeout=1.0))
            except queue.Empty:
                return

    threads = [threading.Thread(target=produce, args=(part,)) for part in range(2)]
    threads += [threading.Thread(target=consume, args=(mine,)) for mine in got]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [row.uid for group_id, size in groups.items() for row in rows_of(group_id, size)]
    assert sorted(row.uid for mine in got for row in mine) == expected


@pytest.mark.parametrize(
    ("items", "error", "message"),
    [
        ([*rows_of(0, 3)[:1], Row(0, 5, 0, 2)], ValueError, "uid must be unique, got 0 again in group 5"),
        ([Row(0, 0, 0, 1), Row(0, 0, 0, 1)], ValueError, "uid must be unique, got 0 again in group 0"),
        (
            [Row(0, 0, 0, 3), Row(1, 0, 1, 2)],
            ValueError,
            "group_size must be the same in all .* got 2 in uid 1 after 3",
        ),
        ([Row(-1, 0, 0, 3)], ValueError, "uid must be at least 0, got -1"),
        ([Row(4, -2, 0, 3)], ValueError, "group_id must be at least 0, got -2 in uid 4"),
        ([Row(0, 0, 0, 0)], ValueError, "group_size must be at least 1, got 0 in uid 0 of group 0"),
        ([SimpleNamespace(uid=3, group_id=1)], TypeError, "rows with uid, .* got SimpleNamespace: .*group_size"),
        ([*rows_of(0, 5)[:3], GroupShrunk(0, 2)], ValueError, r"must be within 3 .* and 5, got 2 for group 0"),
        ([*rows_of(0, 5)[:3], GroupShrunk(0, 6)], ValueError, r"must be within 3 .* and 5, got 6 for group 0"),
        ([GroupShrunk(0, -1)], ValueError, r"must be within 0 .* got -1 for group 0"),
    ],
)
def test_what_is_refused_harms_nothing_else(items, error, message):
    inner = filled(*items)
    grouped = GroupedQueue(inner)
    with pytest.raises(error, match=message):
        drained(grouped)
    for row in rows_of(8, 2):
        inner.put(row)
    assert uids(drained(grouped)) == [800, 801]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_staleness": -1, "model_version": lambda: 0}, "max_staleness must be at least 0, got -1"),
        ({"max_staleness": 2}, r"model_version must be given with max_staleness, got None \(max_staleness 2\)"),
        ({"max_waiting_groups": 0}, "max_waiting_groups must be at least 1, got 0"),
    ],
)
def test_refused_options(options, message):
    with pytest.raises(ValueError, match=message):
        GroupedQueue(queue.Queue(), **options)
