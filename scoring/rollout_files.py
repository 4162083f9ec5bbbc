"""The three rollout file formats, each read to the same thing: columns by name, ragged or flat.

What the columns must hold is checked in `treepack.scoring.rollouts`; here only what is particular to a format is.
"""

import json
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import RolloutError

TOKEN_COLUMNS = ("input_ids", "completion_mask", "old_log_probs")
ROW_COLUMNS = ("uid", "group_id", "rollout_id", "finished", "reward")
REWARD_PREFIX = "rewards/"


@dataclass(frozen=True, eq=False)
class Ragged:
    """A column with a list in every row, the lists laid end to end.

    Attributes:
        values: (T,) the elements.
        offsets: (rows + 1,) int64; row i is `values[offsets[i]:offsets[i + 1]]`.
    """

    values: NDArray[Any]
    offsets: NDArray[np.int64]


Columns = dict[str, Ragged | NDArray[Any]]


def read_columns(path: Path) -> Columns:
    """Read every known column of a rollout file (.npz, .parquet or .jsonl); other columns are left unread.

    Raises:
        RolloutError: the file is missing, unreadable, of an unknown kind, or not what its suffix says.
    """
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise RolloutError(f"{path}: rollouts must be a {', '.join(SUFFIXES)} file, got suffix {path.suffix!r}")
    if not path.exists():
        raise RolloutError(f"{path}: no such file")
    try:
        return reader(path)
    except OSError as error:
        raise RolloutError(f"{path}: cannot be read: {error.strerror or error}") from error


def is_known(name: str) -> bool:
    """Whether a column of this name is read."""
    return name in TOKEN_COLUMNS or name in ROW_COLUMNS or name.startswith(REWARD_PREFIX)


