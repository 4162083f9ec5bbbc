"""The command `treepack inspect`."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from treepack.scoring.command_errors import one_line_errors, require_writable
from treepack.scoring.config_file import ConfigOption
from treepack.scoring.display import make_display


def inspect(
    rollouts: Annotated[
        Path | None,
        typer.Argument(
            metavar="ROLLOUTS", help="A .npz, .parquet or .jsonl file, or a folder of them.", show_default="bundled"
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH",
            help="A tokenizer.json, a checkpoint folder or a .gguf file: shows text, and tells dates, ids and "
            "re-tokenised text from other differences.",
            show_default="token ids",
        ),
    ] = None,
    token_budget: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens of a row to plan for; repeat it.", show_default="8192, 16384, 32768"),
    ] = None,
    ranks: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Rows of a micro-batch to plan for; repeat it.", show_default="2, 8"),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Micro-batches of an optimizer step.")] = 2,
    model: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="A checkpoint folder, for the forecast.", show_default="a dense 8B model's shape"
        ),
    ] = None,
    memory: Annotated[
        float | None,
        typer.Option(min=0, metavar="GIB", help="What a device has left for activations.", show_default="no bound"),
    ] = None,
    limit_groups: Annotated[
        int | None, typer.Option(min=1, help="Keep the first so many groups.", show_default="all")
    ] = None,
    top: Annotated[int, typer.Option(min=1, help="Divergences to print.")] = 10,
    json_file: Annotated[
        Path | None, typer.Option("--json", metavar="FILE", help="Also write all findings as JSON.", show_default=False)
    ] = None,
    config: ConfigOption = None,
    show_traceback: Annotated[
        bool, typer.Option("--traceback", help="Show where an unexpected error came from.")
    ] = False,
) -> None:
    """Show how much rollouts share, what breaks it, and what steps of them would cost.

    Places where rows part are ranked by the tokens that are computed again behind them. Where rollouts were sampled
    differently they are meant to part: these places are counted only.

    Exit codes:
      0    done
      1    failed while running
      2    options, rollouts, a tokenizer or a model that cannot be used
      130  interrupted
    """
    with one_line_errors(show_traceback), make_display() as display:
        if json_file is not None:
            require_writable("--json", json_file)
        display.phase("loading libraries")
        from treepack.scoring.inspection import InspectOptions, inspect_rollouts, write_inspection

        found = inspect_rollouts(
            InspectOptions(
                rollouts=rollouts,
                tokenizer=tokenizer,
                model=model,
                token_budgets=token_budget or (8192, 16384, 32768),
                ranks=ranks or (2, 8),
                steps=steps,
                memory_gib=memory,
                limit_groups=limit_groups,
            ),
            display,
        )
        if json_file is not None:
            write_inspection(found, json_file)
    from treepack.scoring.inspect_summary import print_inspection

    print_inspection(found, Console(), top=top)
