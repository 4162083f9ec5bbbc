"""`treepack inspect`: how much rollouts share, what breaks it, and what a step of them would cost."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any, get_args

import numpy as np

from treepack.scoring.display import Display
from treepack.scoring.errors import OptionError
from treepack.scoring.inspect_causes import Divergences, find_divergences
from treepack.scoring.inspect_forecast import (
    Forecast,
    ModelShape,
    Recommendation,
    Setting,
    forecast,
    read_model_shape,
    recommend,
)
from treepack.scoring.inspect_kinds import ADVICE, TITLES
from treepack.scoring.inspect_rows import SortedRows
from treepack.scoring.inspect_sharing import Sharing, sharing
from treepack.scoring.inspect_text import load_tokenizer
from treepack.scoring.planner import Placement
from treepack.scoring.rollouts import bundled_rollouts, read_rollouts


@dataclass(frozen=True, kw_only=True)
class InspectOptions:
    """What to inspect.

    Attributes:
        rollouts: the rollout file or folder; None for the bundled one.
        tokenizer: see `load_tokenizer`; None shows token ids.
        model: a checkpoint folder for the forecast; None for a dense 8B model.
        token_budgets, ranks: every pair is planned, with each placement.
        steps: micro-batches of an optimizer step.
        memory_gib: what a device has left for activations, GiB of 2^30 bytes; None for no bound.
        limit_groups: keep the first so many groups.
    """

    rollouts: Path | None = None
    tokenizer: Path | None = None
    model: Path | None = None
    token_budgets: Sequence[int] = (8192, 16384, 32768)
    ranks: Sequence[int] = (2, 8)
    steps: int = 2
    memory_gib: float | None = None
    limit_groups: int | None = None

    def __post_init__(self) -> None:
        for name, values in (("--token-budget", self.token_budgets), ("--ranks", self.ranks)):
            if not values or min(values) < 1:
                raise OptionError(f"{name} must be at least 1, got {list(values)}")


@dataclass(frozen=True)
class Inspection:
    """What was found out.

    Attributes:
        rollouts: the file.
        longest_row: tokens.
        is_text: whether examples are text, else token ids.
        by_group: what the rows of each group share, by group_id, in order of appearance.
        within_groups: the sum of these: rows of different groups share nothing.
        across_groups: what all rows share, if they all were on one row.
        divergences: what breaks it.
        model: what forecasts are of.
        forecasts: of each setting.
        recommendation: the setting to take, None where none fits.
    """

    rollouts: str
    longest_row: int
    is_text: bool
    by_group: dict[int, Sharing]
    within_groups: Sharing
    across_groups: Sharing
    divergences: Divergences
    model: ModelShape
    forecasts: tuple[Forecast, ...]
    recommendation: Recommendation | None

    def to_dict(self) -> dict[str, Any]:
        """The findings as JSON values."""
        causes = [
            {"title": TITLES[cause.kind], "advice": ADVICE[cause.kind], **asdict(cause)}
            for cause in self.divergences.causes
        ]
        return {
            "rollouts": self.rollouts,
            "groups": len(self.by_group),
            "longest_row": self.longest_row,
            "sharing": {"within_groups": _ratios(self.within_groups), "across_groups": _ratios(self.across_groups)},
            "divergences": causes,
            "forks_of_sampling": self.divergences.sampled,
            "forks_that_cost_nothing": self.divergences.free,
            "examples": "text" if self.is_text else "token ids",
            "model": asdict(self.model),
            "forecasts": [asdict(one) for one in self.forecasts],
            "recommendation": asdict(self.recommendation) if self.recommendation else None,
            "by_group": [{"group_id": group_id, **_ratios(found)} for group_id, found in self.by_group.items()],
        }


def inspect_rollouts(options: InspectOptions, display: Display) -> Inspection:
    """Inspect a rollout file.

    Raises:
        OptionError, RolloutError, ModelError: the options, the rollouts, the tokenizer or the model cannot be used.
    """
    display.phase("reading rollouts")
    rollouts = read_rollouts(options.rollouts)
    decode = None
    if options.tokenizer is not None:
        display.phase("loading the tokenizer")
        decode = load_tokenizer(options.tokenizer)
    model = ModelShape() if options.model is None else read_model_shape(options.model)
    display.phase("looking for shared prefixes")
    groups = rollouts.group_rows(limit_groups=options.limit_groups)
    rows = SortedRows.sort(rollouts, np.concatenate(groups))
    by_group = {group_id: sharing(group) for group_id, group in rows.by_group().items()}
    display.phase("looking for what breaks them")
    divergences = find_divergences(rows, decode)
    forecasts = _forecasts(options, list(rollouts.samples(limit_groups=options.limit_groups)), model, display)
    return Inspection(
        rollouts=str(options.rollouts or bundled_rollouts().name),
        longest_row=int(rows.lengths.max()),
        is_text=decode is not None,
        by_group=by_group,
        within_groups=sum(by_group.values(), Sharing(0, 0, 0, 0, 0)),
        across_groups=sharing(rows),
        divergences=divergences,
        model=model,
        forecasts=tuple(forecasts),
        recommendation=recommend(forecasts, options.memory_gib),
    )


def write_inspection(found: Inspection, path: Path) -> None:
    """Write the findings as JSON.

    Raises:
        OptionError: the file cannot be written.
    """
    try:
        path.write_text(json.dumps(found.to_dict(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--json {path}: cannot be written: {error.strerror}") from error


def _forecasts(
    options: InspectOptions, samples: list[dict[str, Any]], model: ModelShape, display: Display
) -> list[Forecast]:
    forecasts = []
    for ranks, budget, placement in product(options.ranks, options.token_budgets, get_args(Placement)):
        display.phase(f"planning {ranks} ranks x {budget:,} tokens, {placement}")
        setting = Setting(ranks=ranks, steps=options.steps, token_budget=budget, placement=placement)
        forecasts.append(forecast(samples, setting, model))
    return forecasts


def _ratios(found: Sharing) -> dict[str, Any]:
    return asdict(found) | {"packing_ratio": found.packing_ratio, "pair_ratio": found.pair_ratio}
