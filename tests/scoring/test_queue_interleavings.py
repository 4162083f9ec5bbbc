"""GroupedQueue: any interleaving of rows, shrinks, duplicates, versions and timeouts loses and duplicates nothing."""

import queue

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from support.queue_rows import Row, uids
from treepack import GroupedQueue, GroupProgress, GroupShrunk

MAX_STALENESS = 2


class Judgements(GroupProgress):
    """Notes at which policy version each group was released or dropped."""

    def __init__(self, machine):
        super().__init__()
        self.machine = machine
        self.released = []
        self.reasons = {}

    def completed(self, group_id):
        super().completed(group_id)
        assert self.machine.version - self.machine.put[group_id][0].model_version <= MAX_STALENESS
        self.released.append(group_id)

    def dropped(self, group_id, reason):
        super().dropped(group_id, reason)
        rows = self.machine.put[group_id]
        if reason == "stale":
            assert self.machine.version - rows[0].model_version > MAX_STALENESS
        else:
            assert reason == "shrunk"
            assert len({row.rollout_id for row in rows}) < 2
            assert len(rows) < self.machine.size[group_id]
        self.reasons[group_id] = reason


class Interleavings(RuleBasedStateMachine):
    """Groups of any size whose rows, shrinks, duplicates, gets and policy versions interleave in any way."""

    def __init__(self):
        super().__init__()
        self.version = 0
        self.inner = queue.Queue()
        self.progress = Judgements(self)
        self.grouped = GroupedQueue(
            self.inner, model_version=lambda: self.version, max_staleness=MAX_STALENESS, progress=self.progress
        )
        self.size = []  # of each group, as its rows declare it
        self.put = []  # each group's rows so far
        self.to_come = []  # the rollouts of each group's rows that are still to come
        self.got = []
        self.duplicates = 0
        self.num_rows = 0

    @rule(size=st.integers(1, 4), rollouts=st.integers(1, 4))
    def new_group(self, size, rollouts):
        self.size.append(size)
        self.put.append([])
        self.to_come.append([i % rollouts for i in range(size)])

    def _unfinished(self, data):
        return data.draw(st.sampled_from([group_id for group_id, rest in enumerate(self.to_come) if rest]))

    @precondition(lambda self: any(self.to_come))
    @rule(data=st.data(), count=st.integers(1, 4))
    def put_rows(self, data, count):
        group_id = self._unfinished(data)
        for rollout in self.to_come[group_id][:count]:
            row = Row(self.num_rows, group_id, rollout, self.size[group_id], self.version)
            self.num_rows += 1
            self.put[group_id].append(row)
            self.inner.put(row)
        del self.to_come[group_id][:count]

    @precondition(lambda self: any(self.to_come))
    @rule(data=st.data(), count=st.integers(1, 4))
    def lose_rows(self, data, count):
        group_id = self._unfinished(data)
        del self.to_come[group_id][:count]
        self.inner.put(GroupShrunk(group_id, len(self.put[group_id]) + len(self.to_come[group_id])))

    @rule(by=st.integers(1, 2))
    def new_version(self, by):
        self.version += by

    @precondition(lambda self: self.num_rows > 0)
    @rule(data=st.data())
    def put_duplicate(self, data):
        uid = data.draw(st.integers(0, self.num_rows - 1))
        self.inner.put(Row(uid, data.draw(st.integers(0, len(self.size) - 1)), 0, 1, self.version))
        self.duplicates += 1

    @rule(timeout=st.sampled_from([None, 0.0, 0.001]), count=st.integers(1, 5))
    def get(self, timeout, count):
        for _ in range(count):
            try:
                self.got.append(self.grouped.get_nowait() if timeout is None else self.grouped.get(timeout))
            except queue.Empty:
                return
            except ValueError as error:
                self._refused(error)

    @rule()
    def look(self):
        try:
            if not self.grouped.empty():
                self.got.append(self.grouped.get_nowait())
        except ValueError as error:
            self._refused(error)

    def _refused(self, error):
        assert "uid must be unique" in str(error)
        self.duplicates -= 1

    @invariant()
    def what_was_got_are_whole_groups_in_order_of_release(self):
        expected = [row for group_id in self.progress.released for row in self.put[group_id]]
        assert uids(self.got) == uids(expected)[: len(self.got)]
        assert all(row.group_size == len(self.put[row.group_id]) for row in self.got)

    @invariant()
    def no_row_is_lost(self):
        """Every row put is on its way, was got, or was dropped and counted."""
        assert self.grouped.qsize() + len(self.got) + self.grouped.dropped.total() >= self.num_rows

    def teardown(self):
        while self.grouped.qsize() > self.grouped.rows_waiting:
            self.get(None, 5)
        self.what_was_got_are_whole_groups_in_order_of_release()
        assert self.duplicates == 0, "each duplicate was refused"
        assert self.num_rows == len(self.got) + self.grouped.dropped.total() + self.grouped.rows_waiting
        judged = {*self.progress.released, *self.progress.reasons}
        assert len(judged) == len(self.progress.released) + len(self.progress.reasons), "judged once"
        for group_id, rest in enumerate(self.to_come):
            if not rest:
                assert group_id in judged, "nothing waits for ever"
        late = self.grouped.dropped["late"]
        assert late == 0 or "stale" in self.progress.reasons.values()


Interleavings.TestCase.settings = settings(max_examples=200, stateful_step_count=40, deadline=None)
TestInterleavings = Interleavings.TestCase
