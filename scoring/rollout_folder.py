"""A folder of rollout files as one: their columns laid end to end, in the order of the file names."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import RolloutError
from treepack.scoring.rollout_files import REWARD_PREFIX, SUFFIXES, Columns, Ragged


def rollout_files(folder: Path) -> list[Path]:
    """The rollout files of a folder, by name; folders in it and other files are not looked at.

    Raises:
        RolloutError: there is none.
    """
    try:
        files = sorted(path for path in folder.iterdir() if path.suffix in SUFFIXES and path.is_file())
    except OSError as error:
        raise RolloutError(f"{folder}: cannot be read: {error.strerror}") from error
    if not files:
        raise RolloutError(f"{folder}: holds no rollout file ({', '.join(SUFFIXES)})")
    return files


def join_columns(parts: Mapping[Path, Columns]) -> Columns:
    """Lay files' columns end to end.

    A reward that a file lacks does not apply to its rows, and its rows are finished unless it says otherwise; every
    other column must be in all of the files or in none. A group lies in one file: the same number in two would mix what
    belongs to different prompts.

    Args:
        parts: the checked columns of each file.

    Raises:
        RolloutError: a column is in some files only, or a group in several.
    """
    names = dict.fromkeys(name for columns in parts.values() for name in columns)
    joined: Columns = {}
    for name in names:
        absent = [path for path, columns in parts.items() if name not in columns]
        fill = _fill_value(name)
        if absent and fill is None:
            holder = next(path for path, columns in parts.items() if name in columns)
            raise RolloutError(f"{absent[0]}: missing column {name!r}, which {holder.name} in the same folder has")
        joined[name] = _join([_column_or(columns, name, fill) for columns in parts.values()])
    _check_groups(parts)
    return joined


def _fill_value(name: str) -> float | bool | None:
    """What stands for a column in a file that lacks it; None where nothing can."""
    if name == "reward" or name.startswith(REWARD_PREFIX):
        return float("nan")
    return True if name == "finished" else None


def _column_or(columns: Columns, name: str, fill: float | bool | None) -> Ragged | NDArray[Any]:
    if name in columns:
        return columns[name]
    ids = columns["input_ids"]
    assert isinstance(ids, Ragged), "every reader gives token columns as ragged"
    return np.full(len(ids.offsets) - 1, fill)


def _join(columns: list[Ragged | NDArray[Any]]) -> Ragged | NDArray[Any]:
    flat = [column for column in columns if not isinstance(column, Ragged)]
    if flat:
        return _concatenate(flat)
    ragged = [column for column in columns if isinstance(column, Ragged)]
    lengths = np.concatenate([np.diff(column.offsets) for column in ragged])
    return Ragged(_concatenate([column.values for column in ragged]), np.r_[0, lengths.cumsum()])


def _concatenate(columns: list[NDArray[Any]]) -> NDArray[Any]:
    if all(np.issubdtype(column.dtype, np.integer) for column in columns):
        columns = [column.astype(np.int64) for column in columns]  # numpy makes floats of signed and unsigned together
    return np.concatenate(columns)


def _check_groups(parts: Mapping[Path, Columns]) -> None:
    paths = list(parts)
    groups = [np.unique(np.asarray(columns["group_id"])) for columns in parts.values()]
    flat, file = _concatenate(groups), np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    order = np.argsort(flat, kind="stable")
    again = np.flatnonzero(np.diff(flat[order]) == 0)
    if len(again):
        first, second = (paths[file[order[again[0] + i]]] for i in (0, 1))
        raise RolloutError(
            f"{second}: column 'group_id': a group must lie in one file, got group {flat[order[again[0]]]}, which "
            f"{first.name} holds too"
        )
