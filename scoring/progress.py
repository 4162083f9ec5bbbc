"""GroupProgress: where each rollout group is between the worker and the optimizer, and what a resume must skip.

The dispatcher plans step N + 1 before step N trains, and groups finish out of order. So a group counts as consumed when
it is trained or dropped, never when it is merely planned, and single ids past the first gap are kept, not only a count.
"""

import logging
import threading
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal

logger = logging.getLogger(__name__)

Stage = Literal["in_flight", "complete", "planned"]


class IdRanges:
    """A set of integers kept as disjoint ranges: its size is that of the gaps, whatever the number of members.

    Args:
        ranges: (start, stop) pairs, stop excluded.
    """

    def __init__(self, ranges: Iterable[tuple[int, int]] = ()) -> None:
        self._starts: list[int] = []
        self._stops: list[int] = []
        for start, stop in sorted(ranges):
            if self._stops and start <= self._stops[-1]:
                self._stops[-1] = max(stop, self._stops[-1])
            elif start < stop:
                self._starts.append(start)
                self._stops.append(stop)

    def __contains__(self, member: int) -> bool:
        at = bisect_right(self._starts, member) - 1
        return at >= 0 and member < self._stops[at]

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """The (start, stop) ranges, rising."""
        return zip(list(self._starts), list(self._stops))

    def add(self, member: int) -> None:
        """Add one integer."""
        if member in self:
            return
        at = bisect_right(self._starts, member)
        joins_left = at > 0 and self._stops[at - 1] == member
        joins_right = at < len(self._starts) and self._starts[at] == member + 1
        if joins_left and joins_right:
            self._stops[at - 1] = self._stops.pop(at)
            del self._starts[at]
        elif joins_left:
            self._stops[at - 1] = member + 1
        elif joins_right:
            self._starts[at] = member
        else:
            self._starts.insert(at, member)
            self._stops.insert(at, member + 1)


