"""GroupedQueue: the rollout queue seen as whole groups."""

import logging
import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from treepack.scoring.progress import GroupProgress, IdRanges

logger = logging.getLogger(__name__)

POLL_S = 1.0
"""The longest the queue waits between two looks at the producer's health, in seconds."""


class QueueRow(Protocol):
    """What `GroupedQueue` reads of a row; TRL's `RolloutSample` with the fields that scoring adds.

    Attributes:
        uid: int >= 0, unique.
        group_id: int >= 0.
        rollout_id: the conversation the row belongs to; forks give one several rows.
        group_size: rows of the whole group. Set to the new size when the group was announced as shrunken.
        model_version: the policy version the row was generated with.
    """

    uid: int
    group_id: int
    rollout_id: Any
    group_size: int
    model_version: int


class RowSource(Protocol):
    """The part of `queue.Queue` and `multiprocessing.Queue` that `GroupedQueue` uses."""

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """See `queue.Queue.get`."""

    def qsize(self) -> int:
        """See `queue.Queue.qsize`."""


@dataclass(frozen=True)
class GroupShrunk:
    """Put on the inner queue by a producer: a group will not have as many rows as its `group_size` says.

    Generations fail or are cancelled, and rollouts without a trained token give no row. May come before, between or
    after the group's rows.

    Attributes:
        group_id: the group.
        group_size: the rows it will have, those that have come included; 0 where none is left.
    """

    group_id: int
    group_size: int


@dataclass
class _Group:
    """The rows of a group that are here, and how many it will have (None until a row or `GroupShrunk` says so)."""

    size: int | None = None
    shrunken: bool = False
    rows: list[QueueRow] = field(default_factory=list)

    @property
    def version(self) -> int:
        """The policy version of the oldest row."""
        return min(row.model_version for row in self.rows)


