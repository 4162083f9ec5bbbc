"""Cut scoring/data/rollouts.npz, the rollouts bundled with the package, from the full traces.

    python benchmarks/make_bundled_rollouts.py TRACES

TRACES is the folder of the four traces described in scoring/data/README.md. Groups of three kinds are interleaved, so
that every optimizer step shows independent answers, many samples of one prompt, and conversations with a row a turn.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

DESTINATION = Path(__file__).parents[1] / "scoring" / "data" / "rollouts.npz"


@dataclass(frozen=True)
class Source:
    """Which groups of a trace to take; ids are raised by `first_id` so that they stay unique in the mix."""

    trace: str
    first_id: int
    groups: tuple[int, ...]
    rows_per_group: int


SOURCES = (
    Source("gsm8k_solutions", 0, tuple(range(36)), 4),
    Source("game24_samples", 100_000, (0, 1, 2, 3, 4, 5, 6, 7, 9, 10, 16, 17, 21, 24, 27, 28, 29, 30, 34, 37), 32),
    Source("airline_turns", 200_000, (41, 43, 44, 45), 10_000),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    traces = parser.parse_args().traces
    groups = [group for source in SOURCES for group in _groups(traces, source)]
    groups.sort(key=lambda group: group[0])
    np.savez_compressed(DESTINATION, **_joined([columns for _, columns in groups]))


def _groups(traces: Path, source: Source) -> list[tuple[float, dict[str, NDArray]]]:
    """Each chosen group with its place in the mix, 0 .. 1: every source is spread over the whole file."""
    with np.load(traces / f"{source.trace}.npz") as trace:
        columns = {name: trace[name] for name in trace.files}
    columns["completion_mask"] = np.unpackbits(columns["completion_mask"])[: columns["offsets"][-1]]
    cut = []
    for i, group in enumerate(source.groups):
        rows = np.flatnonzero(columns["group_id"] == group)[: source.rows_per_group]
        cut.append(((i + 0.5) / len(source.groups), _cut(columns, rows, source.first_id)))
    return cut


def _cut(columns: dict[str, NDArray], rows: NDArray[np.intp], first_id: int) -> dict[str, NDArray]:
    spans = list(zip(columns["offsets"][rows], columns["offsets"][rows + 1]))
    cut = {name: np.concatenate([columns[name][a:b] for a, b in spans]) for name in ("input_ids", "completion_mask")}
    cut["lengths"] = np.array([b - a for a, b in spans])
    cut["group_id"] = columns["group_id"][rows] + first_id
    cut["rollout_id"] = columns["rollout_id"][rows] + first_id
    cut["reward"] = columns["reward"][rows]
    return cut


def _joined(groups: list[dict[str, NDArray]]) -> dict[str, NDArray]:
    joined = {name: np.concatenate([group[name] for group in groups]) for name in groups[0]}
    joined["offsets"] = np.cumsum(np.concatenate([[0], joined.pop("lengths")]))
    joined["completion_mask"] = np.packbits(joined["completion_mask"])
    return joined


if __name__ == "__main__":
    main()
