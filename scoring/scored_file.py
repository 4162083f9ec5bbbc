"""scored.parquet: one line a sample, written step by step, so that what is finished is never lost."""

import math
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import pyarrow as pa
import pyarrow.parquet as pq

from treepack.scoring.rollout_files import REWARD_PREFIX


class ScoredFile:
    """Writes scored.parquet, a row group a step; a context manager, which leaves a valid file however it ends.

    Columns: uid, group_id, rollout_id; `rewards/<name>` for each reward column, null where it does not apply; reward
    (their sum) and advantage, null where there is none; step, micro_batch, rank (from 0), null for a sample that was
    dropped before planning; trained_tokens, its loss terms; reason, why it trains nothing, or null.
    """

    def __init__(self, path: Path, reward_names: Sequence[str], *, string_rollout_ids: bool):
        self._schema = pa.schema(
            [
                ("uid", pa.int64()),
                ("group_id", pa.int64()),
                ("rollout_id", pa.string() if string_rollout_ids else pa.int64()),
                *((f"{REWARD_PREFIX}{name}", pa.float64()) for name in reward_names),
                ("reward", pa.float64()),
                ("advantage", pa.float64()),
                ("step", pa.int32()),
                ("micro_batch", pa.int32()),
                ("rank", pa.int32()),
                ("trained_tokens", pa.int64()),
                ("reason", pa.string()),
            ]
        )
        self._writer = pq.ParquetWriter(path, self._schema)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def write(self, rows: Sequence[dict[str, Any]]) -> None:
        """Append rows, given by column name; NaN is written as null."""
        if rows:
            nullable = [{name: _null_if_nan(value) for name, value in row.items()} for row in rows]
            self._writer.write_table(pa.Table.from_pylist(nullable, schema=self._schema))


def _null_if_nan(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