class GroupedQueue:
    """A view of the rollout queue that releases each group's rows together.

    Rows may come in any interleaving; groups leave in the order in which they complete, each as a run of `group_size`
    rows. `inner` is drained only while no complete group is at hand: a group larger than the inner queue's maxsize
    still completes, and a full queue still holds its producer back. All methods are thread-safe; with several consumers
    the rows of a group may go to different ones.

    What is dropped is counted by reason, in rows (`dropped`), logged, and reported to `progress`:
      - "stale": when the group completes, its oldest row is more than `max_staleness` policy versions old. Judged
        once: a group kept stays whole, also when the version advances while it is being read. An incomplete group
        that is already too old goes at once (rows of it that still come are late).
      - "shrunk": rows of fewer than two rollouts are left of a group that was announced as shrunken: no signal.
      - "incomplete": the longest-waiting group, when more than `max_waiting_groups` wait for rows that were lost.
      - "late": a row of a group that was released or dropped before, or that `progress` knows as consumed.

    Args:
        inner: a `queue.Queue` or multiprocessing queue of `QueueRow`s and `GroupShrunk`s.
        model_version: gives the trainer's current policy version; needed where `max_staleness` is given.
        max_staleness: policy versions by which a group may lag; None keeps every group.
        check_health: called without arguments at least every second of a wait, and whenever there is nothing to get;
            raises when the producer is dead. Its error leaves `get`.
        progress: told of groups in flight, complete and dropped, and asked which were consumed before a resume. Long
            waits log a line through it.
        max_waiting_groups: groups that may wait incomplete, which bounds memory.

    Attributes:
        dropped: rows dropped so far by reason.

    Raises:
        ValueError: `max_staleness` is negative or lacks `model_version`; `max_waiting_groups` is below 1.

    Source: `core.trainers.async_grpo.scoring.GroupedQueue` (axolotl).
    """

    def __init__(
        self,
        inner: RowSource,
        *,
        model_version: Callable[[], int] | None = None,
        max_staleness: int | None = None,
        check_health: Callable[[], object] | None = None,
        progress: GroupProgress | None = None,
        max_waiting_groups: int = 1024,
    ) -> None:
        if max_staleness is not None and max_staleness < 0:
            raise ValueError(f"max_staleness must be at least 0, got {max_staleness}")
        if max_staleness is not None and model_version is None:
            raise ValueError(
                f"model_version must be given with max_staleness, got None (max_staleness {max_staleness})"
            )
        if max_waiting_groups < 1:
            raise ValueError(f"max_waiting_groups must be at least 1, got {max_waiting_groups}")
        self.dropped: Counter[str] = Counter()
        self._inner = inner
        self._model_version = model_version
        self._max_staleness = max_staleness
        self._check_health = check_health
        self._progress = progress
        self._max_waiting_groups = max_waiting_groups
        self._waiting: dict[int, _Group] = {}  # by arrival of their first row
        self._ready: deque[QueueRow] = deque()  # what is left of the one complete group
        self._closed = IdRanges()  # groups released or dropped
        self._uids = IdRanges()
        self._evicted_at: int | None = None  # the policy version at which stale waiting groups were last looked for
        self._reported: Counter[str] = Counter()
        self._state = threading.Lock()  # guards all of the above, held briefly
        self._receiving = threading.Lock()  # held by the one thread that reads `inner`

    @property
    def groups_waiting(self) -> int:
        """Groups that wait for more rows."""
        with self._state:
            return len(self._waiting)

    @property
    def rows_waiting(self) -> int:
        """Rows held of groups that wait for more."""
        with self._state:
            return sum(len(group.rows) for group in self._waiting.values())

    def get(self, timeout: float | None = None) -> QueueRow:
        """The next row of the group being read, or the first of the next complete one.

        Args:
            timeout: seconds to wait for a group to complete, however many parts of groups come meanwhile; None waits
                until one does.

        Raises:
            queue.Empty: no group completed in time.
            ValueError: a uid that came before, a `group_size` that contradicts the group's other rows, or a value out
                of range. What was wrong is discarded; the queue goes on.
            TypeError: something on the queue that is neither a row nor a `GroupShrunk`.
            Exception: whatever `check_health` raises.
        """
        looked_at = time.monotonic()
        deadline = None if timeout is None else looked_at + timeout
        self._drain()
        while (row := self._take()) is None:
            now = time.monotonic()
            overdue = deadline is not None and now >= deadline
            if overdue or now - looked_at >= POLL_S:
                self._look_around()
                looked_at = now
            if overdue:
                raise queue.Empty
            self._receive(POLL_S if deadline is None else min(POLL_S, deadline - now))
        if self._progress is not None:
            self._progress.arrived()
        return row

    def get_nowait(self) -> QueueRow:
        """`get` without waiting."""
        return self.get(timeout=0)

    def qsize(self) -> int:
        """Rows on this side of the producer: at hand, waiting for the rest of their group, or on the inner queue.

        The backlog, as TRL's `sample/rollout_queue_size` has it; `empty` tells whether a row can be had.
        """
        with self._state:
            held = len(self._ready) + sum(len(group.rows) for group in self._waiting.values())
        return held + self._inner.qsize()

    def empty(self) -> bool:
        """Whether no complete group is at hand, so that `get_nowait` would raise `queue.Empty`."""
        self._drain()
        return not self._ready

    def pop_metrics(self) -> dict[str, float]:
        """Gauges of what waits (`batch/groups_waiting`, `batch/rows_waiting`), and rows dropped since the last call.

        The latter are `batch/dropped_{reason}_total`, for the reasons there were.
        """
        with self._state:
            new = self.dropped - self._reported
            self._reported = self.dropped.copy()
            return {
                "batch/groups_waiting": float(len(self._waiting)),
                "batch/rows_waiting": float(sum(len(group.rows) for group in self._waiting.values())),
                **{f"batch/dropped_{reason}_total": float(count) for reason, count in new.items()},
            }

    def _take(self) -> QueueRow | None:
        with self._state:
            return self._ready.popleft() if self._ready else None

    def _look_around(self) -> None:
        """What is due from time to time while there is nothing to get."""
        if self._progress is not None:
            self._progress.waiting()
        if self._check_health is not None:
            self._check_health()

    def _drain(self) -> None:
        """Take what the inner queue holds already, up to the next complete group."""
        for _ in range(self._inner.qsize()):
            if self._ready or not self._receive(0.0):
                return

    def _receive(self, wait_s: float) -> bool:
        """Take one item from the inner queue; False when none came within `wait_s`."""
        until = time.monotonic() + wait_s
        if not self._receiving.acquire(timeout=wait_s):
            return False
        try:
            if not self._ready:  # else another thread has completed a group meanwhile
                item = self._inner.get(timeout=max(0.0, until - time.monotonic()))
                with self._state:
                    self._admit(item)
            return True
        except queue.Empty:
            return False
        finally:
            self._receiving.release()

    def _admit(self, item: Any) -> None:
        self._evict_stale()
        if isinstance(item, GroupShrunk):
            self._shrink(item)
            return
        uid, group_id, size = _checked(item)
        if uid in self._uids:
            raise ValueError(f"uid must be unique, got {uid} again in group {group_id}")
        self._uids.add(uid)
        if self._is_over(group_id):
            self._count_dropped(group_id, 1, "late")
            return
        group = self._open(group_id)
        if not group.shrunken and group.size not in (None, size):
            raise ValueError(
                f"group_size must be the same in all rows of a group, got {size} in uid {uid} after {group.size} in "
                f"group {group_id}"
            )
        if not group.shrunken:
            group.size = size
        group.rows.append(item)
        self._close_if_complete(group_id)

    def _shrink(self, announced: GroupShrunk) -> None:
        group_id, size = announced.group_id, announced.group_size
        if self._is_over(group_id):
            return
        so_far = self._waiting.get(group_id, _Group())
        limit = size if so_far.size is None else so_far.size
        if not len(so_far.rows) <= size <= limit:
            raise ValueError(
                f"group_size of GroupShrunk must be within {len(so_far.rows)} (the rows that have come) and {limit}, "
                f"got {size} for group {group_id}"
            )
        group = self._open(group_id)
        group.size, group.shrunken = size, True
        self._close_if_complete(group_id)

    def _is_over(self, group_id: int) -> bool:
        return group_id in self._closed or (self._progress is not None and self._progress.is_consumed(group_id))

    def _open(self, group_id: int) -> _Group:
        if group_id not in self._waiting:
            self._waiting[group_id] = _Group()
            if self._progress is not None:
                self._progress.started(group_id)
            if len(self._waiting) > self._max_waiting_groups:
                self._drop(next(iter(self._waiting)), "incomplete")
        return self._waiting[group_id]

    def _close_if_complete(self, group_id: int) -> None:
        """Release or drop a group that has all its rows: the one place where it is judged."""
        group = self._waiting[group_id]
        if len(group.rows) != group.size:
            return
        if group.shrunken and len({row.rollout_id for row in group.rows}) < 2:
            self._drop(group_id, "shrunk")
        elif self._is_stale(group):
            self._drop(group_id, "stale")
        else:
            for row in group.rows:
                row.group_size = len(group.rows)
            self._ready.extend(group.rows)
            self._closed.add(group_id)
            del self._waiting[group_id]
            if self._progress is not None:
                self._progress.completed(group_id)

    def _is_stale(self, group: _Group) -> bool:
        if self._model_version is None or self._max_staleness is None or not group.rows:
            return False
        return self._model_version() - group.version > self._max_staleness

    def _evict_stale(self) -> None:
        """Let go of incomplete groups that can only be dropped, so that lost rows do not keep theirs here for ever."""
        if self._model_version is None or self._max_staleness is None:
            return
        version = self._model_version()
        if version != self._evicted_at:
            self._evicted_at = version
            for group_id in [group_id for group_id, group in self._waiting.items() if self._is_stale(group)]:
                self._drop(group_id, "stale")

    def _drop(self, group_id: int, reason: str) -> None:
        group = self._waiting.pop(group_id)
        self._closed.add(group_id)
        self._count_dropped(group_id, len(group.rows), reason)
        if self._progress is not None:
            self._progress.dropped(group_id, reason)

    def _count_dropped(self, group_id: int, num_rows: int, reason: str) -> None:
        logger.warning("dropping %d rows of group %d: %s", num_rows, group_id, reason)
        self.dropped[reason] += num_rows


def _checked(row: Any) -> tuple[int, int, int]:
    """uid, group_id and group_size of something that must be a row."""
    try:
        values = {"uid": (row.uid, 0), "group_id": (row.group_id, 0), "group_size": (row.group_size, 1)}
        _ = row.rollout_id, row.model_version
    except AttributeError as error:
        raise TypeError(
            f"inner must yield GroupShrunk or rows with uid, group_id, rollout_id, group_size and model_version, got "
            f"{type(row).__name__}: {error}"
        ) from error
    for name, (value, least) in values.items():
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value} in uid {row.uid} of group {row.group_id}")
    return row.uid, row.group_id, row.group_size
