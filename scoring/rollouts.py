"""Sampled rollouts on disk: read whole, checked once, handed on as sample dicts, a group's samples in a run."""

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.errors import RolloutError
from treepack.scoring.rollout_files import REWARD_PREFIX, Columns, Ragged, read_columns
from treepack.scoring.rollout_folder import join_columns, rollout_files

_REQUIRED = ("input_ids", "completion_mask", "group_id")


@dataclass(frozen=True, eq=False)
class Rollouts:
    """Rows of sampled tokens and what was recorded with each. T tokens in R rows.

    Attributes:
        input_ids: (T,) integers >= 0, the rows end to end.
        offsets: (R + 1,) int64; row i is `input_ids[offsets[i]:offsets[i + 1]]`, never empty.
        completion_mask: (T,) uint8, 1 = a sampled token.
        uid: (R,) int64, unique, >= 0; the row index unless the file says otherwise. A rollout's last row has its
            largest uid.
        group_id: (R,) int64; rows of a group need not be adjacent.
        rollout_id: (R,) int64 or str; several rows of a group may share one. Each row its own unless the file says.
        rewards: (R,) float64 by reward name (`reward`, or <name> of column `rewards/<name>`), NaN = not applicable.
        old_log_probs: (T,) float32, the sampler's log-probabilities (natural log), or None.
        finished: (R,) bool, False = cut at the length limit; all True unless the file says otherwise.
    """

    input_ids: NDArray[Any]
    offsets: NDArray[np.int64]
    completion_mask: NDArray[np.uint8]
    uid: NDArray[np.int64]
    group_id: NDArray[np.int64]
    rollout_id: NDArray[Any]
    rewards: dict[str, NDArray[np.float64]]
    old_log_probs: NDArray[np.float32] | None
    finished: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.group_id)

    @property
    def vocab_size(self) -> int:
        """The smallest vocabulary that holds them: the largest token + 1."""
        return int(self.input_ids.max()) + 1

    def group_rows(self, *, limit_groups: int | None = None, limit_rows: int | None = None) -> list[NDArray[np.int64]]:
        """Row indices of each group, groups in order of first appearance, rows in file order.

        Args:
            limit_groups: keep the first so many groups.
            limit_rows: keep the first so many rows of each group.
        """
        by_group = np.argsort(self.group_id, kind="stable")
        starts = np.flatnonzero(np.diff(self.group_id[by_group])) + 1
        groups = sorted(np.split(by_group, starts), key=lambda rows: int(rows[0]))
        return [rows[:limit_rows] for rows in groups[:limit_groups]]

    def samples(self, *, limit_groups: int | None = None, limit_rows: int | None = None) -> Iterator[dict[str, Any]]:
        """The kept rows as the planner's sample dicts, a group's samples in a run (limits as in `group_rows`).

        `input_ids` int64, `completion_mask` uint8 and `old_log_probs` float32 (zeros if not recorded) are numpy
        arrays; `group_size` counts the group's kept rows; `advantage` is NaN, which is to say pending.
        """
        for rows in self.group_rows(limit_groups=limit_groups, limit_rows=limit_rows):
            for row in rows.tolist():
                yield self._sample(row, group_size=len(rows))

    def _sample(self, row: int, *, group_size: int) -> dict[str, Any]:
        tokens = slice(self.offsets[row], self.offsets[row + 1])
        input_ids = self.input_ids[tokens].astype(np.int64)
        recorded = self.old_log_probs
        return {
            "uid": int(self.uid[row]),
            "group_id": int(self.group_id[row]),
            "rollout_id": self.rollout_id[row].item(),
            "group_size": group_size,
            "input_ids": input_ids,
            "completion_mask": self.completion_mask[tokens],
            "old_log_probs": np.zeros(len(input_ids), np.float32) if recorded is None else recorded[tokens],
            "advantage": float("nan"),
            "rewards": {name: float(values[row]) for name, values in self.rewards.items()},
            "metrics": {},
            "finished": bool(self.finished[row]),
        }


