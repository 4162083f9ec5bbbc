"""Rows of the rollout queue."""

from dataclasses import dataclass


@dataclass(slots=True)
class Row:
    uid: int
    group_id: int
    rollout_id: int
    group_size: int
    model_version: int = 0


def rows_of(group_id, size, *, first_uid=None, version=0, rollouts=None):
    first = 100 * group_id if first_uid is None else first_uid
    return [
        Row(first + i, group_id, first + i if rollouts is None else rollouts[i], size, version) for i in range(size)
    ]


def uids(rows):
    return [row.uid for row in rows]
