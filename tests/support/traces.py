"""Real rollouts as samples: the full traces where they lie beside the checkout, else the bundled subset."""

from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
FULL = ROOT.parent / "shared" / "data"
BUNDLED = ROOT / "scoring" / "data" / "rollouts.npz"


def trace_paths() -> list[Path]:
    """Every trace there is: the four full ones, when present, and the bundled subset."""
    return [*sorted(FULL.glob("*.npz")), BUNDLED]


def load_trace(
    path: Path, limit_groups: int | None = None, limit_rows: int | None = None
) -> list[list[dict[str, Any]]]:
    """The samples of a trace by group, each with what TRL's rows read.

    Log-probabilities and advantages are not part of a trace: they are drawn, seeded by the file's size.
    `limit_groups` keeps the first groups, `limit_rows` the first rows of each.
    """
    with np.load(path) as trace:
        ids, offsets, group_id = trace["input_ids"].astype(np.int64), trace["offsets"], trace["group_id"]
        mask = np.unpackbits(trace["completion_mask"])[: offsets[-1]].astype(np.int64)
        reward = trace["reward"]
    rng = np.random.default_rng(len(ids))
    old_log_probs = np.where(mask == 1, -rng.exponential(0.5, len(ids)), 0.0).astype(np.float32)
    groups: dict[int, list[dict[str, Any]]] = {}
    for row, (start, stop) in enumerate(zip(offsets[:-1].tolist(), offsets[1:].tolist())):
        groups.setdefault(int(group_id[row]), []).append(
            {
                "input_ids": ids[start:stop],
                "completion_mask": mask[start:stop],
                "old_log_probs": old_log_probs[start:stop],
                "advantage": float(rng.normal()),
                "group_id": int(group_id[row]),
                "metrics": {"reward": float(reward[row])},
            }
        )
    return [samples[:limit_rows] for samples in islice(groups.values(), limit_groups)]
