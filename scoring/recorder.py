"""StepRecorder: what each optimizer step was made of and what it got, kept on disk, a Parquet file a step."""

import json
import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from treepack.scoring.advantages import Estimator, Scale
from treepack.scoring.errors import RolloutError
from treepack.scoring.planner import Placement
from treepack.scoring.rollout_files import REWARD_PREFIX
from treepack.scoring.rollouts import Rollouts, read_rollouts
from treepack.scoring.rows import TreeRow
from treepack.scoring.samples import FILLER_UID, Sample
from treepack.scoring.step import StepScores
from treepack.scoring.step_tables import Float64, Int64
from treepack.scoring.token_cost import DENSE_8B_TOKEN_COST

METRIC_PREFIX = "metrics/"
REFERENCE_COLUMN = "reference_ids"
_METADATA = b"treepack.step"
_TEMPORARY = ".tmp"


@dataclass(frozen=True, kw_only=True)
class RecordSettings:
    """How the recorded steps were planned and scored, which a replay does again.

    Attributes:
        token_budget, samples_per_row, share_prefixes, placement, token_cost: as given to `StepPlanner`.
        estimator, scale, reward_weights, mask_truncated_completions: as in `ScoringArgs`.
    """

    token_budget: int
    samples_per_row: int = 0
    share_prefixes: bool = True
    placement: Placement = "least_loaded"
    token_cost: float = DENSE_8B_TOKEN_COST
    estimator: Estimator = "grpo"
    scale: Scale = "group"
    reward_weights: Sequence[float] | Mapping[str, float] | None = None
    mask_truncated_completions: bool = False


@dataclass(frozen=True)
class RecordedStep:
    """One recorded step; arrays are in the order in which the planner took the samples.

    Attributes:
        number: the step's number in its folder.
        micro_batches, ranks: micro-batches of the step, and rows of each.
        names: the C reward columns, the rollouts' own first.
        num_own_names: how many are the rollouts' own; the others are scorers'.
        settings: how it was planned and scored.
        rollouts: its samples; their rewards hold all C columns.
        place: (B, 2) int64, micro-batch and rank of each sample, from 0.
        rewards: (B, C) float64, NaN = not applicable.
        advantages: (B,) float64.
        reasons: why a sample was not trained, "" where it was (see `StepScores`).
        references: the reference answer each sample was scored with (see `EBFTScorer`), (m,) int64, or None.
    """

    number: int
    micro_batches: int
    ranks: int
    names: tuple[str, ...]
    num_own_names: int
    settings: RecordSettings
    rollouts: Rollouts
    place: Int64
    rewards: Float64
    advantages: Float64
    reasons: tuple[str, ...]
    references: tuple[Int64 | None, ...]

    def samples(self) -> Iterator[Sample]:
        """The samples as the planner took them."""
        of_uid = dict(zip(self.rollouts.uid.tolist(), self.references, strict=True))
        for sample in self.rollouts.samples():
            reference = of_uid[sample["uid"]]
            yield sample if reference is None else {**sample, REFERENCE_COLUMN: reference}


