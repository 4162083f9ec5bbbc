"""The commands of `treepack`. What is heavy is imported only once a command has its options right."""

import json
import logging
import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treepack import __version__
from treepack.scoring.command_errors import ExitCode, fail, is_helper, one_line_errors
from treepack.scoring.config_file import ConfigOption
from treepack.scoring.display import make_display
from treepack.scoring.errors import OptionError
from treepack.scoring.html_report_command import html_report
from treepack.scoring.inspect_command import inspect
from treepack.scoring.train_demo_command import train_demo

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)


class ScorerChoice(StrEnum):
    """--scorer."""

    REWARD_MODEL = "reward-model"
    EBFT = "ebft"
    LOG_PROB = "log-prob"
    NONE = "none"


class ReplayScorerChoice(StrEnum):
    """--scorer of a replay."""

    REWARD_MODEL = "reward-model"
    EBFT = "ebft"
    LOG_PROB = "log-prob"


class PlacementChoice(StrEnum):
    """--placement."""

    LEAST_LOADED = "least_loaded"
    BALANCED = "balanced"


class EstimatorChoice(StrEnum):
    """--estimator."""

    GRPO = "grpo"
    RLOO = "rloo"


class ScaleChoice(StrEnum):
    """--scale."""

    GROUP = "group"
    BATCH = "batch"
    NONE = "none"


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"treepack {__version__}")
        raise typer.Exit


