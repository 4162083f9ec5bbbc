"""The job of `treepack score`: rollouts -> planned steps -> packed rows -> scores and advantages -> files."""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch

from treepack.scoring.advantages import combine_rewards
from treepack.scoring.collator import ScoringCollator
from treepack.scoring.compare import UnsharedForward
from treepack.scoring.display import Display
from treepack.scoring.errors import OptionError
from treepack.scoring.models import LoadedScorer, load_scorer, scorer_name
from treepack.scoring.phases import PhaseClock, held_interrupts
from treepack.scoring.planner import StepPlanner
from treepack.scoring.plots import plot_rows, plot_tokens, plot_tree
from treepack.scoring.processes import own_ranks
from treepack.scoring.recorder import RecordSettings, StepRecorder, recorded_steps
from treepack.scoring.references import with_references
from treepack.scoring.report import ScoreReport, report_step
from treepack.scoring.rollout_files import REWARD_PREFIX
from treepack.scoring.rollouts import Rollouts, bundled_rollouts, read_rollouts
from treepack.scoring.rows import ScoredRow
from treepack.scoring.samples import FILLER_UID, Sample
from treepack.scoring.score_options import (
    OUTPUTS,
    RECORD,
    REPORT,
    ROWS_PLOT,
    SCORED,
    TOKENS_PLOT,
    TREE_PLOT,
    ScoreOptions,
    prepare_folder,
)
from treepack.scoring.scored_file import ScoredFile
from treepack.scoring.step import StepScores, score_step
from treepack.scoring.trainer import LocalAccelerator, LocalTrainer, ScoringAccelerator, ScoringArgs

PAD_TOKEN_ID = 0  # padding is cut off again before the forward


def score_rollouts(
    options: ScoreOptions, display: Display, accelerator: ScoringAccelerator | None = None
) -> ScoreReport:
    """Run the job and write scored.parquet, report.json, the plots and, if asked to, the record to `options.out`.

    A KeyboardInterrupt while steps are scored ends the job early: what was finished is written and the report says
    `interrupted`.

    Args:
        options: the job.
        display: told how far it is.
        accelerator: the processes that share the forwards, this one alone by default. Each plans alike and scores its
            own ranks (see `own_ranks`); the main one writes.

    Returns:
        The report, without steps on other processes than the main one.

    Raises:
        OptionError, RolloutError, ModelError: the options, the rollouts or the model cannot be used.
    """
    accelerator = accelerator or LocalAccelerator()
    if options.ranks % accelerator.num_processes:
        raise OptionError(
            f"--ranks must be a multiple of the {accelerator.num_processes} processes, got {options.ranks}"
        )
    prepare_folder(options)
    clock = PhaseClock()
    with clock.phase("load"):
        display.phase("reading rollouts")
        rollouts = read_rollouts(options.rollouts)
        scorer = _load_scorer(options, rollouts, display)
    job = _ScoreJob(options, rollouts, scorer, clock, display, accelerator)
    if not accelerator.is_main_process:
        job.score_steps(None, None)
        return job.report
    _remove_earlier(options.out)  # only now, so that a mistake costs nobody theirs
    recorder = None
    if options.record:
        recorder = StepRecorder(options.out / RECORD, settings=_settings(options), max_steps=None)
    with ScoredFile(
        options.out / SCORED, job.reward_names, string_rollout_ids=rollouts.rollout_id.dtype.kind == "U"
    ) as file:
        try:
            job.score_steps(file, recorder)
        except KeyboardInterrupt:
            job.report.interrupted = True
    display.phase("writing the report and the plots")
    with held_interrupts():
        job.write_report()
    return job.report


def _remove_earlier(folder: Path) -> None:
    """Remove what an earlier run wrote."""
    for path in [*(folder / name for name in OUTPUTS), *recorded_steps(folder / RECORD).values()]:
        path.unlink(missing_ok=True)


def _settings(options: ScoreOptions) -> RecordSettings:
    return RecordSettings(
        token_budget=options.token_budget,
        placement=options.placement,
        estimator=options.estimator,
        scale=options.scale,
        mask_truncated_completions=options.mask_truncated,
    )