class StepRecorder:
    """Writes each optimizer step to `<folder>/step-<number>.parquet`, on the main process.

    Give it to the `ScoringCollator`, which hands it the rows, and after each `score_step` give it the scores:

        scores = score_step(trainer, batches)
        if scores is not None:  # the main process
            recorder.write(scores)

    A file has a line a sample, in the order in which the planner took them, fillers left out: the columns of a rollout
    file (so that `treepack score` reads it: uid, group_id, rollout_id, input_ids, completion_mask, old_log_probs,
    finished, `rewards/<name>` of every column, the scorers' included), `metrics/<name>`, reference_ids where samples
    have one, and what the step made of it: advantage, micro_batch, rank, trained_tokens, reason. Other keys that only a
    scorer asks for are not kept. A file appears whole or not at all. Numbers go on where those in the folder end.

    Args:
        folder: made if it is not there.
        settings: how steps are planned and scored, for a replay.
        max_steps: files kept; None keeps all.
        max_bytes: bytes of all files together; None for no bound. The oldest go first, the newest always stays.

    Raises:
        ValueError: a bound is below 1.
        ModuleNotFoundError: pyarrow is not installed.
    """

    def __init__(
        self,
        folder: Path | str,
        *,
        settings: RecordSettings,
        max_steps: int | None = 1000,
        max_bytes: int | None = None,
    ) -> None:
        for name, bound in (("max_steps", max_steps), ("max_bytes", max_bytes)):
            if bound is not None and bound < 1:
                raise ValueError(f"{name} must be at least 1, got {bound}")
        _check_pyarrow()
        self.folder = Path(folder)
        self.settings = settings
        self.max_steps = max_steps
        self.max_bytes = max_bytes
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(f"step-*{_TEMPORARY}"):  # of a crash
            leftover.unlink()
        self._collated: deque[Sequence[TreeRow]] = deque()

    def collated(self, rows: Sequence[TreeRow]) -> None:
        """Keep the rows of a micro-batch until its step is scored; the collator calls it."""
        self._collated.append(rows)

    def write(self, scores: StepScores) -> Path:
        """Write the step that was scored, and remove what the bounds do not allow.

        Collated micro-batches that came before it are let go: their step was never scored.

        Raises:
            ValueError: the scores are not those of the micro-batches that were collated.
        """
        micro_batches = self._take(scores)
        recorded = recorded_steps(self.folder)
        number = max(recorded, default=-1) + 1
        path = self.folder / f"step-{number:08d}.parquet"
        _write_whole(path, _table(number, micro_batches, scores, self.settings))
        self._remove_oldest([*recorded.values(), path])
        return path

    def _take(self, scores: StepScores) -> list[Sequence[TreeRow]]:
        """The micro-batches of the step, out of those collated; the next step's may be there already."""
        wanted: set[int] = set(scores.uids.tolist())
        taken: list[Sequence[TreeRow]] = []
        found: set[int] = set()
        while self._collated:
            uids = {sample["uid"] for row in self._collated[0] for sample in row.samples} - {FILLER_UID}
            if taken and uids and not uids & wanted:
                break
            rows = self._collated.popleft()
            if uids & wanted or taken:
                taken.append(rows)
                found |= uids
        if found != wanted:
            raise ValueError(
                f"scores must be of micro-batches that were collated, got uid {min(found ^ wanted)} in one only"
            )
        return taken

    def _remove_oldest(self, paths: list[Path]) -> None:
        sizes = [path.stat().st_size for path in paths]
        for path in paths[:-1]:
            too_many = self.max_steps is not None and len(sizes) > self.max_steps
            too_large = self.max_bytes is not None and sum(sizes) > self.max_bytes
            if not (too_many or too_large):
                break
            path.unlink()
            sizes.pop(0)


def recorded_steps(folder: Path) -> dict[int, Path]:
    """The files of a recorder's folder by step number, rising."""
    numbers = ((path.stem.removeprefix("step-"), path) for path in folder.glob("step-*.parquet"))
    return dict(sorted((int(number), path) for number, path in numbers if number.isdecimal()))


def read_recorded_step(path: Path) -> RecordedStep:
    """Read one file of a `StepRecorder`.

    Raises:
        RolloutError: the file cannot be read, or is no recorded step.
    """
    rollouts = read_rollouts(path)
    import pyarrow.parquet as pq

    metadata = pq.read_schema(path).metadata or {}
    if _METADATA not in metadata:
        raise RolloutError(f"{path}: not a recorded step")
    step = json.loads(metadata[_METADATA])
    columns = pq.read_table(path, columns=["micro_batch", "rank", "advantage", "reason"]).to_pydict()
    names = tuple(step["names"])
    return RecordedStep(
        number=step["number"],
        micro_batches=step["micro_batches"],
        ranks=step["ranks"],
        names=names,
        num_own_names=step["num_own_names"],
        settings=RecordSettings(**step["settings"]),
        rollouts=rollouts,
        place=np.array([columns["micro_batch"], columns["rank"]], np.int64).T,
        rewards=np.stack([rollouts.rewards[name] for name in names], axis=1),
        advantages=np.array(columns["advantage"], np.float64),
        reasons=tuple(reason or "" for reason in columns["reason"]),
        references=_references(path, len(rollouts)),
    )


def _references(path: Path, num_samples: int) -> tuple[Int64 | None, ...]:
    import pyarrow.parquet as pq

    if REFERENCE_COLUMN not in pq.read_schema(path).names:
        return (None,) * num_samples
    column = pq.read_table(path, columns=[REFERENCE_COLUMN])[REFERENCE_COLUMN].to_pylist()
    return tuple(None if ids is None else np.array(ids, np.int64) for ids in column)


def _check_pyarrow() -> None:
    try:
        import pyarrow.parquet  # noqa: F401 - whether it is there
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError("StepRecorder needs pyarrow: pip install 'treepack[score]'") from error


