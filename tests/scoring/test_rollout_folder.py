"""A folder of rollout files reads as one file would."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from support.rollout_files import npz_arrays, write_rollouts
from treepack.scoring.errors import RolloutError
from treepack.scoring.rollouts import read_rollouts


def row(group_id: int, **more: Any) -> dict[str, Any]:
    return {"input_ids": [1, 2, group_id], "completion_mask": [0, 1, 1], "group_id": group_id, **more}


def test_every_format_in_one_folder(tmp_path: Path) -> None:
    rows = [row(group, reward=float(group), uid=10 + group) for group in (5, 5, 6, 7)]
    for i, each in enumerate(rows):
        each["uid"] += i
    write_rollouts(tmp_path / "a.npz", rows[:2])
    write_rollouts(tmp_path / "b.parquet", rows[2:3])
    write_rollouts(tmp_path / "c.jsonl", rows[3:])
    (tmp_path / "README.md").write_text("not rollouts")
    (tmp_path / "more.npz").mkdir()
    joined, alone = read_rollouts(tmp_path), read_rollouts(write_rollouts(tmp_path.parent / "all.npz", rows))
    for name in ("input_ids", "offsets", "completion_mask", "uid", "group_id", "rollout_id", "finished"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(alone, name), err_msg=name)
    np.testing.assert_array_equal(joined.rewards["reward"], alone.rewards["reward"])


def test_what_a_file_may_lack(tmp_path: Path) -> None:
    write_rollouts(tmp_path / "a.jsonl", [row(0, reward=2.0, finished=False)])
    write_rollouts(tmp_path / "b.jsonl", [row(1), row(1)])
    rollouts = read_rollouts(tmp_path)
    np.testing.assert_array_equal(rollouts.rewards["reward"], [2.0, np.nan, np.nan])
    assert rollouts.finished.tolist() == [False, True, True]
    assert rollouts.uid.tolist() == rollouts.rollout_id.tolist() == [0, 1, 2]


@pytest.mark.parametrize("column", ["input_ids", "group_id"])
def test_integers_of_different_types(tmp_path: Path, column: str) -> None:
    unsigned = npz_arrays([row(0)])
    np.savez(tmp_path / "a.npz", **{**unsigned, column: unsigned[column].astype(np.uint64)})
    write_rollouts(tmp_path / "b.jsonl", [row(1)])
    rollouts = read_rollouts(tmp_path)
    assert rollouts.input_ids.tolist() == [1, 2, 0, 1, 2, 1]
    assert rollouts.group_id.tolist() == [0, 1]


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (
            [row(3)],
            [row(2), row(3)],
            r"b\.jsonl: column 'group_id': a group must lie in one file, got group 3, .* a\.jsonl",
        ),
        ([row(0, uid=4)], [row(1)], r"b\.jsonl: missing column 'uid', which a\.jsonl in the same folder has"),
        ([row(0)], [row(1, uid=4)], r"a\.jsonl: missing column 'uid', which b\.jsonl"),
        ([row(0, uid=4)], [row(1, uid=4)], "column 'uid', row 1: must be unique, got 4 again"),
        ([row(0)], [row(1, input_ids=[1, -2, 3])], r"b\.jsonl: column 'input_ids', row 0: tokens must be >= 0, got -2"),
    ],
)
def test_files_that_do_not_go_together(
    tmp_path: Path, first: list[dict[str, Any]], second: list[dict[str, Any]], message: str
) -> None:
    write_rollouts(tmp_path / "a.jsonl", first)
    write_rollouts(tmp_path / "b.jsonl", second)
    with pytest.raises(RolloutError, match=message):
        read_rollouts(tmp_path)


def test_a_folder_without_rollouts(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("")
    with pytest.raises(RolloutError, match=r"holds no rollout file \(\.npz, \.parquet, \.jsonl\)"):
        read_rollouts(tmp_path)
