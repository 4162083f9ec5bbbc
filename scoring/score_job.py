"""The job of `treepack score`: rollouts -> planned steps -> packed rows -> scores and advantages -> files."""

import json
import signal
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from treepack.scoring.advantages import Estimator, Scale, combine_rewards
from treepack.scoring.collator import ScoringCollator
from treepack.scoring.compare import UnsharedForward
from treepack.scoring.display import Display
from treepack.scoring.errors import OptionError
from treepack.scoring.models import SCORER_NAME, LoadedScorer, load_scorer
from treepack.scoring.planner import StepPlanner
from treepack.scoring.plots import plot_rows, plot_tokens, plot_tree
from treepack.scoring.report import ScoreReport, report_step
from treepack.scoring.rollout_files import REWARD_PREFIX
from treepack.scoring.rollouts import Rollouts, bundled_rollouts, read_rollouts
from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID, Sample
from treepack.scoring.scored_file import ScoredFile
from treepack.scoring.step import StepScores, score_step
from treepack.scoring.trainer import LocalTrainer, ScoringArgs

PHASES = ("load", "plan", "pack", "forward", "rewards", "compare", "write")
SCORED, REPORT = "scored.parquet", "report.json"
TOKENS_PLOT, ROWS_PLOT, TREE_PLOT = "tokens.png", "rows.png", "tree.png"
OUTPUTS = (SCORED, REPORT, TOKENS_PLOT, ROWS_PLOT, TREE_PLOT)
PAD_TOKEN_ID = 0  # padding is cut off again before the forward


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to score and how.

    Attributes:
        rollouts: the rollout file; None for the bundled one.
        model: a checkpoint folder or .gguf file; None for a small seeded model.
        scorer: "reward-model", or "none" for the rollouts' own rewards alone.
        ranks: rows of a micro-batch.
        steps: micro-batches of an optimizer step.
        token_budget: tokens of a row, unique and trained each.
        limit_groups, limit_rows: keep so many groups, and rows of each group.
        estimator, scale: see `group_advantages`.
        mask_truncated: take samples that did not finish out of the loss.
        seed: of the seeded weights.
        compare: also run each sequence alone.
        out: the folder written to.
    """

    rollouts: Path | None = None
    model: Path | None = None
    scorer: Literal["reward-model", "none"] = "reward-model"
    ranks: int = 2
    steps: int = 2
    token_budget: int = 8192
    limit_groups: int | None = None
    limit_rows: int | None = None
    estimator: Estimator = "grpo"
    scale: Scale = "group"
    mask_truncated: bool = False
    seed: int = 0
    compare: bool = False
    out: Path = Path("treepack-score")

    def __post_init__(self) -> None:
        if self.scorer == "none" and (self.compare or self.model is not None):
            raise OptionError("--compare and --model need a scorer's model, got --scorer none")


def score_rollouts(options: ScoreOptions, display: Display) -> ScoreReport:
    """Run the job and write scored.parquet, report.json and the plots to `options.out`.

    A KeyboardInterrupt while steps are scored ends the job early: what was finished is written and the report says
    `interrupted`.

    Raises:
        OptionError, RolloutError, ModelError: the options, the rollouts or the model cannot be used.
    """
    _prepare_folder(options)
    clock = PhaseClock()
    with clock.phase("load"):
        display.phase("reading rollouts")
        rollouts = read_rollouts(options.rollouts)
        scorer = _load_scorer(options, rollouts, display)
    job = _ScoreJob(options, rollouts, scorer, clock, display)
    for name in OUTPUTS:  # an earlier run's; only now, so that a mistake costs nobody theirs
        (options.out / name).unlink(missing_ok=True)
    with ScoredFile(
        options.out / SCORED, job.reward_names, string_rollout_ids=rollouts.rollout_id.dtype.kind == "U"
    ) as file:
        try:
            job.score_steps(file)
        except KeyboardInterrupt:
            job.report.interrupted = True
    display.phase("writing the report and the plots")
    with _held_interrupts():
        job.write_report()
    return job.report


def _prepare_folder(options: ScoreOptions) -> None:
    """Make the output folder and try that it can be written."""
    folder = options.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"--out {folder}: cannot be written: {error.strerror}") from error
    if options.rollouts and options.rollouts.resolve() in [(folder / name).resolve() for name in OUTPUTS]:
        raise OptionError(f"--out {folder}: the job would write over the rollouts, {options.rollouts}")


class PhaseClock:
    """Wall-clock seconds by phase."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the block's time to phase `name`."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def add(self, name: str, seconds: float) -> None:
        """Add time that was measured elsewhere."""
        self.seconds[name] += seconds