def bundled_rollouts() -> Path:
    """The rollouts that come with the package (provenance: README.md beside them)."""
    return Path(str(resources.files("treepack.scoring") / "data" / "rollouts.npz"))


def read_rollouts(path: Path | None = None) -> Rollouts:
    """Read a rollout file, or all of a folder as one (see `join_columns`); None reads the bundled rollouts.

    Columns: `input_ids`, `completion_mask`, `group_id`; any of `reward` and `rewards/<name>` (NaN or null = not
    applicable); optionally `rollout_id`, `uid`, `old_log_probs`, `finished`. In .parquet and .jsonl the token columns
    hold a list in every row. In .npz they are flat with `offsets`, and `completion_mask` is bits (`np.packbits`).

    Raises:
        RolloutError: the file cannot be read or a column holds what it must not; rows count from 0.
    """
    path = bundled_rollouts() if path is None else path
    if not path.is_dir():
        return _Checker(path, read_columns(path)).rollouts()
    parts = {file: read_columns(file) for file in rollout_files(path)}
    for file, columns in parts.items():
        _Checker(file, columns).rollouts()  # so that an error names the file and its row
    return _Checker(path, join_columns(parts)).rollouts()


class _Checker:
    """One file's columns, taken one by one, each checked as it is taken."""

    def __init__(self, path: Path, columns: Columns):
        self.path = path
        self.columns = columns
        if not columns or all(_num_rows(column) == 0 for column in columns.values()):
            raise RolloutError(f"{path}: holds no rollouts")
        for name in _REQUIRED:
            if name not in columns:
                raise RolloutError(f"{path}: missing column {name!r} (needed: {', '.join(_REQUIRED)})")
        self.ids = self._ragged("input_ids")
        self.num_rows = _num_rows(self.ids)

    def rollouts(self) -> Rollouts:
        for name, column in self.columns.items():
            if _num_rows(column) != self.num_rows:
                raise RolloutError(
                    f"{self.path}: column {name!r} must have a value a row, {self.num_rows} as 'input_ids', "
                    f"got {_num_rows(column)}"
                )
        self._check_ids()
        return Rollouts(
            input_ids=self.ids.values,
            offsets=self.ids.offsets,
            completion_mask=self._mask(),
            uid=self._uid(),
            group_id=self._integers("group_id"),
            rollout_id=self._rollout_id(),
            rewards=self._rewards(),
            old_log_probs=self._old_log_probs(),
            finished=self._finished(),
        )

    def _fail(self, name: str, row: int | np.int64, what: str) -> NoReturn:
        raise RolloutError(f"{self.path}: column {name!r}, row {row}: {what}")

    def _ragged(self, name: str) -> Ragged:
        column = self.columns[name]
        assert isinstance(column, Ragged), "every reader gives token columns as ragged"
        return column

    def _flat(self, name: str) -> NDArray[Any]:
        column = self.columns[name]
        if isinstance(column, Ragged) or column.ndim != 1:
            raise RolloutError(f"{self.path}: column {name!r} must hold one value a row, got lists")
        return column

    def _row_of(self, token: np.int64) -> int:
        return int(np.searchsorted(self.ids.offsets, token, side="right")) - 1

    def _check_ids(self) -> None:
        values, offsets = self.ids.values, self.ids.offsets
        empty = np.flatnonzero(np.diff(offsets) == 0)
        if len(empty):
            self._fail("input_ids", empty[0], "must hold at least one token, got none")
        if not np.issubdtype(values.dtype, np.integer):
            raise RolloutError(f"{self.path}: column 'input_ids' must hold integers, got {values.dtype}")
        negative = np.flatnonzero(values < 0)
        if len(negative):
            token = negative[0]
            self._fail("input_ids", self._row_of(token), f"tokens must be >= 0, got {values[token]}")

    def _token_values(self, name: str) -> NDArray[Any]:
        """A token column's values, one a token of `input_ids`."""
        column = self._ragged(name)
        lengths, wanted = np.diff(column.offsets), np.diff(self.ids.offsets)
        unequal = np.flatnonzero(lengths != wanted)
        if len(unequal):
            row = unequal[0]
            self._fail(name, row, f"must be as long as input_ids, {wanted[row]} tokens, got {lengths[row]}")
        if column.values.dtype.kind not in "iufb":
            raise RolloutError(f"{self.path}: column {name!r} must hold numbers, got {column.values.dtype}")
        return column.values

    def _mask(self) -> NDArray[np.uint8]:
        values = self._token_values("completion_mask")
        wrong = np.flatnonzero((values != 0) & (values != 1))
        if len(wrong):
            token = wrong[0]
            self._fail("completion_mask", self._row_of(token), f"must hold 0 and 1 only, got {values[token]}")
        return values.astype(np.uint8)

    def _old_log_probs(self) -> NDArray[np.float32] | None:
        if "old_log_probs" not in self.columns:
            return None
        values = self._token_values("old_log_probs").astype(np.float32)
        missing = np.flatnonzero(np.isnan(values))
        if len(missing):
            self._fail("old_log_probs", self._row_of(missing[0]), "must hold a number a token, got NaN or null")
        return values

    def _integers(self, name: str) -> NDArray[np.int64]:
        values = self._flat(name)
        if not np.issubdtype(values.dtype, np.integer):
            raise RolloutError(f"{self.path}: column {name!r} must hold an integer a row, got {values.dtype}")
        return values.astype(np.int64)

    def _uid(self) -> NDArray[np.int64]:
        if "uid" not in self.columns:
            return np.arange(self.num_rows)
        values = self._integers("uid")
        negative = np.flatnonzero(values < 0)
        if len(negative):
            self._fail("uid", negative[0], f"must be >= 0, got {values[negative[0]]}")
        order = np.argsort(values, kind="stable")
        repeated = order[1:][np.diff(values[order]) == 0]
        if len(repeated):
            self._fail("uid", repeated.min(), f"must be unique, got {values[repeated.min()]} again")
        return values

    def _rollout_id(self) -> NDArray[Any]:
        if "rollout_id" not in self.columns:
            return np.arange(self.num_rows)
        values = self._flat("rollout_id")
        if values.dtype.kind in "OU":
            others = [row for row, value in enumerate(values) if not isinstance(value, str)]
            if others:
                self._fail("rollout_id", others[0], f"must be a string as the others, got {values[others[0]]!r}")
            return values.astype(np.str_)
        return self._integers("rollout_id")

    def _rewards(self) -> dict[str, NDArray[np.float64]]:
        rewards = {}
        for column in self.columns:
            if column != "reward" and not column.startswith(REWARD_PREFIX):
                continue
            name = column.removeprefix(REWARD_PREFIX)
            if name in rewards:
                raise RolloutError(f"{self.path}: columns 'reward' and 'rewards/reward' are one reward, got both")
            rewards[name] = self._reward(column)
        return rewards

    def _reward(self, name: str) -> NDArray[np.float64]:
        values = self._flat(name)
        try:
            values = values.astype(np.float64)
        except (ValueError, TypeError) as error:
            raise RolloutError(f"{self.path}: column {name!r} must hold a number a row: {error}") from error
        infinite = np.flatnonzero(np.isinf(values))
        if len(infinite):
            self._fail(name, infinite[0], f"must be finite, or NaN for not applicable, got {values[infinite[0]]}")
        return values

    def _finished(self) -> NDArray[np.bool_]:
        if "finished" not in self.columns:
            return np.ones(self.num_rows, np.bool_)
        values = self._flat("finished")
        if values.dtype.kind not in "biu" or not np.isin(values, (0, 1)).all():
            raise RolloutError(f"{self.path}: column 'finished' must hold true or false a row, got {values.dtype}")
        return values.astype(np.bool_)


def _num_rows(column: Ragged | NDArray[Any]) -> int:
    return len(column.offsets) - 1 if isinstance(column, Ragged) else len(np.atleast_1d(column))
