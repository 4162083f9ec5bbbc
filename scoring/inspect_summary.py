"""What `treepack inspect` prints."""

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from treepack.scoring.inspect_causes import Divergence
from treepack.scoring.inspect_forecast import Setting
from treepack.scoring.inspect_kinds import ADVICE, TITLES, Example
from treepack.scoring.inspect_sharing import Sharing
from treepack.scoring.inspection import Inspection

MAX_SHOWN = 160  # characters of a part of an example
NEGLIGIBLE = 1e-3  # of the tokens forwarded


def print_inspection(found: Inspection, console: Console, *, top: int) -> None:
    """Print the findings for people: the `top` costliest divergences."""
    _print_sharing(found, console)
    _print_divergences(found, console, top)
    _print_forecasts(found, console)
    if found.recommendation is None:
        console.print("no setting fits: raise --token-budget, or --memory", highlight=False)
        return
    setting, reason = found.recommendation.setting, found.recommendation.reason
    console.print(Text(f"recommended: {_setting(setting)}", style="bold"), soft_wrap=True)
    console.print(f"  {reason}", markup=False, highlight=False, soft_wrap=True)


def _print_title(title: str, console: Console) -> None:
    console.print(Text(title, style="italic"), soft_wrap=True)


def _print_sharing(found: Inspection, console: Console) -> None:
    _print_title(f"{found.rollouts}: sharing", console)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    for column in ("rows", "raw tokens", "unique", "packing ratio", "pair ratio"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, shared in (("each group by itself", found.within_groups), ("all on one row", found.across_groups)):
        table.add_row(name, *_figures(shared))
    if len(found.by_group) > 1:
        by_ratio = sorted(found.by_group.items(), key=lambda item: item[1].packing_ratio)
        for name, (group_id, shared) in (("least", by_ratio[0]), ("most", by_ratio[-1])):
            table.add_row(f"{name}: group {group_id}", *_figures(shared))
    console.print(table)
    if found.by_group:
        low, middle, high = np.percentile([shared.packing_ratio for shared in found.by_group.values()], (10, 50, 90))
        console.print(
            f"packing ratio of {len(found.by_group):,} groups: median {middle:.2f}, 10 % below {low:.2f}, "
            f"10 % above {high:.2f}; longest row {found.longest_row:,} tokens",
            highlight=False,
        )


def _figures(shared: Sharing) -> tuple[str, ...]:
    counts = (f"{count:,}" for count in (shared.rows, shared.raw_tokens, shared.tokens))
    return (*counts, f"{shared.packing_ratio:.2f}", f"{shared.pair_ratio:.2f}")


def _print_divergences(found: Inspection, console: Console, top: int) -> None:
    divergences = found.divergences
    console.print()
    _print_title(
        f"what breaks sharing ({divergences.sampled:,} forks are sampling, {divergences.free:,} others cost nothing)",
        console,
    )
    telling = [cause for cause in divergences.causes if cause.tokens >= NEGLIGIBLE * found.within_groups.tokens]
    if not telling:
        console.print("nothing that costs a thousandth of the tokens forwarded", highlight=False)
    for number, cause in enumerate(telling[:top], 1):
        _print_cause(number, cause, found, console)
    rest = {*divergences.causes} - {*telling[:top]}
    if rest:
        tokens = sum(cause.tokens for cause in rest)
        console.print(
            f"... and {len(rest):,} more {'cause' if len(rest) == 1 else 'causes'}, {tokens:,} tokens (--top, --json)",
            highlight=False,
        )
    if not found.is_text:
        console.print("token ids: --tokenizer shows text, and tells dates and ids", highlight=False)


def _print_cause(number: int, cause: Divergence, found: Inspection, console: Console) -> None:
    within, between = cause.tokens_within_groups, cause.tokens - cause.tokens_within_groups
    share = 100 * within / found.within_groups.tokens
    console.print(
        f"{number}. [bold]{TITLES[cause.kind]}[/bold]: {cause.tokens:,} tokens again, {within:,} within groups "
        f"({share:.1f} % of theirs), {between:,} between them",
        highlight=False,
        soft_wrap=True,
    )
    others = cause.places - cause.places_within_groups
    console.print(
        f"   from token {cause.depth:,} on; forks: {cause.places_within_groups:,} within groups, {others:,} between; "
        f"{cause.groups:,} groups; such as uid {cause.uids[0]} and {cause.uids[1]}:",
        highlight=False,
        soft_wrap=True,
    )
    console.print(_example(cause.example), soft_wrap=True)
    console.print(f"   -> {ADVICE[cause.kind]}", markup=False, highlight=False, soft_wrap=True)


def _example(example: Example) -> Text:
    """...before [left | right] after..., on one line; text of rollouts is never taken for markup."""
    parts = [
        ("   ..." + _one_line(example.before)[-MAX_SHOWN:], "dim"),
        ("[", "bold"),
        (_one_line(example.left)[:MAX_SHOWN], "red"),
        (" | ", "bold"),
        (_one_line(example.right)[:MAX_SHOWN], "green"),
        ("]", "bold"),
        (_one_line(example.after)[:MAX_SHOWN] + "...", "dim"),
    ]
    return Text.assemble(*parts)


def _one_line(text: str) -> str:
    """Text without line ends and other control characters, which a terminal would obey."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def _print_forecasts(found: Inspection, console: Console) -> None:
    steps = found.forecasts[0].setting.steps
    unshared = max(one.unshared_attention_tflops for one in found.forecasts) / 1e3
    title = f"forecast: {steps} micro-batches a step, {found.model.name}; unshared attention {unshared:,.2f} PFLOP"
    console.print()
    _print_title(title, console)
    table = Table(box=None, padding=(0, 2, 0, 0))
    columns = ("ranks", "tokens", "placement", "steps", "dropped", "ratio", "busy", "GiB", "PFLOP", "time")
    for column in columns:
        table.add_column(column, justify="left" if column == "placement" else "right", no_wrap=True)
    least = min((one.device_cost for one in found.forecasts if one.packing_ratio is not None), default=1.0)
    for one in found.forecasts:
        setting = one.setting
        chosen = found.recommendation is not None and setting == found.recommendation.setting
        ratio = "none" if one.packing_ratio is None else f"{one.packing_ratio:.2f}"
        time = "none" if one.packing_ratio is None else f"{one.device_cost / least:.2f}"
        table.add_row(
            f"{setting.ranks}",
            f"{setting.token_budget:,}",
            setting.placement,
            f"{one.optimizer_steps:,}",
            f"{one.dropped_samples:,}",
            ratio,
            f"{100 * one.busy:.0f} %",
            f"{one.memory_gib:.1f}",
            f"{one.attention_tflops / 1e3:,.2f}",
            time,
            style="bold" if chosen else "",
        )
    console.print(table)
    console.print(
        "tokens: of a row; dropped: samples; busy: of the devices' time, not waiting; GiB: activations of the largest "
        "row, without weights; PFLOP: attention, forward and backward; time: of all devices, a sample, over the least",
        highlight=False,
        style="dim",
    )


def _setting(setting: Setting) -> str:
    return (
        f"--ranks {setting.ranks} --steps {setting.steps} --token-budget {setting.token_budget} "
        f"--placement {setting.placement}"
    )