def _write_whole(path: Path, table: Any) -> None:
    """Write beside, then rename: a reader finds the whole file or none, whenever the process ends."""
    import pyarrow.parquet as pq

    temporary = path.with_name(path.name + _TEMPORARY)
    with temporary.open("wb") as file:
        pq.write_table(table, file, compression="zstd")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def _table(
    number: int, micro_batches: Sequence[Sequence[TreeRow]], scores: StepScores, settings: RecordSettings
) -> Any:
    import pyarrow as pa

    samples, place = _in_planned_order(micro_batches)
    at = np.searchsorted(scores.uids, [sample["uid"] for sample in samples])
    rewards = scores.rewards[at]
    metrics = sorted({name for sample in samples for name in sample["metrics"]})
    columns = {
        "uid": [sample["uid"] for sample in samples],
        "group_id": [sample["group_id"] for sample in samples],
        "rollout_id": [sample["rollout_id"] for sample in samples],
        "input_ids": _ragged([np.asarray(sample["input_ids"], np.int64) for sample in samples]),
        "completion_mask": _ragged([np.asarray(sample["completion_mask"], np.uint8) for sample in samples]),
        "old_log_probs": _ragged([_log_probs(sample) for sample in samples]),
        "finished": [not sample.get("truncated", False) for sample in samples],
        **{f"{REWARD_PREFIX}{name}": _nullable(rewards[:, i]) for i, name in enumerate(scores.names)},
        **{
            f"{METRIC_PREFIX}{name}": _nullable([sample["metrics"].get(name, np.nan) for sample in samples])
            for name in metrics
        },
        **_reference_column(samples),
        "advantage": scores.advantages[at],
        "micro_batch": [micro_batch for micro_batch, _ in place],
        "rank": [rank for _, rank in place],
        "trained_tokens": scores.trained_tokens[at],
        "reason": pa.array([scores.reasons[i] or None for i in at.tolist()], pa.string()),
    }
    num_own_names = len({name for sample in samples for name in sample["rewards"]})
    step = {
        "number": number,
        "micro_batches": len(micro_batches),
        "ranks": len(micro_batches[0]),
        "names": scores.names,
        "num_own_names": num_own_names,
        "settings": asdict(settings),
    }
    return pa.table(columns).replace_schema_metadata({_METADATA: json.dumps(step)})


def _in_planned_order(
    micro_batches: Sequence[Sequence[TreeRow]],
) -> tuple[list[Sample], list[tuple[int, int]]]:
    """The step's samples as the planner took them, and the micro-batch and rank of each.

    The planner numbers rollouts as it takes groups, which tells the order of the groups; within one, uids do.
    """
    placed = [
        (sample, (m, rank))
        for m, rows in enumerate(micro_batches)
        for rank, row in enumerate(rows)
        for sample in row.samples
        if sample["uid"] != FILLER_UID
    ]
    first_rollout: dict[int, int] = {}
    for sample, _ in placed:
        group_id = sample["group_id"]
        first_rollout[group_id] = min(sample["rollout_id"], first_rollout.get(group_id, sample["rollout_id"]))
    placed.sort(key=lambda entry: (first_rollout[entry[0]["group_id"]], entry[0]["uid"]))
    return [sample for sample, _ in placed], [place for _, place in placed]


def _reference_column(samples: Sequence[Sample]) -> dict[str, Any]:
    """A column of lists, null for a sample without, if any sample has a reference answer."""
    import pyarrow as pa

    references = [sample.get(REFERENCE_COLUMN) for sample in samples]
    if all(reference is None for reference in references):
        return {}
    lists = [None if reference is None else np.asarray(reference, np.int64) for reference in references]
    return {REFERENCE_COLUMN: pa.array(lists, pa.large_list(pa.int64()))}


def _log_probs(sample: Sample) -> Any:
    """Untrained tokens may have no log-probability; nothing reads theirs."""
    log_probs = np.asarray(sample["old_log_probs"], np.float32)
    return np.where(np.isfinite(log_probs), log_probs, np.float32(0.0))


def _ragged(arrays: Sequence[Any]) -> Any:
    import pyarrow as pa

    offsets = np.cumsum([0, *map(len, arrays)])
    return pa.LargeListArray.from_arrays(offsets, np.concatenate(arrays))


def _nullable(values: Any) -> Any:
    """A float64 column with null for NaN."""
    import pyarrow as pa

    return pa.array(np.asarray(values, np.float64), from_pandas=True)