def _read_npz(path: Path) -> Columns:
    try:
        archive = np.load(path, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise RolloutError(f"{path}: not a valid .npz file: it holds a single array")
        with archive:
            arrays = {name: archive[name] for name in archive.files if is_known(name) or name == "offsets"}
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        if isinstance(error, RolloutError):
            raise
        raise RolloutError(f"{path}: not a valid .npz file: {_first_line(error)}") from error
    return _cut_rows(path, arrays)


def _cut_rows(path: Path, arrays: Mapping[str, NDArray[Any]]) -> Columns:
    """An archive's flat token arrays as ragged columns, its mask unpacked from bits."""
    columns: Columns = {name: array for name, array in arrays.items() if name not in TOKEN_COLUMNS}
    if "input_ids" not in arrays:
        return columns
    offsets = columns.pop("offsets", None)
    if not isinstance(offsets, np.ndarray):
        raise RolloutError(f"{path}: missing column 'offsets' (where each row of 'input_ids' starts, and the end)")
    offsets = _checked_offsets(path, offsets, len(np.atleast_1d(arrays["input_ids"])))
    for name in TOKEN_COLUMNS:
        if name not in arrays:
            continue
        values = arrays[name]
        if name == "completion_mask":
            values = _unpacked_mask(path, values, int(offsets[-1]))
        if values.shape != (offsets[-1],):
            raise RolloutError(
                f"{path}: column {name!r} must hold one value a token, {offsets[-1]} by 'offsets', "
                f"got shape {values.shape}"
            )
        columns[name] = Ragged(values, offsets)
    return columns


def _checked_offsets(path: Path, offsets: NDArray[Any], num_tokens: int) -> NDArray[np.int64]:
    if offsets.ndim != 1 or not np.issubdtype(offsets.dtype, np.integer):
        raise RolloutError(f"{path}: column 'offsets' must be a list of integers, got {offsets.dtype} {offsets.shape}")
    offsets = offsets.astype(np.int64)
    if len(offsets) == 0 or offsets[0] != 0 or offsets[-1] != num_tokens:
        ends = f"{offsets[0]} and {offsets[-1]}" if len(offsets) else "nothing"
        raise RolloutError(
            f"{path}: column 'offsets' must start at 0 and end at the {num_tokens} values of 'input_ids', got {ends}"
        )
    falls = np.flatnonzero(np.diff(offsets) < 0)
    if len(falls):
        row = int(falls[0])
        raise RolloutError(
            f"{path}: column 'offsets', row {row}: must not fall, got {offsets[row]} then {offsets[row + 1]}"
        )
    return offsets


def _unpacked_mask(path: Path, packed: NDArray[Any], num_tokens: int) -> NDArray[np.uint8]:
    num_bytes = -(-num_tokens // 8)
    if packed.dtype != np.uint8 or packed.shape != (num_bytes,):
        raise RolloutError(
            f"{path}: column 'completion_mask' must hold the mask and ids at one length: {num_bytes} bytes of packed "
            f"bits (np.packbits) for {num_tokens} tokens, got {packed.dtype} {packed.shape}"
        )
    return np.unpackbits(packed, count=num_tokens)


def _read_parquet(path: Path) -> Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            table = file.read(columns=[name for name in file.schema_arrow.names if is_known(name)])
    except pa.ArrowInvalid as error:
        raise RolloutError(f"{path}: not a valid .parquet file: {_first_line(error)}") from error
    return {name: _arrow_column(path, name, table.column(name).combine_chunks()) for name in table.column_names}


def _arrow_column(path: Path, name: str, array: Any) -> Ragged | NDArray[Any]:
    import pyarrow as pa

    if not (pa.types.is_list(array.type) or pa.types.is_large_list(array.type)):
        if name in TOKEN_COLUMNS:
            raise RolloutError(f"{path}: column {name!r} must hold a list in every row, got {array.type}")
        return np.asarray(array.to_numpy(zero_copy_only=False))
    null_rows = np.flatnonzero(array.is_null().to_numpy(zero_copy_only=False))
    if len(null_rows):
        raise RolloutError(f"{path}: column {name!r}, row {null_rows[0]}: must be a list, got null")
    offsets = np.asarray(array.offsets).astype(np.int64)
    # `flatten` starts at the first row even where the array is a slice of a longer one.
    return Ragged(array.flatten().to_numpy(zero_copy_only=False), offsets - offsets[0])


def _read_jsonl(path: Path) -> Columns:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise RolloutError(f"{path}: not a valid .jsonl file: {_first_line(error)}") from error
    rows = [_json_row(path, i, line) for i, line in enumerate(lines) if line.strip()]
    names = dict.fromkeys(name for row in rows for name in row if is_known(name))
    return {name: _json_column(path, name, rows) for name in names}


def _json_row(path: Path, line_index: int, line: str) -> dict[str, Any]:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise RolloutError(f"{path}: not a valid .jsonl file: line {line_index + 1}: {error}") from error
    if not isinstance(row, dict):
        raise RolloutError(
            f"{path}: not a valid .jsonl file: line {line_index + 1}: must be an object, got {type(row).__name__}"
        )
    return row


def _json_column(path: Path, name: str, rows: list[dict[str, Any]]) -> Ragged | NDArray[Any]:
    if name == "reward" or name.startswith(REWARD_PREFIX):  # not applicable to every row: null or left out
        return np.array([np.nan if row.get(name) is None else row[name] for row in rows])
    for i, row in enumerate(rows):
        if row.get(name) is None:
            raise RolloutError(f"{path}: column {name!r}, row {i}: missing or null")
    values = [row[name] for row in rows]
    if name not in TOKEN_COLUMNS:
        return np.array(values)
    parts = [_json_list(path, name, i, value) for i, value in enumerate(values)]
    # An empty list has no dtype of its own and would turn integers into floats.
    typed = [part for part in parts if len(part)] or parts
    offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
    return Ragged(np.concatenate(typed), offsets)


def _json_list(path: Path, name: str, row: int, value: Any) -> NDArray[Any]:
    if isinstance(value, list):
        try:
            array = np.array(value)
        except (ValueError, OverflowError):  # lists of unequal lengths; an integer no dtype holds
            array = np.empty(0, dtype=object)
        if array.ndim == 1 and (array.dtype.kind in "iufb" or not value):
            return array
    raise RolloutError(f"{path}: column {name!r}, row {row}: must be a list of numbers, got {str(value)[:40]}")


def _first_line(error: BaseException) -> str:
    return str(error).partition("\n")[0]


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".npz": _read_npz,
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
}
SUFFIXES = tuple(_READERS)
