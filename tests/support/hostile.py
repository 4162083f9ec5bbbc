"""Rollouts that would run something if a report let them: in texts, ids, names of columns and of files."""

from pathlib import Path

from support.prompts import POLICY, TextTokenizer, prompt_rows
from support.rollout_files import Row, write_rollouts

MARK = "hostile"
SCRIPT = f"</script><script>window.{MARK} = 1</script>"
PIECES = (
    SCRIPT,
    f'<img src=x onerror="window.{MARK} = 2">',
    f'<a href="javascript:window.{MARK} = 3">link</a>',
    f"<svg onload='window.{MARK} = 4'>",
    "<!--<script>",
    "@@code@@ ]]> %{y} ${1} `",
    f'"\'><iframe srcdoc="<script>parent.{MARK} = 5</script>">',
    "\u2028\u2029\x00\x1b",
    "__proto__",
)
COLUMN = f"rewards/<b onmouseover=window.{MARK}=6>{SCRIPT}"
FILE = f"<img src=x onerror=window.{MARK}=7>.jsonl"


def hostile_rows(tokenizer: TextTokenizer, *, groups: int = 4, rows: int = 4) -> list[Row]:
    """Groups whose prompt begins with the pieces, and whose rollouts and reward column are named by them."""
    made = prompt_rows(tokenizer, lambda group, row: f"Task {group}. {POLICY}", groups=groups, rows=rows)
    pieces = tokenizer.ids(PIECES)
    for i, row in enumerate(made):
        row["input_ids"] = pieces + row["input_ids"]
        row["completion_mask"] = [0] * len(pieces) + row["completion_mask"]
        row["rollout_id"] = f"{PIECES[i % 7]} {i}"
        row["reward"] = float(i % 3 == 0)
        row[COLUMN] = 0.25 * (i % 4)
    return made


def write_hostile(folder: Path) -> tuple[Path, Path]:
    """A rollout file of these and the file of their tokenizer."""
    tokenizer = TextTokenizer()
    rows = hostile_rows(tokenizer)
    return write_rollouts(folder / FILE, rows), tokenizer.save(folder / "tokenizer.json")
