"""What the sections measure, a row at a time: each is on disk before the next one starts."""

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Row:
    """One measured case.

    Attributes:
        section: "attention", "packing", ...
        case: the workload, or what was done.
        path: which implementation.
        status: "ok", or why there are no speeds: a red check, out of memory, not available here, out of time.
        values: measured numbers by name; the unit is the name's last part ("forward_ms").
    """

    section: str
    case: str
    path: str
    status: str = "ok"
    values: dict[str, float] = field(default_factory=dict)


class RowFile:
    """Appends rows to a file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def append(self, row: Row) -> None:
        """Write the row, and show it."""
        with self._path.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")
        shown = "  ".join(f"{name} {value:.4g}" for name, value in row.values.items())
        print(f"[{row.section}] {row.case} | {row.path} | {row.status}  {shown}", flush=True)

    def read(self) -> list[Row]:
        """All rows so far; a line that was cut short by a crash is left out."""
        lines = self._path.read_text().splitlines() if self._path.exists() else []
        return list(_whole_rows(lines))


def _whole_rows(lines: Iterable[str]) -> Iterable[Row]:
    for line in lines:
        try:
            yield Row(**json.loads(line))
        except json.JSONDecodeError:
            continue
