"""Rollouts from producers to the trainer: `GroupedQueue` beside the bare queue that it reads.

Each producer has groups of its own, 64 of them in flight at a time, whose 8 rows come interleaved at random; one
consumer takes them all. The bare queue hands out the same rows as they come. Times are CPU time of producers and
consumer together, so `rows/s` is what one core carries.
"""

import multiprocessing
import queue
from collections.abc import Callable
from dataclasses import dataclass
from itertools import groupby
from threading import Thread
from typing import Any

import numpy as np
import pytest

from harness import Compare, Comparison, Figure
from treepack import GroupedQueue

GROUP_SIZE = 8
IN_FLIGHT = 64
# As in TRL, so that producers wait for the trainer now and then.
CAPACITY = 1024
TIMEOUT_S = 60


@dataclass(slots=True)
class Row:
    uid: int
    group_id: int
    rollout_id: int
    group_size: int
    model_version: int
    input_ids: np.ndarray


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[int], Any]
    producers: int
    groups: int


CASES = [
    Case("queue.Queue, 1 producer", queue.Queue, 1, 2500),
    Case("queue.Queue, 4 producers", queue.Queue, 4, 2500),
    Case("multiprocessing.Queue, 1 producer", multiprocessing.Queue, 1, 500),
    Case("multiprocessing.Queue, 4 producers", multiprocessing.Queue, 4, 500),
]
SMOKE_CASES = [
    Case("smoke: queue.Queue, 4 producers", queue.Queue, 4, 20),
    Case("smoke: multiprocessing.Queue, 1 producer", multiprocessing.Queue, 1, 20),
]


def rows_of(case: Case) -> list[list[Row]]:
    """Each producer's rows, in the order in which it puts them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 150_000, 1500)
    rows = [Row(uid, uid // GROUP_SIZE, uid, GROUP_SIZE, 0, ids) for uid in range(case.groups * GROUP_SIZE)]
    shares = [[row for row in rows if row.group_id % case.producers == p] for p in range(case.producers)]
    return [interleaved(share, rng) for share in shares]


def interleaved(rows: list[Row], rng: np.random.Generator) -> list[Row]:
    block = IN_FLIGHT * GROUP_SIZE
    blocks = [rows[start : start + block] for start in range(0, len(rows), block)]
    return [members[i] for members in blocks for i in rng.permutation(len(members))]


def put_all(inner: Any, rows: list[Row]) -> None:
    for row in rows:
        inner.put(row)


def stream(case: Case, shares: list[list[Row]], read: Callable[[Any], Any]) -> list[Row]:
    """All rows in the order in which one consumer gets them."""
    inner = case.make(CAPACITY)
    source = read(inner)
    threads = [Thread(target=put_all, args=(inner, share), daemon=True) for share in shares]
    for thread in threads:
        thread.start()
    got = [source.get(timeout=TIMEOUT_S) for share in shares for _ in share]
    for thread in threads:
        thread.join()
    if not isinstance(inner, queue.Queue):
        inner.close()
        inner.join_thread()
    return got


def assert_each_once(got: list[Row], case: Case) -> None:
    assert sorted(row.uid for row in got) == list(range(case.groups * GROUP_SIZE))


def assert_whole(got: list[Row]) -> None:
    """Each group in one run."""
    runs = [len(list(run)) for _, run in groupby(got, key=lambda row: row.group_id)]
    assert runs == [GROUP_SIZE] * (len(got) // GROUP_SIZE)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases = SMOKE_CASES if metafunc.config.getoption("smoke") else CASES
    metafunc.parametrize("case", cases, ids=lambda case: case.name)


def test_queue(compare: Compare, case: Case) -> None:
    shares = rows_of(case)
    num_rows = sum(map(len, shares))

    def ours() -> list[Row]:
        return stream(case, shares, GroupedQueue)

    def bare() -> list[Row]:
        return stream(case, shares, lambda inner: inner)

    def check() -> None:
        grouped = ours()
        assert_each_once(grouped, case)
        assert_whole(grouped)
        assert_each_once(bare(), case)

    def figures(record: Comparison) -> dict[str, Figure]:
        return {
            "rows/s": Figure(num_rows / record.ours_s),
            "bare rows/s": Figure(num_rows / record.peers_s["the bare queue"]),
        }

    compare(case.name, ours=ours, peers={"the bare queue": bare}, check=check, figures=figures)
