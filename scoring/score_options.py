"""What `treepack score` is asked to do, and the folder it writes to."""

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from treepack.scoring.advantages import Estimator, Scale
from treepack.scoring.errors import OptionError
from treepack.scoring.models import ScorerKind
from treepack.scoring.planner import Placement

SCORED, REPORT, RECORD = "scored.parquet", "report.json", "record"
TOKENS_PLOT, ROWS_PLOT, TREE_PLOT = "tokens.png", "rows.png", "tree.png"
OUTPUTS = (SCORED, REPORT, TOKENS_PLOT, ROWS_PLOT, TREE_PLOT)


@dataclass(frozen=True, kw_only=True)
class ScoreOptions:
    """What to score and how.

    Attributes:
        rollouts: the rollout file, or a folder of them; None for the bundled one.
        model: a checkpoint folder or .gguf file; None for a small seeded model.
        scorer: which reward is computed; "none" leaves the rollouts' own rewards alone.
        ranks: rows of a micro-batch.
        steps: micro-batches of an optimizer step.
        token_budget: tokens of a row, unique and trained each.
        placement: how the planner fills rows, see `StepPlanner`.
        limit_groups, limit_rows: keep so many groups, and rows of each group.
        estimator, scale: see `group_advantages`.
        mask_truncated: take samples that did not finish out of the loss.
        seed: of the seeded weights.
        compare: also run each sequence alone.
        record: also keep every step, for a replay.
        out: the folder written to.
    """

    rollouts: Path | None = None
    model: Path | None = None
    scorer: ScorerKind | Literal["none"] = "reward-model"
    ranks: int = 2
    steps: int = 2
    token_budget: int = 8192
    placement: Placement = "least_loaded"
    limit_groups: int | None = None
    limit_rows: int | None = None
    estimator: Estimator = "grpo"
    scale: Scale = "group"
    mask_truncated: bool = False
    seed: int = 0
    compare: bool = False
    record: bool = False
    out: Path = Path("treepack-score")

    def __post_init__(self) -> None:
        if self.scorer == "none" and (self.compare or self.model is not None):
            raise OptionError("--compare and --model need a scorer's model, got --scorer none")


def prepare_folder(options: ScoreOptions) -> None:
    """Make the output folder and try that it can be written."""
    folder = options.out
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise OptionError(f"--out {folder}: cannot be written: {error.strerror}") from error
    written = [(folder / name).resolve() for name in OUTPUTS]
    rollouts = options.rollouts.resolve() if options.rollouts else None
    holders = (folder.resolve(), (folder / RECORD).resolve())
    if rollouts and (rollouts in (*written, *holders) or rollouts.parent == holders[1]):
        raise OptionError(f"--out {folder}: the job would write over the rollouts, {options.rollouts}")