def _load_scorer(options: ScoreOptions, rollouts: Rollouts, display: Display) -> LoadedScorer | None:
    if options.scorer in ("none", "ebft") and not rollouts.rewards:
        raise OptionError(
            f"the rollouts must have a column 'reward' or 'rewards/<name>' under --scorer {options.scorer}, got none"
        )
    if options.scorer == "none":
        return None
    name = scorer_name(options.scorer)
    if name in rollouts.rewards:
        raise OptionError(f"the rollouts must not have a column 'rewards/{name}': it is the scorer's own")
    display.phase("loading the model" if options.model else "making a small seeded model")
    kept = np.concatenate(rollouts.group_rows(limit_groups=options.limit_groups, limit_rows=options.limit_rows))
    return load_scorer(
        options.scorer,
        options.model,
        vocab_size=rollouts.vocab_size,
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
        accelerator: ScoringAccelerator,
    ):
        self.options = options
        self.rollouts = rollouts
        self.clock = clock
        self.display = display
        self.scorer = loaded.scorer if loaded else None
        scorers = [self.scorer] if self.scorer else []
        self.reward_names = [*sorted(rollouts.rewards), *(scorer.name for scorer in scorers)]
        self.trainer = LocalTrainer(
            model=self.scorer.inner.model if self.scorer else torch.nn.Identity(),
            scorers=scorers,
            args=ScoringArgs(
                advantage_estimator=options.estimator,
                scale_rewards=options.scale,
                mask_truncated_completions=options.mask_truncated,
            ),
            accelerator=accelerator,
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
        self.done = self.done_of_step = self.steps_scored = 0
        self.dropped: list[tuple[Sample, str]] = []  # since the last written step
        self.largest_group: list[Sample] = []  # the most raw tokens of a group on one row: the drawn tree

    def _limits(self) -> dict[str, int | None]:
        return {"limit_groups": self.options.limit_groups, "limit_rows": self.options.limit_rows}

    def score_steps(self, file: ScoredFile | None, recorder: StepRecorder | None) -> None:
        """Plan, pack and score step after step, each written before the next begins, where there is a file."""
        options = self.options
        collator = ScoringCollator(
            PAD_TOKEN_ID,
            options.ranks,
            token_budget=options.token_budget,
            recorder=recorder,
            scorers=self.trainer.scorers,
        )
        micro_batches = iter(self._planner())
        self.display.phase("planning and scoring")
        self._advance(0)
        while True:
            with self.clock.phase("plan"):
                step = list(islice(micro_batches, options.steps))
            if not step:
                break
            with self.clock.phase("pack"):
                batches = [own_ranks(collator([rows]), self.trainer.accelerator) for rows in step]
            if self.unshared and not self.steps_scored:
                with self.clock.phase("compare"):
                    self._warm_up(batches[0], step[0][self.trainer.accelerator.process_index])
            scores = self._score(batches)
            self.steps_scored += 1
            if self.unshared:
                with self.clock.phase("compare"):
                    self.unshared.add(step, scores)
                    self.report.compare = self.unshared.report()
            if file is not None and scores is not None:
                with held_interrupts(), self.clock.phase("write"):
                    self._write(step, scores, file)
                    if recorder is not None:
                        recorder.write(scores)
            self._advance(0)
        if file is not None:
            with held_interrupts(), self.clock.phase("write"):
                self._write_dropped(file)
        self._advance(0)

    def _planner(self) -> StepPlanner:
        options = self.options
        samples = self.rollouts.samples(**self._limits())
        return StepPlanner(
            with_references(samples) if options.scorer == "ebft" else samples,
            num_processes=options.ranks,
            steps=options.steps,
            token_budget=options.token_budget,
            samples_per_row=0,
            scorers=self.trainer.scorers,
            metrics={},
            placement=options.placement,
            on_dropped=lambda group, reason: self.dropped.extend((sample, reason) for sample in group),
        )

    def _advance(self, samples: int) -> None:
        """Show that so many more samples of the step at hand are through its longest phase."""
        self.done_of_step += samples
        self.display.advance(self.done + self.done_of_step, self.total)

    def _warm_up(self, batch: dict[str, Any], row: ScoredRow) -> None:
        assert self.unshared is not None
        inputs = {key: tensor[:1] for key, tensor in batch["scoring"]["scorers"]["0"].items()}
        self.unshared.warm_up(inputs, row)

    def _score(self, batches: list[dict[str, Any]]) -> StepScores | None:
        start, forward_before = time.perf_counter(), self._forward_s()
        scores = score_step(self.trainer, batches)
        forward_s = self._forward_s() - forward_before
        self.clock.add("forward", forward_s)
        self.clock.add("rewards", time.perf_counter() - start - forward_s)
        return scores

    def _forward_s(self) -> float:
        return self.scorer.wall_s if self.scorer else 0.0

    def _write(self, step: Sequence[Sequence[ScoredRow]], scores: StepScores, file: ScoredFile) -> None:
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
        self._write_dropped(file)
        self.report.add_step(report_step(number, step), scores, reward)
        self.done += len(lines)
        self.done_of_step = 0
        self._keep_largest_group(step)

    def _write_dropped(self, file: ScoredFile) -> None:
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