class GroupProgress:
    """Follows groups by id: in flight (some rows are here), complete, planned; then consumed: trained or dropped.

    `GroupedQueue` reports the first two and its own drops, the planner what it plans and drops, the trainer what the
    optimizer has stepped on. A group need not pass through every stage. Memory: one entry for each group on its way,
    one range for each gap in the consumed ids. Thread-safe.

    Args:
        first_group: the lowest group id of the stream. Ids are integers that go on across resumes.
        waiting_line_s: how long the trainer waits for a group before the first waiting line, and between two of them,
            in seconds.

    Attributes:
        num_trained: groups trained so far, over all resumes.
        num_dropped: groups dropped so far by reason, over all resumes.

    Raises:
        ValueError: `first_group` or `waiting_line_s` is negative.
    """

    def __init__(self, *, first_group: int = 0, waiting_line_s: float = 30.0) -> None:
        for name, value in (("first_group", first_group), ("waiting_line_s", waiting_line_s)):
            if value < 0:
                raise ValueError(f"{name} must be at least 0, got {value}")
        self.num_trained = 0
        self.num_dropped: Counter[str] = Counter()
        self._first_group = first_group
        self._consumed = IdRanges()
        self._stage: dict[int, Stage] = {}
        self._waiting_line_s = waiting_line_s
        self._waiting_since: float | None = None
        self._next_line_s = waiting_line_s
        self._lock = threading.Lock()

    @property
    def watermark(self) -> int:
        """The lowest group id not consumed yet: all below it are."""
        with self._lock:
            return self._watermark()

    @property
    def consumed_past_watermark(self) -> list[int]:
        """The consumed group ids above the watermark, rising: what a resume from the watermark must skip."""
        with self._lock:
            watermark = self._watermark()
            return [member for start, stop in self._consumed if start > watermark for member in range(start, stop)]

    def is_consumed(self, group_id: int) -> bool:
        """Whether the group was trained or dropped, before or after a resume; ids below `first_group` count."""
        with self._lock:
            return self._is_consumed(group_id)

    def count(self, stage: Stage) -> int:
        """How many groups are at a stage now."""
        with self._lock:
            return sum(1 for at in self._stage.values() if at == stage)

    def started(self, group_id: int) -> None:
        """The group's first row is here."""
        self._move([group_id], "in_flight")

    def completed(self, group_id: int) -> None:
        """All rows of the group are here."""
        self._move([group_id], "complete")

    def planned(self, group_ids: Iterable[int]) -> None:
        """The groups are in a planned optimizer step. A resume still produces them again."""
        self._move(group_ids, "planned")

    def trained(self, group_ids: Iterable[int]) -> None:
        """The optimizer has stepped on the groups, whether or not their samples had a gradient.

        Args:
            group_ids: each group once or more, so `StepScores.groups` will do.

        Raises:
            ValueError: a group was trained or dropped before.
        """
        with self._lock:
            for group_id in sorted({int(group_id) for group_id in group_ids}):
                self._consume(group_id)
                self.num_trained += 1

    def dropped(self, group_id: int, reason: str) -> None:
        """The group will never be trained.

        Raises:
            ValueError: the group was trained or dropped before.
        """
        with self._lock:
            self._consume(group_id)
            self.num_dropped[reason] += 1

    def waiting(self) -> None:
        """The trainer has looked for a row and found none; once the wait is long, log a line about it.

        "waiting: 5/8 groups complete, 3 in flight, 42 s": of 8 groups on their way 5 have all their rows and are not
        planned yet.
        """
        now = time.monotonic()
        with self._lock:
            if self._waiting_since is None:
                self._waiting_since = now
            waited_s = now - self._waiting_since
            if waited_s < self._next_line_s:
                return
            self._next_line_s = waited_s + self._waiting_line_s
            stages = Counter(self._stage.values())
        complete, in_flight = stages["complete"], stages["in_flight"]
        logger.warning(  # shown by default, and as it stands where logging is not set up
            "waiting: %d/%d groups complete, %d in flight, %.0f s", complete, complete + in_flight, in_flight, waited_s
        )

    def arrived(self) -> None:
        """The trainer got a row: a wait is over."""
        with self._lock:
            self._waiting_since = None
            self._next_line_s = self._waiting_line_s

    def state_dict(self) -> dict[str, Any]:
        """What a resume needs, as plain JSON values.

        Groups on their way are left out: after a resume they come again.
        """
        with self._lock:
            return {
                "watermark": self._watermark(),
                "consumed_past_watermark": [
                    [start, stop] for start, stop in self._consumed if start > self._watermark()
                ],
                "num_trained": self.num_trained,
                "num_dropped": dict(self.num_dropped),
            }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`'s result; `first_group` and what was followed so far are forgotten.

        Raises:
            ValueError: a key is missing.
        """
        keys = ("watermark", "consumed_past_watermark", "num_trained", "num_dropped")
        if missing := [key for key in keys if key not in state]:
            raise ValueError(f"state must have {', '.join(keys)}, got none of {missing}")
        with self._lock:
            self._first_group = int(state["watermark"])
            self._consumed = IdRanges((int(start), int(stop)) for start, stop in state["consumed_past_watermark"])
            self.num_trained = int(state["num_trained"])
            self.num_dropped = Counter(state["num_dropped"])
            self._stage.clear()

    def _watermark(self) -> int:
        first = next(iter(self._consumed), None)
        return first[1] if first is not None and first[0] <= self._first_group else self._first_group

    def _is_consumed(self, group_id: int) -> bool:
        return group_id < self._first_group or group_id in self._consumed

    def _move(self, group_ids: Iterable[int], stage: Stage) -> None:
        with self._lock:
            for group_id in group_ids:
                if not self._is_consumed(group_id):
                    self._stage[int(group_id)] = stage

    def _consume(self, group_id: int) -> None:
        if self._is_consumed(group_id):
            raise ValueError(f"group_id must be of a group not consumed yet, got {group_id}")
        self._stage.pop(int(group_id), None)
        self._consumed.add(int(group_id))
