"""What an HTML report is made of, read from the folder of `treepack score` or of a `StepRecorder`."""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from treepack.scoring.advantages import combine_rewards
from treepack.scoring.errors import OptionError, RolloutError
from treepack.scoring.inspect_rows import Ints, SortedRows
from treepack.scoring.inspect_sharing import sharing
from treepack.scoring.recorder import RecordedStep, read_recorded_step, recorded_steps
from treepack.scoring.report import RowReport, StepReport
from treepack.scoring.rollout_files import REWARD_PREFIX
from treepack.scoring.rollouts import Rollouts, bundled_rollouts, read_rollouts
from treepack.scoring.score_options import RECORD, REPORT, SCORED

Columns = dict[str, list[Any]]
Place = tuple[int, int, int]
"""Step, micro-batch, rank; from 0."""

REPLAY = "replay.json"
NO_TREES = "no prefix trees: the folder keeps no tokens (treepack score --record does), and its rollouts are not found"


@dataclass(frozen=True, eq=False)
class PlacedRow:
    """The samples of one packed row.

    Attributes:
        place: where it was.
        rollouts: what holds the samples.
        rows: (n,) their indices in it.
        rewards, advantages: (n,) float64, NaN = none.
    """

    place: Place
    rollouts: Rollouts
    rows: Ints
    rewards: NDArray[np.float64]
    advantages: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class RunData:
    """A run, as a report shows it.

    Attributes:
        title: what it is, with the folder's name.
        summary: names and values of its figures.
        notes: what a reader should know.
        steps: its optimizer steps.
        samples: a value a sample in each column, None = none: uid, group_id, rollout_id, `rewards/<name>`, reward,
            advantage, step, micro_batch, rank, trained_tokens, reason, and tokens where they are known.
        rows: the packed rows whose tokens are there, in order of place.
        differences: what a replay found different, a value a sample in each column; empty without one.
    """

    title: str
    summary: list[tuple[str, str]]
    notes: list[str]
    steps: list[StepReport]
    samples: Columns
    rows: list[PlacedRow]
    differences: Columns

    @property
    def reward_columns(self) -> list[str]:
        """The sum of the rewards and each of them."""
        return ["reward", *(name for name in self.samples if name.startswith(REWARD_PREFIX))]

    def reasons(self) -> Counter[str]:
        """Samples by why they are not trained."""
        return Counter(reason for reason in self.samples["reason"] if reason)


def read_run(folder: Path, *, max_steps: int) -> RunData:
    """Read the folder of a score, or of a record, of which the last `max_steps` steps are taken.

    Raises:
        OptionError: it is neither.
        RolloutError: a file in it cannot be read.
    """
    if (folder / REPORT).is_file() and (folder / SCORED).is_file():
        return _read_score(folder, max_steps)
    if recorded_steps(folder):
        return _read_record(folder, max_steps)
    if recorded_steps(folder / RECORD):
        return _read_record(folder / RECORD, max_steps)
    raise OptionError(
        f"{folder}: must hold {REPORT} and {SCORED} (of treepack score) or step-*.parquet (of a StepRecorder)"
    )


