"""Rollout files of every format, written from rows."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Row = dict[str, Any]


def write_rollouts(path: Path, rows: list[Row]) -> Path:
    """The rows as a file of the format that the suffix names."""
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        pq.write_table(pa.table(_columns(rows)), path)
    else:
        np.savez(path, **npz_arrays(rows))
    return path


def npz_arrays(rows: list[Row]) -> dict[str, Any]:
    """The rows as the arrays of an .npz file."""
    columns = _columns(rows)
    arrays = {}
    for name, values in columns.items():
        if name in ("input_ids", "completion_mask", "old_log_probs"):
            arrays[name] = np.concatenate([np.array(value) for value in values])
        elif name == "reward" or name.startswith("rewards/"):
            arrays[name] = np.array([np.nan if value is None else value for value in values])
        else:
            arrays[name] = np.array(values)
    arrays["completion_mask"] = np.packbits(arrays["completion_mask"].astype(bool))
    arrays["offsets"] = np.cumsum([0, *map(len, columns["input_ids"])])
    return arrays


def _columns(rows: list[Row]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in rows[0]}


def rollout_rows(rewards: list[list[float | None]], *, length: int = 20, prompt: int = 8, **more: Any) -> list[Row]:
    """A group for each list of rewards, a rollout a reward; a group's rows share their prompt and half of the rest."""
    rng = np.random.default_rng(0)
    rows = []
    for group_id, of_group in enumerate(rewards):
        shared = rng.integers(0, 100, (prompt + length) // 2).tolist()
        for reward in of_group:
            ids = shared + rng.integers(0, 100, length - len(shared)).tolist()
            mask = [0] * prompt + [1] * (length - prompt)
            rows.append({"input_ids": ids, "completion_mask": mask, "group_id": group_id, "reward": reward, **more})
    return rows
