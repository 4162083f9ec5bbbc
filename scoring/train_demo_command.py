"""`treepack train-demo`."""

import json
import logging
import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treepack.scoring.command_errors import ExitCode, fail, one_line_errors
from treepack.scoring.config_file import ConfigOption
from treepack.scoring.display import make_display
from treepack.scoring.errors import OptionError


def train_demo(
    steps: Annotated[int, typer.Option(min=4, help="Optimizer steps, of 32 samples each.")] = 100,
    seed: Annotated[int, typer.Option(min=0, help="Of the weights of policy and judge.")] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", help="The folder to write to.")] = Path("treepack-train-demo"),
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the curve as JSON, and nothing else, on stdout.")
    ] = False,
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Train a tiny policy with TRL's asynchronous GRPO and a reward that is computed on the trainer.

    All parts are real and on this machine's CPU: a served model, TRL's rollout child, whole groups packed into prefix
    trees, a scorer, the optimizer, weight syncs. Nothing is downloaded.

    Writes to DIR:
      curve.json  the reward of each step, and a completion before and after
      curve.png

    Exit codes:
      0    the reward rose
      1    it did not, or the run failed
      2    options, or an extra is not installed
      130  interrupted
    """
    with one_line_errors(show_traceback), make_display() as display:
        display.phase("loading libraries")
        _quiet_libraries()
        try:
            from treepack.scoring.train_demo import run_demo
        except ImportError as error:
            raise OptionError(f"train-demo needs treepack's extras score and trl: {error}") from error
        report = run_demo(steps, seed, out, display)
    first, last = report.quarters
    if as_json:
        typer.echo(json.dumps(report.to_dict(), indent=1))
    else:
        console = Console()
        console.print(f"reward {first:.2f} in the first quarter of {steps} steps, {last:.2f} in the last")
        console.print(f"the policy wrote  {report.before!r}", markup=False)
        console.print(f"and writes now    {report.after!r}", markup=False)
        console.print(f"see {out / 'curve.png'}", markup=False)
    if not report.rose:
        fail(f"the reward did not rise: {first:.2f} in the first quarter, {last:.2f} in the last", ExitCode.FAILED)


def _quiet_libraries() -> None:
    """Leave stderr to the display, also in the rollout child, which inherits the environment."""
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"
    os.environ["TRANSFORMERS_VERBOSITY"] = "error"
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns of forks otherwise
    for name in ("treepack", "trl", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)
