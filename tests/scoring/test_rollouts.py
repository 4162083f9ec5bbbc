"""Reading rollouts: three formats give the same value, and each wrong file its own one-line error."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from support.rollout_files import npz_arrays, write_rollouts
from treepack.scoring.errors import RolloutError
from treepack.scoring.rollouts import Rollouts, bundled_rollouts, read_rollouts

TRACES = Path(__file__).parents[2].parent / "shared" / "data"

# Group 7 has rows on both sides of group 3's; rollout 4 has two rows; one reward is not applicable.
ROWS = [
    {"input_ids": [5, 6, 7], "completion_mask": [0, 1, 1], "group_id": 7, "rollout_id": 4, "reward": 1.0},
    {"input_ids": [9], "completion_mask": [0], "group_id": 3, "rollout_id": 1, "reward": None},
    {"input_ids": [5, 6, 8, 8], "completion_mask": [0, 0, 1, 0], "group_id": 7, "rollout_id": 4, "reward": 0.5},
]


def changed(row: int, **values: Any) -> list[dict[str, Any]]:
    return [{**old, **values} if i == row else dict(old) for i, old in enumerate(ROWS)]


@pytest.fixture(params=[".npz", ".parquet", ".jsonl"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return tmp_path / f"rollouts{request.param}"


def assert_read(rollouts: Rollouts) -> None:
    assert len(rollouts) == 3
    assert rollouts.input_ids.tolist() == [5, 6, 7, 9, 5, 6, 8, 8]
    assert rollouts.offsets.tolist() == [0, 3, 4, 8]
    assert rollouts.completion_mask.tolist() == [0, 1, 1, 0, 0, 0, 1, 0]
    assert rollouts.completion_mask.dtype == np.uint8
    assert rollouts.group_id.tolist() == [7, 3, 7]
    assert rollouts.rollout_id.tolist() == [4, 1, 4]
    assert rollouts.uid.tolist() == [0, 1, 2]
    np.testing.assert_array_equal(rollouts.rewards["reward"], [1.0, np.nan, 0.5])
    assert rollouts.old_log_probs is None
    assert rollouts.finished.all()


def test_every_format_reads_the_same(path: Path) -> None:
    assert_read(read_rollouts(write_rollouts(path, ROWS)))


def test_optional_columns(path: Path) -> None:
    rows = [
        {
            **row,
            "uid": 10 - i,
            "finished": i == 1,
            "old_log_probs": [-0.5] * len(row["input_ids"]),
            "rewards/style": i / 4,
            "text": "not read",
        }
        for i, row in enumerate(ROWS)
    ]
    rollouts = read_rollouts(write_rollouts(path, rows))
    assert rollouts.uid.tolist() == [10, 9, 8]
    assert rollouts.finished.tolist() == [False, True, False]
    assert rollouts.old_log_probs is not None
    np.testing.assert_array_equal(rollouts.old_log_probs, np.full(8, -0.5, np.float32))
    assert set(rollouts.rewards) == {"reward", "style"}
    sample = next(iter(rollouts.samples()))
    assert sample["rewards"] == {"reward": 1.0, "style": 0.0}
    assert sample["old_log_probs"].tolist() == [-0.5] * 3


def test_rollout_ids_may_be_strings(path: Path) -> None:
    rows = [{**row, "rollout_id": f"conversation-{row['rollout_id']}"} for row in ROWS]
    sample = next(iter(read_rollouts(write_rollouts(path, rows)).samples()))
    assert sample["rollout_id"] == "conversation-4"


def test_each_row_is_its_own_rollout_by_default(path: Path) -> None:
    rows = [{name: value for name, value in row.items() if name != "rollout_id"} for row in ROWS]
    assert read_rollouts(write_rollouts(path, rows)).rollout_id.tolist() == [0, 1, 2]


def test_samples_keep_a_group_in_a_run(path: Path) -> None:
    samples = list(read_rollouts(write_rollouts(path, ROWS)).samples())
    assert [(s["uid"], s["group_id"], s["rollout_id"], s["group_size"]) for s in samples] == [
        (0, 7, 4, 2),
        (2, 7, 4, 2),
        (1, 3, 1, 1),
    ]
    first = samples[0]
    assert first["input_ids"].dtype == np.int64
    assert first["input_ids"].tolist() == [5, 6, 7]
    assert first["completion_mask"].tolist() == [0, 1, 1]
    assert first["old_log_probs"].dtype == np.float32
    assert first["old_log_probs"].tolist() == [0, 0, 0]
    assert np.isnan(first["advantage"])
    assert first["metrics"] == {}
    assert first["finished"] is True
    assert np.isnan(samples[2]["rewards"]["reward"])


def test_limits_keep_the_first_groups_and_rows(path: Path) -> None:
    rollouts = read_rollouts(write_rollouts(path, ROWS))
    assert [s["uid"] for s in rollouts.samples(limit_groups=1)] == [0, 2]
    kept = list(rollouts.samples(limit_rows=1))
    assert [(s["uid"], s["group_size"]) for s in kept] == [(0, 1), (1, 1)]


def test_bundled_rollouts_are_rows_of_the_traces() -> None:
    rollouts = read_rollouts()
    assert bundled_rollouts().stat().st_size < 300_000
    sizes = [len(rows) for rows in rollouts.group_rows()]
    assert (len(sizes), min(sizes), max(sizes)) == (60, 4, 32)
    assert int(np.diff(rollouts.offsets).max()) <= 8192
    if not TRACES.exists():
        pytest.skip("the full traces are not beside the checkout")
    for first_id, name in ((0, "gsm8k_solutions"), (100_000, "game24_samples"), (200_000, "airline_turns")):
        trace = read_rollouts(TRACES / f"{name}.npz")
        by_rollout: dict[int, list[bytes]] = {}
        for sample in trace.samples():
            by_rollout.setdefault(sample["rollout_id"], []).append(content(sample))
        for sample in rollouts.samples():
            if 0 <= sample["group_id"] - first_id < 100_000:
                assert content(sample) in by_rollout[sample["rollout_id"] - first_id]


def content(sample: dict[str, Any]) -> bytes:
    return sample["input_ids"].tobytes() + sample["completion_mask"].tobytes() + str(sample["rewards"]).encode()


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (changed(1, input_ids=[], completion_mask=[]), r"column 'input_ids', row 1: must hold at least one token"),
        (changed(2, input_ids=[5, 6, -8, 8]), r"column 'input_ids', row 2: tokens must be >= 0, got -8"),
        (changed(0, input_ids=[5.5, 6.0, 7.0]), r"column 'input_ids' must hold integers, got float64"),
        (changed(1, reward=float("inf")), r"column 'reward', row 1: must be finite.* got inf"),
        ([{**row, "uid": min(i, 1)} for i, row in enumerate(ROWS)], r"'uid', row 2: must be unique, got 1 again"),
        ([{**row, "uid": i - 1} for i, row in enumerate(ROWS)], r"column 'uid', row 0: must be >= 0, got -1"),
        ([{**row, "group_id": 0.5} for row in ROWS], r"column 'group_id' must hold an integer a row, got float64"),
        ([{**row, "rewards/reward": 1} for row in ROWS], r"'reward' and 'rewards/reward' are one reward"),
        ([{**row, "finished": 2} for row in ROWS], r"column 'finished' must hold true or false"),
        (
            [{**row, "old_log_probs": [float("nan")] * len(row["input_ids"])} for row in ROWS],
            r"column 'old_log_probs', row 0: must hold a number a token",
        ),
    ],
)
def test_wrong_values_name_column_and_row(path: Path, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RolloutError, match=message) as raised:
        read_rollouts(write_rollouts(path, rows))
    assert str(raised.value).startswith(str(path))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("missing", ["input_ids", "completion_mask", "group_id"])
def test_missing_column(path: Path, missing: str) -> None:
    if path.suffix == ".npz":
        arrays = npz_arrays(ROWS)
        del arrays[missing]
        np.savez(path, **arrays)
    else:
        write_rollouts(path, [{name: value for name, value in row.items() if name != missing} for row in ROWS])
    with pytest.raises(RolloutError, match=f"missing column '{missing}'"):
        read_rollouts(path)


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl"])
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            changed(1, completion_mask=[0, 1]),
            r"'completion_mask', row 1: must be as long as input_ids, 1 tokens, got 2",
        ),
        (changed(0, completion_mask=[0, 1, 2]), r"'completion_mask', row 0: must hold 0 and 1 only, got 2"),
        (changed(2, input_ids=None), r"column 'input_ids', row 2: .*null"),
        ([{**row, "input_ids": 3} for row in ROWS], r"column 'input_ids'.* must (hold|be) a list"),
        ([{**row, "input_ids": ["a"]} for row in ROWS], r"column 'input_ids'.* must (hold integers|be a list of)"),
        ([{**row, "group_id": [1]} for row in ROWS], r"column 'group_id' must hold one value a row, got lists"),
    ],
)
def test_wrong_lists(tmp_path: Path, suffix: str, rows: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RolloutError, match=message):
        read_rollouts(write_rollouts(tmp_path / f"rollouts{suffix}", rows))


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"offsets": np.array([0, 5, 3, 8])}, r"column 'offsets', row 1: must not fall, got 5 then 3"),
        ({"offsets": np.array([0, 3, 4, 7])}, r"'offsets' must start at 0 and end at the 8 values .* got 0 and 7"),
        ({"offsets": np.array([1, 3, 4, 8])}, r"'offsets' must start at 0"),
        ({"offsets": np.array([0.0, 8.0])}, r"'offsets' must be a list of integers"),
        ({"offsets": np.array([0, 8])}, r"column 'group_id' must have a value a row, 1 as 'input_ids', got 3"),
        ({"completion_mask": np.zeros(8, np.uint8)}, r"'completion_mask' must hold the mask and ids at one length"),
        ({"input_ids": np.arange(8.0)}, r"column 'input_ids' must hold integers, got float64"),
        ({"reward": np.zeros(2)}, r"column 'reward' must have a value a row, 3 as 'input_ids', got 2"),
        ({"reward": np.array(["a", "b", "c"])}, r"column 'reward' must hold a number a row"),
    ],
)
def test_wrong_npz(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = tmp_path / "rollouts.npz"
    np.savez(path, **{**npz_arrays(ROWS), **arrays})
    with pytest.raises(RolloutError, match=message):
        read_rollouts(path)


def test_jsonl_row_without_a_value(tmp_path: Path) -> None:
    rows = changed(1)
    del rows[1]["group_id"], rows[1]["reward"]
    path = write_rollouts(tmp_path / "rollouts.jsonl", rows)
    with pytest.raises(RolloutError, match="column 'group_id', row 1: missing or null"):
        read_rollouts(path)
    rows[1]["group_id"] = 3
    assert_read(read_rollouts(write_rollouts(path, rows)))  # a reward left out is not applicable


@pytest.mark.parametrize("suffix", [".npz", ".parquet", ".jsonl"])
@pytest.mark.parametrize("content", [b"\x93 not such a file", b"[1, 2]\n"])
def test_not_a_valid_file(tmp_path: Path, suffix: str, content: bytes) -> None:
    path = tmp_path / f"rollouts{suffix}"
    path.write_bytes(content)
    with pytest.raises(RolloutError, match=f"not a valid {suffix} file") as raised:
        read_rollouts(path)
    assert "\n" not in str(raised.value)


def test_npz_that_is_one_array(tmp_path: Path) -> None:
    with (tmp_path / "rollouts.npz").open("wb") as file:
        np.save(file, np.arange(3))
    with pytest.raises(RolloutError, match="holds a single array"):
        read_rollouts(tmp_path / "rollouts.npz")


def test_empty_files(path: Path) -> None:
    if path.suffix == ".jsonl":
        path.write_text("\n")
    elif path.suffix == ".parquet":
        pq.write_table(pa.table({"input_ids": pa.array([], pa.list_(pa.int64()))}), path)
    else:
        np.savez(path, input_ids=np.zeros(0, np.int64), offsets=np.zeros(1, np.int64))
    with pytest.raises(RolloutError, match="holds no rollouts"):
        read_rollouts(path)


def test_missing_file_and_unknown_suffix(tmp_path: Path) -> None:
    with pytest.raises(RolloutError, match="no such file"):
        read_rollouts(tmp_path / "rollouts.npz")
    with pytest.raises(RolloutError, match=r"must be a .npz, .parquet, .jsonl file, got suffix '.csv'"):
        read_rollouts(tmp_path / "rollouts.csv")


def test_file_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(np, "load", refuse)
    (tmp_path / "rollouts.npz").touch()
    with pytest.raises(RolloutError, match="cannot be read: Permission denied"):
        read_rollouts(tmp_path / "rollouts.npz")
