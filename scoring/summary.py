"""The table that `treepack score` ends with."""

from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from treepack.scoring.replay import Outcome, ReplayReport
from treepack.scoring.report import ScoreReport

SHOWN_DIFFERENCES = 10


def print_summary(report: ScoreReport, console: Console, folder: Path) -> None:
    """Print the report's totals, its notes, and where the files are."""
    table = Table(title=f"{report.rollouts}: scored", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    for name, value in [*_plan_lines(report), *_reward_lines(report), *_compare_lines(report), *_time_lines(report)]:
        table.add_row(name, value)
    console.print(table)
    for note in report.notes:
        console.print(f"note: {note}", markup=False, highlight=False)
    files = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_file()))
    console.print(f"written to {folder}: {files}", markup=False, highlight=False, soft_wrap=True)


def print_replay(report: ReplayReport, console: Console) -> None:
    """Print what a replay found different, the first samples by name."""
    table = Table(title=f"step {report.step}: replayed", title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column()
    table.add_row("samples", f"{report.samples:,}")
    table.add_row("moved to another row", f"{report.moved:,}")
    if report.max_reward_difference is not None:
        table.add_row("largest reward difference", f"{report.max_reward_difference:.1e}")
    table.add_row("largest advantage difference", f"{report.max_advantage_difference:.1e}")
    table.add_row("different samples", f"{len(report.differences):,}")
    console.print(table)
    for difference in report.differences[:SHOWN_DIFFERENCES]:
        was, now = _outcome(difference.recorded), _outcome(difference.replayed)
        line = f"uid {difference.uid}, group {difference.group_id}: {was} -> {now}"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    if len(report.differences) > SHOWN_DIFFERENCES:
        console.print(f"... and {len(report.differences) - SHOWN_DIFFERENCES:,} more (--json has all)")


def _outcome(outcome: Outcome) -> str:
    if outcome.place is None:
        return "not planned"
    reward = "" if outcome.reward is None else f", reward {outcome.reward:.6g}"
    reason = f", {outcome.reason}" if outcome.reason else ""
    micro_batch, rank = outcome.place
    return f"micro-batch {micro_batch}, rank {rank}{reward}, advantage {outcome.advantage:.6g}{reason}"


def _plan_lines(report: ScoreReport) -> list[tuple[str, str]]:
    options = report.options
    plan = f"{options['ranks']} ranks x {options['steps']} micro-batches x {options['token_budget']:,} tokens"
    return [
        ("model", report.model or "none"),
        ("groups, samples", f"{sum(step.groups for step in report.steps):,}, {report.total('samples'):,}"),
        ("optimizer steps", f"{len(report.steps)} ({plan})"),
        ("raw tokens", f"{report.total('raw_tokens'):,}"),
        ("unique tokens", f"{report.total('tokens'):,}"),
        ("packing ratio", _number(report.packing_ratio)),
        ("attention-pair ratio", _number(report.attention_pair_ratio)),
        ("padding", _percent(report.padding)),
        ("imbalance", _percent(report.imbalance)),
    ]


def _reward_lines(report: ScoreReport) -> list[tuple[str, str]]:
    columns = ", ".join(f"{name} {_number(mean.value, 3)}" for name, mean in report.rewards.items())
    reasons = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.not_trained.items()))
    return [
        ("mean reward", f"{_number(report.reward.value, 3)} ({columns})"),
        ("trained", f"{report.trained_samples:,} samples, {report.trained_tokens:,} tokens"),
        ("not trained, samples", reasons or "none"),
    ]


def _compare_lines(report: ScoreReport) -> list[tuple[str, str]]:
    compare = report.compare
    if compare is None:
        return []
    times = f"packed {compare.packed_s:.2f} s, each alone {compare.unshared_s:.2f} s, {compare.unshared_attention}"
    return [
        ("forward speed ratio", f"{compare.speed_ratio:.2f} (CPU time: {times})"),
        ("largest score difference", f"{compare.max_score_difference:.1e}"),
    ]


def _time_lines(report: ScoreReport) -> list[tuple[str, str]]:
    seconds = {name: value for name, value in report.seconds.items() if value}
    return [("seconds", ", ".join(f"{name} {value:.2f}" for name, value in seconds.items()))]


def _number(value: float | None, digits: int = 2) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _percent(value: float | None) -> str:
    return "none" if value is None else f"{100 * value:.1f} %"