@contextmanager
def _held_interrupts() -> Iterator[None]:
    """Let Ctrl-C wait for the end of the block, so that what it writes is whole."""
    held: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: held.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous)
    if held:
        raise KeyboardInterrupt


def _load_scorer(options: ScoreOptions, rollouts: Rollouts, display: Display) -> LoadedScorer | None:
    if options.scorer == "none":
        if not rollouts.rewards:
            raise OptionError(
                "the rollouts must have a column 'reward' or 'rewards/<name>' under --scorer none, got none"
            )
        return None
    if SCORER_NAME in rollouts.rewards:
        raise OptionError(f"the rollouts must not have a column 'rewards/{SCORER_NAME}': it is the scorer's own")
    display.phase("loading the model" if options.model else "making a small seeded model")
    kept = np.concatenate(rollouts.group_rows(limit_groups=options.limit_groups, limit_rows=options.limit_rows))
    return load_scorer(
        options.model,
        num_tokens=int(rollouts.input_ids.max()) + 1,
        longest_row=int(np.diff(rollouts.offsets)[kept].max()),
        token_budget=options.token_budget,
        seed=options.seed,
    )


class _ScoreJob:
    """The state of one run, a step at a time."""

    def __init__(
        self,
        options: ScoreOptions,
        rollouts: Rollouts,
        loaded: LoadedScorer | None,
        clock: PhaseClock,
        display: Display,
    ):
        self.options = options
        self.rollouts = rollouts
        self.clock = clock
        self.display = display
        self.scorer = loaded.scorer if loaded else None
        scorers = [self.scorer] if self.scorer else []
        self.reward_names = [*sorted(rollouts.rewards), *(scorer.name for scorer in scorers)]
        self.trainer = LocalTrainer(
            model=self.scorer.model if self.scorer else torch.nn.Identity(),
            scorers=scorers,
            args=ScoringArgs(
                advantage_estimator=options.estimator,
                scale_rewards=options.scale,
                mask_truncated_completions=options.mask_truncated,
            ),
        )
        self.unshared: UnsharedForward | None = None
        if self.scorer and options.compare:
            self.unshared = UnsharedForward(self.scorer, self.trainer, self._advance)
        elif self.scorer:
            self.scorer.on_scored = self._advance
        self.report = ScoreReport(
            rollouts=str(options.rollouts or bundled_rollouts().name),
            options={name: str(value) if isinstance(value, Path) else value for name, value in asdict(options).items()},
            model=loaded.description if loaded else None,
            notes=list(loaded.notes) if loaded else [],
            seconds=clock.seconds,
        )
        self.total = sum(map(len, rollouts.group_rows(**self._limits())))
        self.row_of = {uid: row for row, uid in enumerate(rollouts.uid.tolist())}
        self.done = self.done_of_step = 0
        self.dropped: list[tuple[Sample, str]] = []  # since the last written step
        self.largest_group: list[Sample] = []  # the most raw tokens of a group on one row: the drawn tree

    def _limits(self) -> dict[str, int | None]:
        return {"limit_groups": self.options.limit_groups, "limit_rows": self.options.limit_rows}

    def score_steps(self, file: ScoredFile) -> None:
        """Plan, pack and score step after step, each written to `file` before the next begins."""
        options = self.options
        planner = StepPlanner(
            self.rollouts.samples(**self._limits()),
            num_processes=options.ranks,
            steps=options.steps,
            token_budget=options.token_budget,
            samples_per_row=0,
            scorers=self.trainer.scorers,
            metrics={},
            on_dropped=lambda group, reason: self.dropped.extend((sample, reason) for sample in group),
        )
        collator = ScoringCollator(
            PAD_TOKEN_ID, options.ranks, token_budget=options.token_budget, scorers=self.trainer.scorers
        )
        micro_batches = iter(planner)
        self.display.phase("planning and scoring")
        self._advance(0)
        while True:
            with self.clock.phase("plan"):
                step = list(islice(micro_batches, options.steps))
            if not step:
                break
            with self.clock.phase("pack"):
                batches = [collator([rows]) for rows in step]
            if self.unshared and not self.report.steps:
                with self.clock.phase("compare"):
                    self._warm_up(batches[0], step[0][0])
            scores = self._score(batches)
            if self.unshared:
                with self.clock.phase("compare"):
                    self._compare(step, scores)
            with _held_interrupts(), self.clock.phase("write"):
                self._record(step, scores, file)
            self._advance(0)
        with _held_interrupts(), self.clock.phase("write"):
            self._record_dropped(file)
        self._advance(0)

    def _advance(self, samples: int) -> None:
        """Show that so many more samples of the step at hand are through its longest phase."""
        self.done_of_step += samples
        self.display.advance(self.done + self.done_of_step, self.total)

    def _warm_up(self, batch: dict[str, Any], row: ScoredRow) -> None:
        assert self.unshared is not None
        inputs = {key: tensor[:1] for key, tensor in batch["scoring"]["scorers"]["0"].items()}
        self.unshared.warm_up(inputs, row.samples[0]["input_ids"])

    def _score(self, batches: list[dict[str, Any]]) -> StepScores:
        start, forward_before = time.perf_counter(), self._forward_s()
        scores = score_step(self.trainer, batches)
        assert scores is not None, "one process, so it is the main one"
        forward_s = self._forward_s() - forward_before
        self.clock.add("forward", forward_s)
        self.clock.add("rewards", time.perf_counter() - start - forward_s)
        return scores

    def _forward_s(self) -> float:
        return self.scorer.wall_s if self.scorer else 0.0

    def _compare(self, step: Sequence[Sequence[ScoredRow]], scores: StepScores) -> None:
        assert self.unshared is not None
        ids = {sample["uid"]: sample["input_ids"] for rows in step for row in rows for sample in row.samples}
        self.unshared.add([ids[uid] for uid in scores.uids.tolist()], scores.rewards[:, -1])
        self.report.compare = self.unshared.report()

    def _record(self, step: Sequence[Sequence[ScoredRow]], scores: StepScores, file: ScoredFile) -> None:
        number = len(self.report.steps)
        reward = combine_rewards(scores.rewards)
        place = {
            sample["uid"]: (sample, micro_batch, rank)
            for micro_batch, rows in enumerate(step)
            for rank, row in enumerate(rows)
            for sample in row.samples
        }
        lines = []
        for i, uid in enumerate(scores.uids.tolist()):
            sample, micro_batch, rank = place[uid]
            lines.append(
                self._line(sample, dict(zip(scores.names, scores.rewards[i].tolist())))
                | {
                    "reward": float(reward[i]),
                    "advantage": float(scores.advantages[i]),
                    "step": number,
                    "micro_batch": micro_batch,
                    "rank": rank,
                    "trained_tokens": int(scores.trained_tokens[i]),
                    "reason": scores.reasons[i] or None,
                }
            )
        file.write(lines)
        self._record_dropped(file)
        self.report.add_step(report_step(number, step), scores, reward)
        self.done += len(lines)
        self.done_of_step = 0
        self._keep_largest_group(step)

    def _record_dropped(self, file: ScoredFile) -> None:
        """Write the groups that the planner dropped since the last time."""
        file.write(
            [
                self._line(sample, sample["rewards"]) | {"trained_tokens": 0, "reason": reason}
                for sample, reason in self.dropped
            ]
        )
        self.report.not_trained.update(reason for _, reason in self.dropped)
        self.done += len(self.dropped)
        self.dropped.clear()

    def _line(self, sample: Sample, rewards: Mapping[str, float]) -> dict[str, Any]:
        """What scored.parquet holds of every sample, planned or not."""
        # The planner numbers rollouts anew; people want the file's ids.
        rollout_id = self.rollouts.rollout_id[self.row_of[sample["uid"]]].item()
        named = {f"{REWARD_PREFIX}{name}": value for name, value in rewards.items()}
        return {"uid": sample["uid"], "group_id": sample["group_id"], "rollout_id": rollout_id, **named}

    def _keep_largest_group(self, step: Sequence[Sequence[ScoredRow]]) -> None:
        for row in (row for rows in step for row in rows):
            by_group: dict[int, list[Sample]] = {}
            for sample in row.samples:
                if sample["uid"] != FILLER_UID:
                    by_group.setdefault(sample["group_id"], []).append(sample)
            self.largest_group = max([self.largest_group, *by_group.values()], key=_raw_tokens)

    def write_report(self) -> None:
        """Write the plots, where there is something to plot, and report.json."""
        folder = self.options.out
        with self.clock.phase("write"):
            if self.report.steps:
                plot_tokens(folder / TOKENS_PLOT, self.report)
                plot_rows(folder / ROWS_PLOT, self.report, self.options.token_budget)
                plot_tree(folder / TREE_PLOT, self.largest_group)
        (folder / REPORT).write_text(json.dumps(self.report.to_dict(), indent=1) + "\n")


def _raw_tokens(samples: Sequence[Sample]) -> int:
    return sum(len(sample["input_ids"]) for sample in samples)