def _read_score(folder: Path, max_steps: int) -> RunData:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        report = json.loads((folder / REPORT).read_text(encoding="utf-8"))
        samples: Columns = pq.read_table(folder / SCORED).to_pydict()
        steps = [_step_of(step) for step in report["steps"]]
    except (OSError, ValueError, KeyError, TypeError, pa.ArrowInvalid) as error:
        raise RolloutError(f"{folder}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    notes = list(report["notes"])
    if report["interrupted"]:
        notes.append("the job was interrupted: what is here was finished")
    last = {step.step for step in steps[-max_steps:]}
    by_uid = _placed_samples(samples, last)
    recorded = {number: path for number, path in recorded_steps(folder / RECORD).items() if number in last}
    rows: list[PlacedRow] = []
    if recorded:
        for path in recorded.values():
            rows += _place_rows(read_recorded_step(path).rollouts, by_uid)
    else:
        rollouts = _rollouts_of(report)
        rows = [] if rollouts is None else _place_rows(rollouts, by_uid)
    if not rows:
        notes.append(NO_TREES)
    differences = _read_replay(folder / RECORD, notes)
    return RunData(
        f"treepack score: {folder.resolve().name}", _score_summary(report), notes, steps, samples, rows, differences
    )


def _step_of(step: Mapping[str, Any]) -> StepReport:
    return StepReport(step["step"], step["groups"], tuple(RowReport(**row) for row in step["rows"]))


def _placed_samples(samples: Columns, steps: set[int]) -> dict[int, tuple[Place, float, float]]:
    """Place, reward and advantage of the samples of these steps, by uid."""
    places = zip(samples["step"], samples["micro_batch"], samples["rank"])
    outcomes = zip(samples["reward"], samples["advantage"])
    return {
        uid: (place, _nan_if_none(reward), _nan_if_none(advantage))
        for uid, place, (reward, advantage) in zip(samples["uid"], places, outcomes)
        if place[0] in steps
    }


def _rollouts_of(report: Mapping[str, Any]) -> Rollouts | None:
    """The rollouts that were scored, if they are where they were."""
    path = Path(report["rollouts"])
    try:
        return read_rollouts(bundled_rollouts() if report["options"]["rollouts"] is None else path)
    except RolloutError:
        return None


def _place_rows(rollouts: Rollouts, by_uid: Mapping[int, tuple[Place, float, float]]) -> list[PlacedRow]:
    at: dict[Place, list[int]] = {}
    for row, uid in enumerate(rollouts.uid.tolist()):
        if uid in by_uid:
            at.setdefault(by_uid[uid][0], []).append(row)
    placed = []
    for place, rows in sorted(at.items()):
        outcomes = [by_uid[uid][1:] for uid in rollouts.uid[rows].tolist()]
        rewards, advantages = np.array(outcomes, np.float64).T
        placed.append(PlacedRow(place, rollouts, np.array(rows), rewards, advantages))
    return placed


def _score_summary(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("rollouts", str(report["rollouts"])),
        ("model", str(report["model"] or "none")),
        ("optimizer steps", f"{report['optimizer_steps']:,}"),
        ("groups", f"{report['groups']:,}"),
        ("samples", f"{report['samples']:,}"),
        ("raw tokens", f"{report['raw_tokens']:,}"),
        ("forwarded tokens", f"{report['unique_tokens']:,}"),
        ("packing ratio", _number(report["packing_ratio"])),
        ("attention-pair ratio", _number(report["attention_pair_ratio"])),
        ("padding", _percent(report["padding"])),
        ("imbalance", _percent(report["imbalance"])),
        ("mean reward", _number(report["reward"])),
        ("trained samples", f"{report['trained_samples']:,}"),
        ("seconds", f"{sum(report['seconds'].values()):,.1f}"),
    ]


def _read_record(folder: Path, max_steps: int) -> RunData:
    files = recorded_steps(folder)
    taken = list(files.items())[-max_steps:]
    samples: Columns = {}
    steps, rows = [], []
    for number, path in taken:
        recorded = read_recorded_step(path)
        columns = _sample_columns(recorded, path)
        _append(samples, columns)
        placed = _place_rows(recorded.rollouts, _placed_samples(columns, {number}))
        steps.append(_step_report(recorded, placed, columns["trained_tokens"]))
        rows += placed
    notes = []
    if len(files) > len(taken):
        notes.append(f"the last {len(taken):,} of {len(files):,} recorded steps are shown (--max-steps)")
    differences = _read_replay(folder, notes)
    return RunData(
        f"recorded steps: {_record_name(folder)}",
        _record_summary(steps, samples),
        notes,
        steps,
        samples,
        rows,
        differences,
    )


def _sample_columns(recorded: RecordedStep, path: Path) -> Columns:
    import pyarrow.parquet as pq

    rollouts = recorded.rollouts
    reward = combine_rewards(recorded.rewards, _weights(recorded))
    return {
        "uid": rollouts.uid.tolist(),
        "group_id": rollouts.group_id.tolist(),
        "rollout_id": rollouts.rollout_id.tolist(),
        "tokens": np.diff(rollouts.offsets).tolist(),
        **{f"{REWARD_PREFIX}{name}": column.tolist() for name, column in zip(recorded.names, recorded.rewards.T)},
        "reward": reward.tolist(),
        "advantage": recorded.advantages.tolist(),
        "step": [recorded.number] * len(rollouts),
        "micro_batch": recorded.place[:, 0].tolist(),
        "rank": recorded.place[:, 1].tolist(),
        "trained_tokens": pq.read_table(path, columns=["trained_tokens"]).column(0).to_pylist(),
        "reason": [reason or None for reason in recorded.reasons],
    }


def _read_replay(folder: Path, notes: list[str]) -> Columns:
    """What `treepack replay DIR --json > DIR/replay.json` found different, with a note of it."""
    path = folder / REPLAY
    if not path.is_file():
        return {}
    try:
        replay = json.loads(path.read_text(encoding="utf-8"))
        found = [
            {"uid": one["uid"], "group_id": one["group_id"]}
            | {f"{when} {name}": _shown(one[when][name]) for when in ("recorded", "replayed") for name in one[when]}
            for one in replay["differences"]
        ]
        notes.append(f"step {replay['step']} was replayed: {len(found):,} of {replay['samples']:,} samples differ")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RolloutError(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    return {name: [one[name] for one in found] for name in found[0]} if found else {}


def _shown(value: Any) -> Any:
    """A place as text, other outcomes as they are."""
    return f"micro-batch {value[0]}, rank {value[1]}" if isinstance(value, list) else value


def _record_name(folder: Path) -> str:
    """The folder's name; that of the job where it is the record of one."""
    path = folder.resolve()
    return f"{path.parent.name}/{path.name}" if path.name == RECORD else path.name


def _weights(recorded: RecordedStep) -> Sequence[float] | None:
    """A weight for each reward column."""
    weights = recorded.settings.reward_weights
    return [weights.get(name, 1.0) for name in recorded.names] if isinstance(weights, Mapping) else weights


def _append(samples: Columns, more: Columns) -> None:
    """Add a step's columns; a column that only some steps have is None in the others."""
    before, added = (len(columns.get("uid", ())) for columns in (samples, more))
    for name in dict.fromkeys((*samples, *more)):
        samples.setdefault(name, [None] * before).extend(more.get(name, [None] * added))


def _step_report(recorded: RecordedStep, placed: Sequence[PlacedRow], trained: Sequence[int]) -> StepReport:
    """The figures of a step; its rows are packed again, as far as that takes to count them."""
    rows = []
    by_uid = dict(zip(recorded.rollouts.uid.tolist(), trained))
    for row in placed:
        found = sharing(SortedRows.sort(row.rollouts, row.rows))
        shared = recorded.settings.share_prefixes
        rows.append(
            RowReport(
                micro_batch=row.place[1],
                rank=row.place[2],
                samples=found.rows,
                raw_tokens=found.raw_tokens,
                tokens=found.tokens if shared else found.raw_tokens,
                trained_tokens=sum(by_uid[uid] for uid in row.rollouts.uid[row.rows].tolist()),
                raw_pairs=found.raw_pairs,
                pairs=found.pairs if shared else found.raw_pairs,
            )
        )
    return StepReport(recorded.number, len(np.unique(recorded.rollouts.group_id)), tuple(rows))


def _record_summary(steps: Sequence[StepReport], samples: Columns) -> list[tuple[str, str]]:
    totals = {
        name: sum(step.total(name) for step in steps)
        for name in ("samples", "raw_tokens", "tokens", "raw_pairs", "pairs")
    }
    rewards = np.array([_nan_if_none(value) for value in samples["reward"]])
    applicable = rewards[~np.isnan(rewards)]
    return [
        ("steps", f"{steps[0].step:,} to {steps[-1].step:,}"),
        ("groups", f"{sum(step.groups for step in steps):,}"),
        ("samples", f"{totals['samples']:,}"),
        ("raw tokens", f"{totals['raw_tokens']:,}"),
        ("forwarded tokens", f"{totals['tokens']:,}"),
        ("packing ratio", _number(totals["raw_tokens"] / totals["tokens"])),
        ("attention-pair ratio", _number(totals["raw_pairs"] / totals["pairs"])),
        ("mean reward", _number(float(applicable.mean()) if len(applicable) else None)),
        ("trained samples", f"{sum(not reason for reason in samples['reason']):,}"),
    ]


def _nan_if_none(value: float | None) -> float:
    return float("nan") if value is None else value


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:,.2f}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"
