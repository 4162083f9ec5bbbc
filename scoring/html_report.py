"""`treepack report`: one HTML file of a run, with all it needs inside it, which asks no network and runs no other code.

What comes from rollouts (ids, texts, names of columns and files) enters as JSON in a data block and reaches the page as
text nodes only. A Content-Security-Policy allows the scripts written here, by their hashes, and nothing else.
"""

import base64
import hashlib
import html
import json
import math
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from treepack.scoring.errors import OptionError
from treepack.scoring.html_report_data import RunData, read_run
from treepack.scoring.html_report_trees import draw_trees
from treepack.scoring.inspect_text import Decode, load_tokenizer
from treepack.scoring.report import StepReport

MAX_SAMPLES = 20_000
MAX_BINS = 40
MAX_EXACT = 2**53 - 1  # a browser's numbers are float64
TEMPLATES = ("report.html", "report.css", "report.js")


def write_report(folder: Path, out: Path, *, tokenizer: Path | None = None, max_steps: int = 100) -> RunData:
    """Write the HTML report of a folder.

    Args:
        folder: of `treepack score`, or of a `StepRecorder`.
        out: the file to write.
        tokenizer: see `load_tokenizer`; shows the text of segments.
        max_steps: the last so many steps of a record are read, and of a score are drawn.

    Returns:
        What was read.

    Raises:
        OptionError, RolloutError, ModelError: the folder, the file or the tokenizer cannot be used; plotly is missing.
    """
    if find_spec("plotly") is None:
        raise OptionError("treepack report needs plotly: pip install 'treepack[report]'")
    decode = None if tokenizer is None else load_tokenizer(tokenizer)
    run = read_run(folder, max_steps=max_steps)
    text = render(run, decode)
    try:
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise OptionError(f"--out {out}: cannot be written: {error.strerror}") from error
    return run


def render(run: RunData, decode: Decode | None = None) -> str:
    """The report as an HTML document."""
    from plotly.offline import get_plotlyjs

    page, style, code = (
        (resources.files("treepack.scoring") / "data" / name).read_text(encoding="utf-8") for name in TEMPLATES
    )
    scripts = [get_plotlyjs(), code]
    policy = (
        f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src 'unsafe-inline'; "
        "img-src data: blob:; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(run.title),
        "style": style,
        "data": _json(_page_data(run, decode)),
        "plotly": scripts[0],
        "code": scripts[1],
    }
    pieces = page.split("@@")  # text, name, text, name, ..., text
    return "".join(parts[piece] if i % 2 else piece for i, piece in enumerate(pieces))


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _json(value: Any) -> str:
    """JSON that no HTML parser takes for the end of its block."""
    text = json.dumps(_finite(value), allow_nan=False, separators=(",", ":"))
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _finite(value: Any) -> Any:
    """The value with None for numbers that JSON lacks, and as text those that a browser would round: long ids."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    if isinstance(value, int) and abs(value) > MAX_EXACT:
        return str(value)
    if isinstance(value, dict):
        return {name: _finite(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(inner) for inner in value]
    return value


def _page_data(run: RunData, decode: Decode | None) -> dict[str, Any]:
    trees, left_out = draw_trees(run.rows, decode)
    notes = list(run.notes)
    if left_out:
        notes.append(f"prefix trees: {left_out}")
    count = len(run.samples["uid"])
    if count > MAX_SAMPLES:
        notes.append(f"the table of samples holds the last {MAX_SAMPLES:,} of {count:,}")
    return {
        "title": run.title,
        "summary": run.summary,
        "notes": notes,
        "steps": _steps(run),
        "rows": _rows(run.steps),
        "samples": {name: column[-MAX_SAMPLES:] for name, column in run.samples.items()},
        "rewards": [_histogram(name, run.samples[name]) for name in run.reward_columns],
        "advantage": _histogram("advantage", run.samples["advantage"]),
        "reasons": sorted(run.reasons().items(), key=lambda item: -item[1]),
        "trained": sum(not reason for reason in run.samples["reason"]),
        "differences": run.differences,
        "trees": trees,
        "is_text": decode is not None,
    }


def _steps(run: RunData) -> dict[str, list[Any]]:
    """The timeline: a value a step in each column."""
    rewards: dict[int, list[float]] = {}
    trained: dict[int, int] = {}
    for step, reward, reason in zip(run.samples["step"], run.samples["reward"], run.samples["reason"]):
        if step is None:
            continue
        trained[step] = trained.get(step, 0) + (not reason)
        if reward is not None and not math.isnan(reward):
            rewards.setdefault(step, []).append(reward)
    return {
        "step": [step.step for step in run.steps],
        "groups": [step.groups for step in run.steps],
        **{name: [step.total(name) for step in run.steps] for name in ("samples", "raw_tokens", "tokens")},
        "packing_ratio": [step.total("raw_tokens") / step.total("tokens") for step in run.steps],
        "trained_samples": [trained.get(step.step, 0) for step in run.steps],
        "idle": [_idle_share(step) for step in run.steps],
        "reward": [float(np.mean(rewards[step.step])) if step.step in rewards else None for step in run.steps],
    }


def _idle_share(step: StepReport) -> float:
    """Share of attention work for which ranks wait for the slowest of their micro-batch."""
    idle = step.idle("pairs")
    return idle / (idle + step.total("pairs"))


def _rows(steps: list[StepReport]) -> dict[str, list[Any]]:
    """The packed rows: a value a row in each column; `share` is its attention of the largest of its micro-batch."""
    largest: dict[tuple[int, int], int] = {}
    rows = [(step.step, row) for step in steps for row in step.rows]
    for step, row in rows:
        largest[step, row.micro_batch] = max(row.pairs, largest.get((step, row.micro_batch), 0))
    names = ("micro_batch", "rank", "samples", "raw_tokens", "tokens", "trained_tokens", "raw_pairs", "pairs")
    return {
        "step": [step for step, _ in rows],
        **{name: [getattr(row, name) for _, row in rows] for name in names},
        "share": [row.pairs / largest[step, row.micro_batch] for step, row in rows],
    }


def _histogram(name: str, values: list[float | None]) -> dict[str, Any]:
    """Counts of values between edges; a bin a value where there are few different ones."""
    known = np.array([value for value in values if value is not None and not math.isnan(value)], np.float64)
    different = np.unique(known)
    if len(different) <= MAX_BINS // 2:
        counts = [int(np.count_nonzero(known == value)) for value in different]
        return {
            "name": name,
            "centers": different.tolist(),
            "counts": counts,
            "width": None,
            "missing": len(values) - len(known),
        }
    edges = np.histogram_bin_edges(known, "auto")
    if len(edges) > MAX_BINS + 1:
        edges = np.histogram_bin_edges(known, MAX_BINS)
    counts = np.histogram(known, edges)[0].tolist()
    centers = ((edges[1:] + edges[:-1]) / 2).tolist()
    return {
        "name": name,
        "centers": centers,
        "counts": counts,
        "width": float(edges[1] - edges[0]),
        "missing": len(values) - len(known),
    }