@app.callback()
def treepack(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Tree-packed prefix-sharing attention, and the scoring core of async GRPO."""


@app.command()
def score(
    rollouts: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROLLOUTS",
            help="A .npz, .parquet or .jsonl file, or a folder of them.",
            show_default="the bundled ones",
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A transformers checkpoint folder or a .gguf file.",
            show_default="a small seeded one",
        ),
    ] = None,
    scorer: Annotated[
        ScorerChoice,
        typer.Option(
            help="The reward computed here: a reward model's; ebft: likeness to the best-rewarded row of the group; "
            "log-prob: of the completion; none: leave the rollouts' own."
        ),
    ] = ScorerChoice.REWARD_MODEL,
    ranks: Annotated[int, typer.Option(min=1, help="Rows of a micro-batch, one a rank.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Micro-batches of an optimizer step.")] = 2,
    token_budget: Annotated[int, typer.Option(min=1, help="Tokens of a row, unique and trained each.")] = 8192,
    placement: Annotated[
        PlacementChoice, typer.Option(help="How samples are laid on rows.")
    ] = PlacementChoice.LEAST_LOADED,
    limit_groups: Annotated[
        int | None, typer.Option(min=1, help="Keep the first so many groups.", show_default="all")
    ] = None,
    limit_rows: Annotated[
        int | None, typer.Option(min=1, help="Keep the first so many rows of each group.", show_default="all")
    ] = None,
    estimator: Annotated[EstimatorChoice, typer.Option(help="How rewards become advantages.")] = EstimatorChoice.GRPO,
    scale: Annotated[
        ScaleChoice, typer.Option(help="The standard deviation that advantages are divided by.")
    ] = ScaleChoice.GROUP,
    mask_truncated: Annotated[
        bool, typer.Option("--mask-truncated", help="Take samples that did not finish out of the loss.")
    ] = False,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights that no file holds.")] = 0,
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run each sequence alone: speed ratio, largest score difference.")
    ] = False,
    record: Annotated[bool, typer.Option("--record", help="Keep every step in DIR/record, for a replay.")] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the report as JSON, and nothing else, on stdout.")
    ] = False,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path("treepack-score"),
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Plan, pack and score rollouts as an async GRPO trainer would.

    Writes to DIR, in place of an earlier run's files:
      scored.parquet  a line a sample: rewards, advantage, where it trains, or why not
      report.json     the figures of the job, its steps and rows
      tokens.png, rows.png, tree.png
      record/         under --record, a file a step

    On several processes: torchrun --nproc_per_node 2 --no-python treepack score ... Process p of P scores ranks p,
    p + P, ...; the files are the same.

    Exit codes:
      0    done
      1    failed while running
      2    options, rollouts or a model that cannot be used
      3    every group was dropped
      130  interrupted: what was finished is written, and report.json says so
    """
    with one_line_errors(show_traceback), make_display(quiet=is_helper()) as display:
        display.phase("loading libraries")
        _quiet_libraries()
        from treepack.scoring.allocator import keep_freed_memory
        from treepack.scoring.processes import joined_processes
        from treepack.scoring.score_job import score_rollouts
        from treepack.scoring.score_options import ScoreOptions

        keep_freed_memory()
        with joined_processes() as accelerator:
            report = score_rollouts(
                ScoreOptions(
                    rollouts=rollouts,
                    model=model,
                    scorer=scorer.value,
                    ranks=ranks,
                    steps=steps,
                    token_budget=token_budget,
                    placement=placement.value,
                    limit_groups=limit_groups,
                    limit_rows=limit_rows,
                    estimator=estimator.value,
                    scale=scale.value,
                    mask_truncated=mask_truncated,
                    seed=seed,
                    compare=compare,
                    record=record,
                    out=out,
                ),
                display,
                accelerator,
            )
    if is_helper():
        return
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        from treepack.scoring.summary import print_summary

        print_summary(report, Console(), out)
    if report.interrupted:
        fail(f"interrupted after {len(report.steps)} optimizer steps, which are written", ExitCode.INTERRUPTED)
    if not report.steps:
        reasons = ", ".join(f"{reason} {count}" for reason, count in report.not_trained.items())
        fail(f"every group was dropped, by reason and samples: {reasons}", ExitCode.NOTHING_TO_SCORE)


@app.command()
def replay(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of a StepRecorder, or of treepack score --record.")
    ],
    step: Annotated[int | None, typer.Option(min=0, help="The step's number.", show_default="the last one")] = None,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="Compute the scorer's rewards again with this checkpoint folder or .gguf file.",
            show_default="rewards as recorded",
        ),
    ] = None,
    scorer: Annotated[
        ReplayScorerChoice | None, typer.Option(help="What --model computes.", show_default="reward-model")
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Of the weights that --model's file lacks.", show_default="0")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON on stdout.")] = False,
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Plan and score a recorded step again, and show what comes out differently.

    Exit codes:
      0    all as recorded
      1    failed while running
      2    options, a record or a model that cannot be used
      4    a sample has another place, reward, advantage or reason
      130  interrupted
    """
    with one_line_errors(show_traceback), make_display() as display:
        display.phase("loading libraries")
        if model is None and (scorer is not None or seed is not None):
            raise OptionError("--scorer and --seed need --model: without one, rewards are as recorded")
        _quiet_libraries()
        from treepack.scoring.replay import replay_step

        display.phase("replaying")
        chosen = scorer or ReplayScorerChoice.REWARD_MODEL
        report = replay_step(folder, step=step, scorer=chosen.value, model=model, seed=seed or 0)
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        from treepack.scoring.summary import print_replay

        print_replay(report, Console())
    if report.differences:
        raise typer.Exit(ExitCode.DIFFERENT)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on stdout.")] = False,
    shape: Annotated[
        str | None,
        typer.Option(
            help='Instead, count the work of a forest such as "1024+12x256" (a prompt and twelve completions), '
            '"16x64+4x48" or "512+4x256+4x128,700", by method, and say which one would be taken.'
        ),
    ] = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Show versions, devices and attention backends, and check packed against separate attention on this machine.

    Exit codes:
      0    all well
      1    the check failed, or failed to run
      2    the shape cannot be read
      130  interrupted
    """
    if shape is not None:
        _count_shape(shape, as_json, show_traceback)
        return
    with one_line_errors(show_traceback), make_display() as display:
        display.phase("loading libraries")
        from treepack.scoring.doctor import examine, print_findings

        display.phase("checking attention")
        findings = examine()
    if as_json:
        typer.echo(json.dumps(findings.to_dict(), indent=1))
    else:
        print_findings(findings, Console())
    if not findings.ok:
        fail("packed attention differs from separate attention on this machine", ExitCode.FAILED)


def _count_shape(shape: str, as_json: bool, show_traceback: bool) -> None:
    with one_line_errors(show_traceback), make_display() as display:
        display.phase("loading libraries")
        from treepack.scoring.shape import examine_shape, print_shape

        findings = examine_shape(shape)
    if as_json:
        typer.echo(json.dumps(findings.to_dict(), indent=1))
    else:
        print_shape(findings, Console())


@app.command()
def bench(
    suites: Annotated[
        list[str] | None, typer.Argument(metavar="SUITE", help="Such as packing.", show_default="all")
    ] = None,
    smoke: Annotated[bool, typer.Option("--smoke", help="One round on tiny inputs: does it run?")] = False,
    baseline: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="An earlier run's folder.",
            show_default="benchmarks/results/baseline",
        ),
    ] = None,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path("treepack-bench"),
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Run benchmark suites of this checkout and compare their speed ratios with a baseline's.

    Every suite checks for equal results before it times anything, and times both sides in turn. Writes <suite>.json,
    .md, .png and .log, and summary.md, to DIR.

    Exit codes:
      0    every suite ran and reached its bounds
      1    a suite failed
      2    options that cannot be used, or no checkout
      4    a bound was missed
      130  interrupted
    """
    with one_line_errors(show_traceback), make_display() as display:
        display.phase("loading libraries")
        from treepack.scoring.bench import benchmarks_folder, print_results, run_suites, suite_names

        folder = benchmarks_folder()
        results = run_suites(
            folder,
            suites or suite_names(folder),
            out,
            baseline=baseline or folder / "results" / "baseline",
            smoke=smoke,
            display=display,
        )
    print_results(results, Console())
    if any(result.problem and not result.skipped for result in results):
        fail("a suite failed", ExitCode.FAILED)
    if not smoke and any(result.missed for result in results):
        raise typer.Exit(ExitCode.DIFFERENT)


app.command()(inspect)
app.command()(train_demo)
app.command("report")(html_report)


def _quiet_libraries() -> None:
    """Leave stderr to the display: what transformers and the planner would log there, the report says."""
    os.environ["TQDM_DISABLE"] = "1"  # read when tqdm is imported; transformers' GGUF reader has no switch of its own
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    logging.getLogger("treepack.scoring.planner").setLevel(logging.ERROR)
