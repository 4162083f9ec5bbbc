"""The command `treepack report`."""

from pathlib import Path
from typing import Annotated

import typer

from treepack.scoring.command_errors import one_line_errors, require_writable
from treepack.scoring.config_file import ConfigOption
from treepack.scoring.display import make_display


def html_report(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="The folder of treepack score, of its --record, or of a StepRecorder.")
    ],
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="The HTML file to write.", show_default="DIR/report.html")
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer.json, a checkpoint folder or a .gguf file: shows the text of segments.",
            show_default="token ids",
        ),
    ] = None,
    max_steps: Annotated[int, typer.Option(min=1, help="The last so many steps of a record are read.")] = 100,
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Write one HTML file of a run: its prefix trees, steps, rows, rewards, advantages, and tables.

    The file needs no network, and text of rollouts in it runs nothing.

    What a replay found different is shown too, where it lies beside the steps:
    treepack replay DIR --json > DIR/replay.json

    Exit codes:
      0    done
      1    failed while running
      2    options, a folder or a tokenizer that cannot be used
      130  interrupted
    """
    with one_line_errors(show_traceback), make_display() as display:
        if out is not None:
            require_writable("--out", out)
        display.phase("loading libraries")
        from treepack.scoring.html_report import write_report

        display.phase("reading and drawing")
        path = folder / "report.html" if out is None else out
        write_report(folder, path, tokenizer=tokenizer, max_steps=max_steps)
    typer.echo(f"written to {path}, {path.stat().st_size / 1e6:.1f} MB")
